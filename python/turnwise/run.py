"""From a configuration to a run: the task, its arena, the policies and the trainer, put together.

This is the place to read how the rooms fit; a script of your own can do the same with its own parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.arena import Arena, Episode, Filters, OverlongPenalty
from turnwise.arena.resampling import check_stateless
from turnwise.credit import build_rule
from turnwise.naming import code_in, nearest
from turnwise.tasks import Task, build_task
from turnwise.tasks.base import QUESTIONS, check_success_metric, held_out
from turnwise.train.checkpoint import list_checkpoints
from turnwise.train.clients import build_client, check_client
from turnwise.train.config import DEFAULT_CREDIT, RolloutConfig, TrainConfig
from turnwise.train.config_files import ConfigError, Problems, contradictions, to_toml
from turnwise.train.demonstrations import Row, RowReader, Rows, fitting
from turnwise.train.evaluate import Evaluation, describe
from turnwise.train.export import export_policies
from turnwise.train.league import past_models
from turnwise.train.loop import EvalSet, Progress, Trainer
from turnwise.train.models import (
    TINY,
    attach_adapters,
    build_policies,
    check_models,
    check_targets,
    find_device,
    load_models,
    load_references,
    sharing,
)
from turnwise.train.random_state import seed_generators
from turnwise.train.run_folder import RunLock, refuse_buried
from turnwise.train.run_log import RunLog
from turnwise.train.selfplay import Measure, build_callbacks, check_selfplay
from turnwise.train.specialization import resolve_policies
from turnwise.train.trees import sampler_of, tree_problem
from turnwise.train.warm_start import warm_start
from turnwise.types import Actor, CreditAssigner, EpisodeRequest, InferenceClient, Sampling

TINY_CONTEXT = 2048
"""Context of the tiny model, in tokens: a verifier's prompt holds a question and its whole solution."""


