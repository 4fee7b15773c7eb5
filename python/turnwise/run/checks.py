"""Checks a configuration against its task and fills in the task's defaults, before a run writes anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.arena import Episode
from turnwise.arena.setup import mix_of, reward_problems
from turnwise.arena.stages.dynamic_sampling import check_stateless
from turnwise.credit import build_rule
from turnwise.credit.by_task import CreditByTask
from turnwise.run.clients import check_client
from turnwise.run.models import describe_models
from turnwise.run.parts import (
    Measure,
    ablations_of,
    build_stages,
    check_choice,
    check_selfplay,
    comparison_problem,
    sampler_of,
    tree_problem,
)
from turnwise.run.policy_sharing import resolve_policies
from turnwise.run.ranks import expected_ranks
from turnwise.run.tinker import check_tinker, is_remote
from turnwise.tasks import Task, build_task
from turnwise.tasks.base import held_out, task_problems
from turnwise.tasks.several import Part, SeveralTasks
from turnwise.train.config.sampling import CreditConfig, RolloutConfig
from turnwise.train.config.schema import GATEWAY_TASKS, TrainConfig
from turnwise.train.config.toml import ConfigError, Problems, to_toml
from turnwise.train.loop import EvalSet
from turnwise.train.model.loading import check_models, find_device
from turnwise.train.resume import settings_to_resume
from turnwise.train.terms.kl import penalty_problem
from turnwise.train.terms.registry import unrewarded_problems
from turnwise.train.update.sft_data import RowReader, SFTRows, demonstrated
from turnwise.train.validate import contradictions
from turnwise.types import (
    Actor,
    CreditAssigner,
    CreditCapabilities,
    EpisodeRequest,
    TaskCapabilities,
    capabilities_of,
)
from turnwise.utils.registry import code_in, did_you_mean

TINY_CONTEXT = 2048
"""Context of the tiny model, in tokens. It must hold a verifier's prompt: a question and its whole solution."""


def check_config(
    config: TrainConfig, task: Task, *, warm: bool, note: Callable[[str], None] | None = None
) -> tuple[TrainConfig, list[Actor], Any, SFTRows | None]:
    """Return the config with a policy for every actor, the actors, the tokenizer, and the rows of a ``warm`` start.

    The function writes nothing and reads no weights. If the run goes on from a checkpoint, ``note`` gets a line for
    each setting that stays as it is there; without ``note`` the config's own are returned. Raises :class:`ConfigError`
    with a line for each problem.
    """
    problems = Problems()
    tokenizer, rows = None, None
    resolved, actors = resolve_config(config, task, problems)
    if note is not None:
        resolved = go_on(resolved, problems, note)
    with problems.gathered():
        find_device(config.device)
    with problems.gathered():
        check_client(resolved)
    with problems.gathered():
        policies = resolved.policies
        if is_remote(config):  # its adapters need no peft here
            policies = {name: each.model_copy(update={"lora": None}) for name, each in policies.items()}
        tokenizer = check_models(policies, partial(tiny_model, config, task))
    with problems.gathered():
        rows = warm_start_rows(config, task) if warm else None
    problems.raise_any()
    return resolved, actors, tokenizer, rows


def resolve_config(config: TrainConfig, task: Task, problems: Problems) -> tuple[TrainConfig, list[Actor]]:
    """Return the config with a policy for every actor, and the actors.

    ``problems`` collects the errors that don't depend on the machine.
    """
    config = with_default_credit(task, config)
    resolved, actors = config, list(task.actors)
    # Keys, credit rule, episodes, questions and actors, each of which may add problems.
    with problems.gathered():
        build_credit(config, task)
    for one, part in parts_of(config, task).values():
        with problems.gathered():
            check_reward(one, episodes_of(one, part))
            check_choice(one, episodes_of(one, part))
    with problems.gathered():
        eval_sets(config, task)
    with problems.gathered():
        build_stages(config, task)
    with problems.gathered():
        actors, resolved = resolve_policies(config, task.actors, task.name)
    with problems.gathered():
        actors = with_quotas(config, actors, task)
    problems.lines += contradictions(resolved, expected_ranks(resolved), task.episodes().values())
    problems.lines += check_tinker(resolved)
    problems.lines += unrewarded_problems(resolved, actors)
    seats = capabilities_of(task, TaskCapabilities).seats
    problems.lines += check_selfplay(resolved, actors, seats, task.name, exploitability_of(task))
    if config.eval.exploitability_every and exploitability_of(task) is not None:
        with problems.gathered():
            check_solvable(config, task)
    # A token limit that every actor overrides would have no effect.
    limit, limits = config.rollout.max_tokens, {actor.max_tokens for actor in actors}
    if limit != RolloutConfig.model_fields["max_tokens"].default and not limits & {None, limit}:
        problems.lines.append(
            f"config key 'rollout.max_tokens' = {limit}: has no effect, as the actors of task {task.name!r} have "
            f"their own limits ({', '.join(map(str, sorted(filter(None, limits))))}): see its task_options"
        )
    return resolved, actors


