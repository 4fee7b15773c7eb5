"""From a configuration to a run: the task, its arena, the policies and the trainer, put together.

This is the place to read how the rooms fit; a script of your own can do the same with its own parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwise.arena import Arena, Filters, OverlongPenalty, TreeSampler
from turnwise.arena.resampling import check_stateless
from turnwise.credit import registry as credit_rules
from turnwise.inference import TransformersClient
from turnwise.naming import construct, find
from turnwise.tasks import Task, build_task
from turnwise.train.checkpoint import list_checkpoints, load_weights
from turnwise.train.config import PolicyConfig, RolloutConfig, TrainConfig
from turnwise.train.config_files import ConfigError, to_toml
from turnwise.train.evaluate import Evaluation
from turnwise.train.loop import EvalSet, Progress, Trainer
from turnwise.train.policy import Policy
from turnwise.train.run_log import RunLog
from turnwise.train.warm_start import Demonstration, warm_start
from turnwise.types import CreditAssigner, EpisodeRequest, Sampling

TINY_CONTEXT = 2048
"""Context of the tiny model, in tokens: a verifier's prompt holds a question and its whole solution."""

CREDIT_METHODS = ("compute", "compute_columns", "state_dict", "load_state_dict")


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
        """Train, and leave each policy as a folder that ``transformers`` loads, under ``run_dir/policies``."""
        (self.config.run_dir / "config.toml").write_text(to_toml(self.config), encoding="utf-8")
        progress = asyncio.run(self.trainer.run())
        for name, policy in self.trainer.policies.items():
            folder = self.config.run_dir / "policies" / name
            model: Any = policy.model
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        return progress

    def evaluate(self) -> Evaluation:
        """Greedy success on the held-out questions, with the trainer's present weights."""
        return asyncio.run(self._evaluate())

    async def _evaluate(self) -> Evaluation:
        await self.trainer.publish()
        return await self.trainer.evaluate(self.held_out)


def train_from_config(config: TrainConfig) -> Run:
    """Build and train; prints held-out success at the end. Goes on from the run folder's newest checkpoint."""
    run = build_run(config)
    log = run.trainer.log
    if config.steps == 0:
        log.note("steps = 0: nothing to train")
        return run
    log.note(f"{run.task.name}: training for {config.steps} steps in {config.run_dir}")
    progress = run.train()
    log.note(
        f"step {progress.step}: {progress.episodes} episodes, {progress.sampled_tokens} sampled tokens, "
        f"{progress.seconds:.0f} s"
    )
    if run.trainer.interrupted:
        log.note(f"stopped; run the same command again to go on from {run.trainer.checkpoints}")
    else:
        log.note(f"held-out {describe(run.evaluate())}")
    return run


def evaluate_from_config(config: TrainConfig, checkpoint: Path | None = None) -> Evaluation:
    """Held-out success of a checkpoint: the given one, else the run folder's newest, else the starting weights."""
    newest = list_checkpoints(config.run_dir / "checkpoints")
    chosen = checkpoint or (newest[-1] if newest else None)
    run = build_run(config.model_copy(update={"resume": False}), warm=chosen is None)
    if chosen is not None:
        load_weights(chosen, run.trainer.policies)
    result = run.evaluate()
    run.trainer.log.note(f"{chosen or 'starting weights'}: {describe(result)}")
    return result


def describe(result: Evaluation) -> str:
    """``success 91.0% (95% interval 86.2–94.3%, 200 questions)``."""
    failed = f", {result.failed} failed" if result.failed else ""
    return (
        f"success {result.success:.1%} (95% interval {result.low:.1%}–{result.high:.1%}, "
        f"{result.episodes} questions{failed})"
    )


def build_run(config: TrainConfig, *, warm: bool = True, log: RunLog | None = None) -> Run:
    """Everything a run needs, ready to train. Warm-starts where the config asks for it and no checkpoint stands."""
    import torch

    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    task = build_task(config.task, {"seed": config.seed, **config.task_options})
    missing = [actor for actor in task.actors if actor.policy not in config.policies]
    if missing:
        raise ConfigError(
            f"actor {missing[0].id!r} plays with policy {missing[0].policy!r}, which has no section "
            f"[policies.{missing[0].policy}]; policies: {', '.join(config.policies)}"
        )
    unused = set(config.policies) - {actor.policy for actor in task.actors}
    if unused:
        played = ", ".join(f"{actor.id!r} with {actor.policy!r}" for actor in task.actors)
        raise ConfigError(
            f"config key 'policies.{min(unused)}': no actor of task {task.name!r} plays with it: {played}"
        )
    build_credit(config)
    # A wrong rule and too few questions must show now, not after the training.
    try:
        held_out = EvalSet(task.eval_requests("eval", config.eval.questions), task.success_metric)
        checked = task.eval_requests("validation", config.eval.questions) if config.eval.every else []
    except ValueError as error:
        raise ConfigError(f"config key 'eval.questions' = {config.eval.questions}: {error}") from None
    validation = EvalSet(checked, task.success_metric)
    log = log or RunLog.from_config(config)
    tokenizer, models = load_models(config, task)
    resumes = config.resume and bool(list_checkpoints(config.run_dir / "checkpoints"))
    if config.warm_start.steps and warm and not resumes:
        run_warm_start(config, task, tokenizer, models, log.note)
    arena = build_arena(config, task, tokenizer, models)
    updates = config.steps * config.update.ppo_epochs * config.update.minibatches
    policies = {
        name: Policy(
            name,
            model,
            config.update,
            total_steps=updates,
            trainable=config.policies[name].trainable,
            with_reference=config.loss.kl.coef > 0 and config.policies[name].trainable,
        )
        for name, model in models.items()
    }
    trainer = Trainer(arena, policies, config, validation=validation, log=log)
    return Run(config, task, tokenizer, arena, trainer, held_out)