class TaskArena(Arena):
    """An arena whose step ``k`` plays the ``k``-th batch of a shipped task; ``k`` is saved with it."""

    def __init__(self, *args: Any, task: Task, rollout: RolloutConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.task, self.rollout = task, rollout
        self.drawn = 0

    def get_batch(self) -> list[EpisodeRequest]:
        self.drawn += 1
        requests = self.task.requests(self.drawn, self.rollout.questions, self.rollout.copies)
        return [replace(request, timeout=self.rollout.timeout) for request in requests]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.drawn = state["drawn"]


@dataclass(slots=True)
class Run:
    """The parts of one run."""

    config: TrainConfig
    task: Task
    tokenizer: Any
    arena: Arena
    trainer: Trainer
    held_out: EvalSet

    def train(self) -> Progress:
        """Train, and leave each policy as a folder under ``run_dir/policies``: see :mod:`turnwise.train.export`."""
        with self.trainer.lock:
            progress = asyncio.run(self.trainer.run())
            adapted = [settings.path for settings in self.config.policies.values() if settings.lora]
            changed = self.config.warm_start.steps > 0 or TINY in adapted
            export_policies(self.trainer.policies, self.tokenizer, self.config.run_dir, own_bases=changed)
        return progress

    def evaluate(self, sampling: Sampling | None = None, *, samples: int = 1) -> Evaluation:
        """Success on the held-out questions, with the trainer's present weights; greedy unless told otherwise."""
        return asyncio.run(self._evaluate(sampling, samples))

    async def _evaluate(self, sampling: Sampling | None, samples: int) -> Evaluation:
        await self.trainer.publish()
        return await self.trainer.evaluate(self.held_out, sampling, samples=samples)

    def close(self) -> None:
        """Free what the client holds, its engines among it. Nothing can be sampled afterwards."""
        asyncio.run(self.arena.client.close())


def train_from_config(config: TrainConfig) -> Run:
    """Build and train; prints held-out success at the end. Goes on from the run folder's newest checkpoint."""
    lock = RunLock(config.run_dir)
    with lock if config.run_dir.is_dir() else nullcontext():  # before models are loaded: another run may write there
        refuse_buried(config)
        run = build_run(config)
        run.trainer.lock = lock
        return _train(run)


def _train(run: Run) -> Run:
    config, log = run.config, run.trainer.log
    if config.steps and not any(policy.trainable for policy in run.trainer.policies.values()):
        raise ConfigError(f"config key 'policies': none is trainable, so {config.steps} steps would train nothing")
    if config.steps == 0 and config.warm_start.steps == 0:
        log.note("steps = 0 and warm_start.steps = 0: nothing to train")
        return run
    log.note(f"{run.task.name}: training for {config.steps} steps in {config.run_dir}")
    progress = run.train()
    log.note(
        f"step {progress.step}: {progress.episodes} episodes, {progress.sampled_tokens} sampled tokens, "
        f"{progress.seconds:.0f} s; {progress.finished(config) or 'stopped'}"
    )
    if run.trainer.interrupted:
        log.note(f"stopped; run the same command again to go on from {run.trainer.checkpoints}")
    else:
        log.note(f"held-out {describe(run.evaluate())}")
    return run


def build_run(config: TrainConfig, *, warm: bool = True, log: RunLog | None = None) -> Run:
    """Everything a run needs, ready to train. Warm-starts where the config asks for it and no checkpoint stands."""
    import torch

    if config.threads:
        torch.set_num_threads(config.threads)
    seed_generators(config.seed)
    task = task_of(config)
    resumes = config.resume and bool(list_checkpoints(config.run_dir / "checkpoints"))
    config, actors, tokenizer, rows = checked(config, task, warm=bool(config.warm_start.steps) and warm and not resumes)
    held, validation = eval_sets(config, task)
    log = log or RunLog.from_config(config)
    few = [len(one.requests) for one in (held, validation) if 0 < len(one.requests) < QUESTIONS]
    if few and config.eval.questions is None:
        log.note(f"task {task.name!r} has {min(few)} held-out questions, fewer than the default of {QUESTIONS}")
    device = find_device(config.device)
    models = load_models(config.policies, partial(tiny, config, task), share_frozen=config.warm_start.steps == 0)
    models = {name: model.to(device) for name, model in models.items()}
    check_targets(models, config.policies)
    if rows is not None:
        run_warm_start(config, rows, actors, tokenizer, models, log.note)
    models = attach_adapters(models, config.policies, config.seed)
    arena = build_arena(config, task, actors, tokenizer, {**models, **past_models(config, models)})
    references = load_references(config.policies, partial(tiny, config, task)) if config.loss.kl.coef else {}
    references = {name: model.to(device) for name, model in references.items()}
    policies = build_policies(config, models, references)
    callbacks = build_callbacks(config, actors, seats_of(task), arena, exploitability_of(task))
    trainer = Trainer(arena, policies, config, validation=validation, log=log, callbacks=callbacks)
    return Run(config, task, tokenizer, arena, trainer, held)


def checked(config: TrainConfig, task: Task, *, warm: bool) -> tuple[TrainConfig, list[Actor], Any, Rows | None]:
    """The config with a policy for every actor, the actors, the tokenizer, and what a ``warm`` start learns from.

    Nothing is written and no weights are read before everything that can be known to be wrong is told at once.
    """
    problems = Problems()
    tokenizer, rows = None, None
    resolved, actors = resolved_config(config, task, problems)
    with problems.gathered():
        find_device(config.device)
    with problems.gathered():
        check_client(config)
    with problems.gathered():
        tokenizer = check_models(resolved.policies, partial(tiny, config, task))
    with problems.gathered():
        rows = warm_start_rows(config, task) if warm else None
    problems.raise_any()
    return resolved, actors, tokenizer, rows


def resolved_config(config: TrainConfig, task: Task, problems: Problems) -> tuple[TrainConfig, list[Actor]]:
    """The config with a policy for every actor, and the actors; ``problems`` hears what can't be on any machine."""
    config = with_credit_of(task, config)
    resolved, actors = config, list(task.actors)
    problems.lines += contradictions(config)
    with problems.gathered():
        build_credit(config)
    with problems.gathered():
        episodes_of(config, task)
    with problems.gathered():
        eval_sets(config, task)
    with problems.gathered():
        actors, resolved = resolve_policies(config, task.actors, task.name)
    with problems.gathered():
        actors = with_quotas(config, actors, task)
    problems.lines += check_selfplay(resolved, actors, seats_of(task), task.name, exploitability_of(task))
    limit, own = config.rollout.max_tokens, {actor.max_tokens for actor in actors}
    if limit != RolloutConfig.model_fields["max_tokens"].default and not own & {None, limit}:
        problems.lines.append(
            f"config key 'rollout.max_tokens' = {limit}: has no effect, as the actors of task {task.name!r} have "
            f"limits of their own ({', '.join(map(str, sorted(filter(None, own))))}): see its task_options"
        )
    return resolved, actors


def dry_run(config: TrainConfig, *, import_code: bool = True) -> str:
    """What a run of ``config`` would be, as TOML, who plays with which policy among it; no model is looked for.

    Where ``config`` names code of the user's own, that is imported to look at it; without ``import_code`` such a config
    is given back with a comment, unchecked beyond its keys. Raises :class:`ConfigError` with a line for each problem.
    """
    if not import_code and (named := list(code_in(config.model_dump()))):
        told = [f"# {key} = {name!r} names code, which was not imported\n" for key, name in named]
        told += ["# so the keys alone were checked; --import-code runs that code and checks all\n"]
        return "".join(told) + to_toml(config)
    problems = Problems()
    resolved, actors = resolved_config(config, task_of(config), problems)
    problems.raise_any()
    players = [f"# actor {actor.id!r} plays with policy {actor.policy!r}\n" for actor in actors]
    return "".join(players) + to_toml(resolved)


def task_of(config: TrainConfig) -> Task:
    """The task that ``config`` names, with its options."""
    return build_task(config.task, {"seed": config.seed, **config.task_options})


def eval_sets(config: TrainConfig, task: Task) -> tuple[EvalSet, EvalSet]:
    """The held-out questions and those for validation, none where there is no validation."""
    n = config.eval.questions
    try:
        asked = [held_out(task, "eval", n), held_out(task, "validation", n) if config.eval.every else []]
    except ValueError as error:
        raise ConfigError(f"config key 'eval.questions' = {n or 'unset'}: {error}") from None
    try:
        check_success_metric(task, task.episodes(), asked[0])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    left, right = (EvalSet(requests, task.success_metric) for requests in asked)
    return left, right


def build_arena(
    config: TrainConfig, task: Task, actors: Sequence[Actor], tokenizer: Any, models: dict[str, Any]
) -> Arena:
    """The task's actors and episodes over the run's client; trees where ``rollout.branches`` > 1."""
    context = min(model.config.max_position_embeddings for model in models.values())
    return arena_over(build_client(config, tokenizer, models), config, task, actors, tokenizer, context)


def arena_over(
    client: InferenceClient,
    config: TrainConfig,
    task: Task,
    actors: Sequence[Actor],
    tokenizer: Any,
    max_context: int | None,
) -> Arena:
    """:func:`build_arena` with another client, for models with ``max_context`` tokens of context."""
    rollout, overlong = config.rollout, (config.reward.overlong_buffer, config.reward.overlong_penalty)
    arena = TaskArena(
        client,
        tokenizer,
        credit=build_credit(config),
        sampling=Sampling(temperature=rollout.temperature, max_tokens=rollout.max_tokens),
        max_concurrency=rollout.max_concurrency,
        max_context=max_context,
        seed=config.seed,
        failure_threshold=rollout.failure_threshold,
        filters=Filters(**config.filter.model_dump()),
        overlong=OverlongPenalty(*overlong) if overlong[0] else None,
        check_private=rollout.check_private,
        task=task,
        rollout=rollout,
    )
    for actor in actors:
        arena.add_actor(actor)
    for name, episode in episodes_of(config, task).items():
        arena.add_episode(name, episode)
    return arena


def seats_of(task: Task) -> Sequence[str]:
    """The actors of ``task`` that play against each other; none where it doesn't say."""
    return getattr(task, "seats", ())


def exploitability_of(task: Task) -> Measure | None:
    """What measures how exploitable a policy is in ``task``; ``None`` for a task that is not solved exactly."""
    solved: Any = task
    if not (hasattr(solved, "solve") and hasattr(solved, "decisions")):
        return None
    from turnwise.tasks.two_player import measure_exploitability

    return partial(measure_exploitability, game=solved)


def episodes_of(config: TrainConfig, task: Task) -> dict[str, Episode]:
    """The task's episodes, with a tree where ``rollout.branches`` or ``rollout.tree`` asks for one."""
    sampler = sampler_of(config, [actor.id for actor in task.actors])
    try:
        return task.episodes(sampler)
    except ValueError as error:
        raise ConfigError(f"config key 'rollout.branches' = {config.rollout.branches}: {error}") from error


def with_quotas(config: TrainConfig, actors: Sequence[Actor], task: Task) -> list[Actor]:
    """The actors with the limits of ``rollout.quotas``, which go before their own."""
    quotas, known = config.rollout.quotas, [actor.id for actor in actors]
    if unknown := [name for name in quotas if name not in known]:
        raise ConfigError(
            "\n".join(
                f"config key 'rollout.quotas.{name}' = {quotas[name]}: task {task.name!r} has no such actor; "
                f"{nearest(name, known)}"
                for name in unknown
            )
        )
    return [replace(actor, max_concurrency=quotas.get(actor.id, actor.max_concurrency)) for actor in actors]


def with_credit_of(task: Task, config: TrainConfig) -> TrainConfig:
    """The config with the rule that the task names, where the config leaves it to the task."""
    if config.credit.rule != "task":
        return config
    rule = getattr(task, "credit_rule", DEFAULT_CREDIT)
    return config.model_copy(update={"credit": config.credit.model_copy(update={"rule": rule})})


def build_credit(config: TrainConfig) -> CreditAssigner:
    """The rule that ``credit.rule`` names, with ``credit.options``."""
    try:
        credit: CreditAssigner = build_rule(config.credit.rule, config.credit.options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if problem := tree_problem(credit, config):
        raise ConfigError(problem)
    if config.filter.resample:
        try:
            check_stateless(credit)
        except ValueError as error:
            raise ConfigError(f"config key 'filter.resample' = {config.filter.resample}: {error}") from error
    return credit


def tiny(config: TrainConfig, task: Task) -> tuple[Any, Any]:
    """Tokenizer and model of ``path = "tiny"``: made from scratch for the task's own texts, equal at each call."""
    from turnwise.tasks.tiny import build_model, build_tokenizer

    tokenizer: Any = build_tokenizer(task.texts())
    return tokenizer, build_model(tokenizer, max_position_embeddings=TINY_CONTEXT, seed=config.seed)


def warm_start_rows(config: TrainConfig, task: Task) -> Rows:
    """The rows of ``warm_start.data``, or as many of the task's own demonstrations as are drawn."""
    settings = config.warm_start
    if settings.data is not None:
        reader = RowReader([actor.id for actor in task.actors], settings.min_reward)
        recorded = reader.read(Path(settings.data))
        return Rows(recorded, f"{len(recorded)} rows of {settings.data}{reader.describe()}")
    shown = task.demonstrations(settings.steps * settings.batch_size, config.seed)
    rows = [Row(messages, text, actor, f"demonstration {i}") for i, (actor, messages, text) in enumerate(shown)]
    return Rows(rows, f"{len(rows)} demonstrations of task {task.name!r}")


def run_warm_start(
    config: TrainConfig,
    rows: Rows,
    actors: Sequence[Actor],
    tokenizer: Any,
    models: dict[str, Any],
    note: Callable[[str], None],
) -> None:
    """Train each model on the rows of the actors that it plays; a shared base on those of all above it."""
    note(f"warm start on {rows.source}")
    policy_of = {actor.id: actor.policy for actor in actors}
    for names in sharing(config.policies, share_frozen=False):
        if not any(config.policies[name].trainable for name in names):
            continue
        warmed = f"policy {names[0]!r}" if len(names) == 1 else f"the base of policies {', '.join(map(repr, names))}"
        own = [row for row in rows.rows if row.actor is None or policy_of[row.actor] in names]
        if not own:
            note(f"warm start of {warmed}: no row is of its actors, so it starts as it is")
            continue
        model = models[names[0]]
        fit = fitting(tokenizer, own, model.config.max_position_embeddings, note)
        loss = warm_start(model, fit, config.warm_start, seed=config.seed)
        note(f"warm start of {warmed}: {config.warm_start.steps} steps, last loss {loss:.3f}")