def go_on(config: TrainConfig, problems: Problems, note: Callable[[str], None]) -> TrainConfig:
    """Return the settings with which the run of the resolved ``config`` goes on from its checkpoint, if it has one."""
    going_on = settings_to_resume(config)
    problems.lines += going_on.refused
    for line in going_on.kept:
        note(line)
    return going_on.config


def dry_run(config: TrainConfig, *, import_code: bool = True) -> str:
    """Describe a run of ``config`` as TOML, with its models and the policy of each actor.

    It reads the configs of models on this machine, and tries small ones (:func:`~turnwise.run.models.ask_models`).

    The function imports user code that ``config`` names. Without ``import_code`` it returns such a config with a
    comment, and checks no more than its keys. Raises :class:`ConfigError` with a line for each problem.
    """
    if not import_code and (named := list(code_in(config.model_dump()))):
        lines = [f"# {key} = {name!r} names code, which was not imported\n" for key, name in named]
        lines += ["# so the keys alone were checked; --import-code runs that code and checks all\n"]
        return "".join(lines) + to_toml(config)
    problems = Problems()
    task = task_of(config)
    resolved, actors = resolve_config(config, task, problems)
    with problems.gathered():
        check_questions(resolved, task)
    notes: list[str] = []
    resolved = go_on(resolved, problems, notes.append)
    problems.raise_any()
    with problems.gathered():
        models = [] if is_remote(config) else describe_models(resolved, partial(tiny_model, config, task))
    problems.raise_any()
    lines = [f"# {line}\n" for line in [*notes, *models]]
    lines += [f"# actor {actor.id!r} plays with policy {actor.policy!r}\n" for actor in actors]
    lines += [f"# actor {name!r} is taught by policy {teacher!r}\n" for name, teacher in resolved.teachers().items()]
    for name, episode in episodes_of(config, task).items():
        mix = mix_of(episode, config.reward.of_mix())
        lines.append(f"# rewards of episode {name!r}: {mix}\n")
    return "".join(lines) + to_toml(resolved)


def task_of(config: TrainConfig) -> Task:
    """Build the task that ``config`` names, with its options, or the several of ``[tasks.<name>]``."""
    if config.tasks:
        served = any((one.task or name).startswith(GATEWAY_TASKS) for name, one in config.tasks.items())
        if config.gateway and not served:
            raise ConfigError(
                "config section 'gateway': has no effect: expected one of [tasks.<name>] with 'gateway:...'"
            )
        parts: dict[str, Part] = {}
        for name, one in config.tasks.items():
            try:
                parts[name] = Part(task_of(config.of_task(name)), one.weight)
            except ValueError as error:
                raise ConfigError(f"config section 'tasks.{name}': {error}") from error
        try:
            return SeveralTasks(parts)
        except ValueError as error:
            raise ConfigError(f"config section 'tasks': {error}") from error
    options = {"seed": config.seed, **config.task_options}
    if config.gateway and not config.task.startswith(GATEWAY_TASKS):
        raise ConfigError(
            f"config section 'gateway': has no effect on task {config.task!r}: expected 'gateway:...', 'verifiers:...'"
        )
    if config.gateway:
        options["gateway"] = config.gateway
    return build_task(config.task, options)