def build_arena(config: TrainConfig, task: Task, tokenizer: Any, models: dict[str, Any]) -> Arena:
    """The task's actors and episodes over an embedded client; trees where ``rollout.branches`` > 1."""
    rollout, overlong = config.rollout, (config.reward.overlong_buffer, config.reward.overlong_penalty)
    arena = TaskArena(
        TransformersClient(models, tokenizer, max_batch_rows=rollout.max_batch_rows),
        tokenizer,
        credit=build_credit(config),
        sampling=Sampling(temperature=rollout.temperature, max_tokens=rollout.max_tokens),
        max_concurrency=rollout.max_concurrency,
        max_context=min(model.config.max_position_embeddings for model in models.values()),
        seed=config.seed,
        failure_threshold=rollout.failure_threshold,
        filters=Filters(**config.filter.model_dump()),
        overlong=OverlongPenalty(*overlong) if overlong[0] else None,
        task=task,
        rollout=rollout,
    )
    for actor in task.actors:
        arena.add_actor(actor)
    tree = TreeSampler(branches=rollout.branches) if rollout.branches > 1 else None
    for name, episode in task.episodes(tree).items():
        arena.add_episode(name, episode)
    return arena


def build_credit(config: TrainConfig) -> CreditAssigner:
    """The rule that ``credit.rule`` names, with ``credit.options``."""
    try:
        rule = find(credit_rules, config.credit.rule, "credit.rule")
        credit = construct(rule, config.credit.options, "credit.options")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if missing := [name for name in CREDIT_METHODS if not callable(getattr(credit, name, None))]:
        raise ConfigError(
            f"config key 'credit.rule' = {config.credit.rule!r}: expected a class with {', '.join(CREDIT_METHODS)}, "
            f"such as a subclass of turnwise.credit.Credit; {missing[0]!r} is missing"
        )
    if config.rollout.branches > 1 and not getattr(credit, "trees", True):
        raise ConfigError(
            f"config key 'credit.rule' = {config.credit.rule!r}: the rule needs plain trajectories: expected "
            f"rollout.branches = 1, not {config.rollout.branches}"
        )
    if config.filter.resample:
        try:
            check_stateless(credit)
        except ValueError as error:
            raise ConfigError(f"config key 'filter.resample' = {config.filter.resample}: {error}") from error
    return credit


def load_models(config: TrainConfig, task: Task) -> tuple[Any, dict[str, Any]]:
    """One tokenizer for all policies, and a model each. ``"tiny"`` is made from scratch for the task's own texts."""
    from transformers import AutoTokenizer

    paths = {settings.path for settings in config.policies.values()}
    if paths == {"tiny"}:
        from turnwise.tasks.tiny import build_model, build_tokenizer

        tokenizer: Any = build_tokenizer(task.texts())
        return tokenizer, {
            name: prepare(
                build_model(tokenizer, max_position_embeddings=TINY_CONTEXT, seed=config.seed + index), settings
            )
            for index, (name, settings) in enumerate(config.policies.items())
        }
    if "tiny" in paths:
        raise ConfigError(
            "config key 'policies': \"tiny\" has a tokenizer of its own and can't stand beside other models"
        )
    first = next(iter(config.policies.values()))
    tokenizer = AutoTokenizer.from_pretrained(first.path)
    if tokenizer.chat_template is None:
        raise ConfigError(f"model {first.path!r}: its tokenizer has no chat template; use an instruction-tuned model")
    for name, settings in config.policies.items():
        if settings.path != first.path:
            other = AutoTokenizer.from_pretrained(settings.path)
            if other.get_vocab() != tokenizer.get_vocab():
                raise ConfigError(
                    f"policy {name!r}: the tokenizer of {settings.path!r} differs from that of {first.path!r}; "
                    "the policies of one run must share theirs"
                )
    return tokenizer, {name: load_model(settings) for name, settings in config.policies.items()}


def load_model(settings: PolicyConfig) -> Any:
    """A causal LM from a folder or the hub. Raises ``OSError`` naming what was not found."""
    import torch
    from transformers import AutoModelForCausalLM

    return prepare(AutoModelForCausalLM.from_pretrained(settings.path, dtype=getattr(torch, settings.dtype)), settings)


def prepare(model: Any, settings: PolicyConfig) -> Any:
    """``model`` with the dtype and the memory saving that its section asks for."""
    import torch

    model = model.to(getattr(torch, settings.dtype))
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def run_warm_start(
    config: TrainConfig, task: Task, tokenizer: Any, models: dict[str, Any], note: Callable[[str], None]
) -> None:
    """Train each model on the demonstrations of the actors that it plays."""
    count = config.warm_start.steps * config.warm_start.batch_size
    rows = task.demonstrations(count, config.seed)
    policy_of = {actor.id: actor.policy for actor in task.actors}
    for name, model in models.items():
        if not config.policies[name].trainable:
            continue
        own = [tokenize(tokenizer, messages, text) for actor, messages, text in rows if policy_of[actor] == name]
        loss = warm_start(model, own, config.warm_start, seed=config.seed)
        note(f"warm start of policy {name!r}: {config.warm_start.steps} steps, last loss {loss:.3f}")


def tokenize(tokenizer: Any, messages: Any, completion: str) -> Demonstration:
    """The prompt as a model call would send it, and the completion as a model would sample it, stop token included."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return Demonstration(prompt, [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id])