def eval_sets(config: TrainConfig, task: Task) -> tuple[EvalSet, EvalSet]:
    """Return the held-out questions and the validation questions; the latter are empty without validation."""
    n = config.eval.num_prompts
    try:
        asked = [held_out(task, "eval", n), held_out(task, "validation", n) if config.eval.every else []]
    except ValueError as error:
        raise ConfigError(f"config key 'eval.num_prompts' = {n or 'unset'}: {error}") from None
    if problems := _problems_of(task, [*asked[0], *asked[1]]):
        raise ConfigError("\n".join(problems))
    try:
        ablations = ablations_of(task) if config.eval.ablate else []
    except ValueError as error:
        raise ConfigError(f"config key 'eval.ablate' = true: {error}") from None
    held, validation = asked
    return EvalSet(held, task.success_metric), EvalSet(validation, task.success_metric, ablations)


def check_questions(config: TrainConfig, task: Task) -> None:
    """Raise :class:`ConfigError` if the task can't ask the training questions of a step, or these train nothing, or it
    has no demonstrations for the warm start.

    ``config`` is resolved.
    """
    if config.warm_start.steps and config.warm_start.data is None:
        try:
            task.demonstrations(1, config.seed)
        except ValueError as error:
            raise ConfigError(f"config key 'warm_start.steps' = {config.warm_start.steps}: {error}") from None
    if not config.steps:
        return
    questions = config.rollout.prompts_per_step
    try:
        asked = task.requests(1, questions, 1)
    except ValueError as error:
        raise ConfigError(f"config key 'rollout.prompts_per_step' = {questions}: {error}") from None
    problems = _problems_of(task, asked, measured=False)
    for one, part in parts_of(config, task).values():
        problems += filter(None, [comparison_problem(build_credit(one, part), one, part)])
    if problems:
        raise ConfigError("\n".join(problems))


def _problems_of(task: Task, requests: Sequence[EpisodeRequest], *, measured: bool = True) -> list[str]:
    if isinstance(task, SeveralTasks):
        return task.problems(requests, measured=measured)
    return task_problems(task, task.episodes(), requests, measured=measured)


def parts_of(config: TrainConfig, task: Task) -> dict[str, tuple[TrainConfig, Task]]:
    """Return each of several tasks with its config, by name; one task under its own name."""
    if not isinstance(task, SeveralTasks):
        return {task.name: (config, task)}
    alone = {name: config.of_task(name) for name in task.parts}
    return {name: (with_default_credit(part.task, alone[name]), part.task) for name, part in task.parts.items()}


def exploitability_of(task: Task) -> Measure | None:
    """Return the exploitability measure of ``task``, or ``None`` for a task that is not solved exactly."""
    from turnwise.tasks.two_player import SolvedGame, measure_exploitability

    return partial(measure_exploitability, game=task) if isinstance(task, SolvedGame) else None


def check_solvable(config: TrainConfig, task: Any) -> None:
    """Raise :class:`ConfigError` if the game of ``task`` is too large, or not of a kind that can be solved."""
    try:
        task.decisions()
    except ValueError as error:
        raise ConfigError(
            f"config key 'eval.exploitability_every' = {config.eval.exploitability_every}: {error}"
        ) from error


def episodes_of(config: TrainConfig, task: Task) -> dict[str, Episode]:
    """Build the task's episodes, with a tree if ``rollout.branches`` or ``rollout.tree`` sets one."""
    sampler = sampler_of(config, [actor.id for actor in task.actors])
    try:
        return task.episodes(sampler)
    except ValueError as error:
        raise ConfigError(f"config key 'rollout.branches' = {config.rollout.branches}: {error}") from error


def check_reward(config: TrainConfig, episodes: Mapping[str, Episode]) -> None:
    """Raise :class:`ConfigError` for keys of ``[reward]`` that no episode supports, or that don't fit together."""
    reward = config.reward.of_mix()
    lines = [
        f"config key 'reward.{key}' = {reward[key]!r}: {reason}" for key, reason in reward_problems(episodes, reward)
    ]
    for episode in episodes.values() if not lines else ():
        try:
            mix_of(episode, reward)
        except ValueError as error:
            lines = [f"config section 'reward': {error}"]
    if lines:
        raise ConfigError("\n".join(lines))


def with_quotas(config: TrainConfig, actors: Sequence[Actor], task: Task) -> list[Actor]:
    """Return the actors with the limits of ``rollout.max_concurrency_per_actor``, which override their own."""
    quotas, names = config.rollout.max_concurrency_per_actor, [actor.id for actor in actors]
    if unknown := [name for name in quotas if name not in names]:
        raise ConfigError(
            "\n".join(
                f"config key 'rollout.max_concurrency_per_actor.{name}' = {quotas[name]}: "
                f"task {task.name!r} has no such actor; {did_you_mean(name, names)}"
                for name in unknown
            )
        )
    return [replace(actor, max_concurrency=quotas.get(actor.id, actor.max_concurrency)) for actor in actors]


def with_default_credit(task: Task, config: TrainConfig) -> TrainConfig:
    """Replace ``credit.rule = "task"`` by the task's own credit rule; of several tasks each gets its section."""
    if isinstance(task, SeveralTasks):
        rules = {name: with_default_credit(part.task, config.of_task(name)).credit for name, part in task.parts.items()}
        own = {name: one.model_copy(update={"credit": rules[name]}) for name, one in config.tasks.items()}
        return config.model_copy(update={"tasks": own, "credit": CreditConfig()})
    if config.credit.rule != "task":
        return config
    declared = capabilities_of(task, TaskCapabilities)
    credit = {"rule": declared.credit_rule, "options": {**declared.credit_options, **config.credit.options}}
    return config.model_copy(update={"credit": config.credit.model_copy(update=credit)})


def build_credit(config: TrainConfig, task: Task) -> CreditAssigner:
    """Build the rule that ``credit.rule`` names, with ``credit.options``, for each of several tasks its own.

    Raises :class:`ConfigError`.
    """
    if isinstance(task, SeveralTasks):
        rules = {}
        for name, (one, part) in parts_of(config, task).items():
            try:
                rules[name] = build_credit(one, part)
            except ConfigError as error:
                raise ConfigError(f"config section 'tasks.{name}': {error}") from error
        return CreditByTask(rules, task.part_of_type())
    try:
        credit: CreditAssigner = build_rule(config.credit.rule, config.credit.options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if problem := tree_problem(credit, config):
        raise ConfigError(problem)
    can = capabilities_of(credit, CreditCapabilities)
    if config.reward.turn_shaping not in (None, "none") and not can.step_rewards:
        raise ConfigError(
            f"config key 'reward.turn_shaping' = {config.reward.turn_shaping!r}: the rule {config.credit.rule!r} does "
            "not compare the rewards of single calls: expected a rule such as 'grpo', 'dr_mas' or 'at_grpo'"
        )
    changed = sorted(config.reward.model_dump(exclude_defaults=True))
    if changed and not can.mixed_rewards:
        raise ConfigError(
            f"config key 'reward.{changed[0]}' = {getattr(config.reward, changed[0])!r}: has no effect, as advantages "
            f"of the rule {config.credit.rule!r} don't depend on the rewards of calls: expected no setting here"
        )
    if problem := penalty_problem(config, can):
        raise ConfigError(problem)
    if config.filter.dynamic_sampling_rounds:
        try:
            check_stateless(credit)
        except ValueError as error:
            raise ConfigError(
                f"config key 'filter.dynamic_sampling_rounds' = {config.filter.dynamic_sampling_rounds}: {error}"
            ) from error
    return credit


def tiny_model(config: TrainConfig, task: Task) -> tuple[Any, Any]:
    """Build the tokenizer and the model of ``path = "tiny"`` for the task's texts; every call returns equal ones."""
    from turnwise.tasks.tiny import build_model, build_tokenizer

    tokenizer: Any = build_tokenizer(task.texts())
    return tokenizer, build_model(tokenizer, max_position_embeddings=TINY_CONTEXT, seed=config.seed)


def warm_start_rows(config: TrainConfig, task: Task) -> SFTRows:
    """Return the rows of ``warm_start.data``, or else one demonstration of the task for each row to be drawn."""
    settings = config.warm_start
    if settings.data is not None:
        reader = RowReader([actor.id for actor in task.actors], settings.min_reward)
        recorded = reader.read(Path(settings.data))
        return SFTRows(recorded, f"{len(recorded)} rows of {settings.data}{reader.describe()}")
    shown = task.demonstrations(settings.steps * settings.batch_size, config.seed)
    rows = demonstrated(shown, [actor.id for actor in task.actors], f"task {task.name!r}")
    return SFTRows(rows, f"{len(rows)} demonstrations of task {task.name!r}")
