"""Checks a configuration against its task and fills in the task's defaults, before a run writes anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from turnwise.arena import Episode
from turnwise.arena.setup import mix_of
from turnwise.arena.stages.auto_concurrency import auto_note
from turnwise.run.clients import check_client
from turnwise.run.models import check_templates, check_tools, check_vocabularies, describe_models, tokenizer_here
from turnwise.run.parts import FactsOfTask, build_stages, episodes_of, with_default_credit
from turnwise.run.policy_sharing import resolve_policies
from turnwise.run.ranks import expected_ranks
from turnwise.run.start import check_targets, players_of
from turnwise.tasks import Task, build_task
from turnwise.tasks.several import Part, SeveralTasks
from turnwise.train.checkpoint.listing import checkpoints_to_resume
from turnwise.train.checkpoint.vocabulary import check_vocabulary
from turnwise.train.config.schema import GATEWAY_TASKS, TrainConfig
from turnwise.train.config.toml import ConfigError, Problems, to_toml
from turnwise.train.model.loading import check_models, find_device
from turnwise.train.resume import settings_to_resume
from turnwise.train.update.sft_rows import RowReader, SFTRows, demonstrated
from turnwise.train.validate import contradictions
from turnwise.types import Actor, ByPolicy

TINY_CONTEXT = 2048
"""Context of the tiny model, in tokens. It must hold a verifier's prompt: a question and its whole solution."""


def check_config(
    config: TrainConfig, task: Task, *, warm: bool, trains: bool = False, note: Callable[[str], None] | None = None
) -> tuple[TrainConfig, list[Actor], ByPolicy[Any], SFTRows | None]:
    """Return the config with a policy for every actor, the actors, the tokenizers, and the rows of a ``warm`` start.

    The function writes nothing and reads no weights. If the run goes on from a checkpoint, ``note`` gets a line for
    each setting that stays as it is there; without ``note`` the config's own are returned. Raises :class:`ConfigError`
    with a line for each problem.
    """
    problems = Problems()
    tokenizers, rows = None, None
    resolved, actors = resolve_config(config, task, problems, trains=trains)
    if note is not None:
        resolved = go_on(resolved, problems, note)
    with problems.gathered():
        find_device(config.device)
    with problems.gathered():
        check_client(resolved)
    with problems.gathered():
        tiny, remote = partial(tiny_model, config, task), config.learner.is_remote
        tokenizers = check_models(resolved.policies, tiny, adapts=not remote)
        check_vocabularies(resolved, actors, tiny)
    with problems.gathered():
        if tokenizers is not None:
            check_tools(resolved, actors, tokenizers.__getitem__)
    with problems.gathered():
        if tokenizers is not None and note is not None:
            check_vocabulary(resolved, lambda: tokenizers)
    with problems.gathered():
        rows = warm_start_rows(config, task) if warm else None
        if rows is not None:
            check_targets(resolved, rows, players_of(task, actors))
    problems.raise_any()
    assert tokenizers is not None
    return resolved, actors, tokenizers, rows


def resolve_config(
    config: TrainConfig, task: Task, problems: Problems, *, trains: bool = False
) -> tuple[TrainConfig, list[Actor]]:
    """Return the config with a policy for every actor, and the actors.

    ``problems`` collects the errors that don't depend on the machine, with ``trains`` also what would stop the first
    step.
    """
    actors, resolved = resolve_policies(with_default_credit(task, config), task.actors)
    quotas = resolved.rollout.max_concurrency_per_actor
    actors = [replace(actor, max_concurrency=quotas.get(actor.id, actor.max_concurrency)) for actor in actors]
    facts = FactsOfTask(resolved, task, actors)
    problems.lines += contradictions(resolved, expected_ranks(resolved), facts, trains=trains)
    with problems.gathered():
        build_stages(resolved, task)
    return resolved, actors


def check_questions(config: TrainConfig, task: Task) -> None:
    """Raise :class:`ConfigError` for what would stop the first step of the resolved ``config``."""
    problems = Problems()
    resolve_config(config, task, problems, trains=True)
    problems.raise_any()


def go_on(config: TrainConfig, problems: Problems, note: Callable[[str], None]) -> TrainConfig:
    """Return the settings with which the run of the resolved ``config`` goes on from its checkpoint, if it has one."""
    going_on = settings_to_resume(config)
    problems.lines += going_on.refused
    for line in going_on.kept:
        note(line)
    return going_on.config


def dry_run(config: TrainConfig) -> str:
    """Describe a run of ``config`` as TOML, with its models and the policy of each actor.

    It reads the configs of models on this machine, and tries small ones (:func:`~turnwise.run.models.ask_models`).

    The function imports user code that ``config`` names. Raises :class:`ConfigError` with a line for each problem.
    """
    problems = Problems()
    task = task_of(config)
    resolved, actors = resolve_config(config, task, problems, trains=True)
    notes: list[str] = []
    resolved = go_on(resolved, problems, notes.append)
    problems.raise_any()
    with problems.gathered():
        tiny = partial(tiny_model, config, task)
        check_vocabulary(resolved, lambda: check_models(resolved.policies, tiny, adapts=not config.learner.is_remote))
    with problems.gathered():
        check_vocabularies(resolved, actors, tiny)
    with problems.gathered():
        check_templates(resolved, tiny)
    with problems.gathered():
        check_tools(resolved, actors, cache(lambda name: tokenizer_here(resolved.policies[name], tiny)))
    with problems.gathered():
        check_warm_start(resolved, task, actors)
    with problems.gathered():
        models = [] if config.learner.is_remote else describe_models(resolved, tiny)
    problems.raise_any()
    if resolved.rollout.max_concurrency == "auto":
        notes.append(auto_note(resolved.cluster.has_engines or resolved.rollout.client == "vllm"))
    lines = [f"# {line}\n" for line in [*notes, *models]]
    lines += [f"# {line}\n" for line in rules_of(config, task)]
    for actor in actors:
        frozen = "" if resolved.policies[actor.policy].trainable else ", which is frozen: it does not train"
        lines.append(f"# actor {actor.id!r} plays with policy {actor.policy!r}{frozen}\n")
    lines += [f"# actor {name!r} is taught by policy {teacher!r}\n" for name, teacher in resolved.teachers().items()]
    for name, episode in episodes_of(config, task).items():
        lines.append(f"# rewards of episode {name!r}: {describe_mix(episode, config.reward.of_mix())}\n")
    return "".join(lines) + to_toml(resolved)


def rules_of(config: TrainConfig, task: Task) -> list[str]:
    """Return a line for each credit rule that the config leaves to its task."""
    lines = []
    for name, part, one in (
        [(name, part.task, config.of_task(name)) for name, part in task.parts.items()]
        if isinstance(task, SeveralTasks)
        else [(task.name, task, config)]
    ):
        if one.credit.rule == "task":
            chosen = with_default_credit(part, one).credit
            options = f", with the options {chosen.options}" if chosen.options else ""
            lines.append(f"credit.rule = 'task' is {chosen.rule!r} for task {name!r}{options}")
    return lines


def describe_mix(episode: Episode, reward: Mapping[str, Any]) -> str:
    """Return the settings of ``[reward]`` that an episode serves, as ``alpha = 1.0, mode = 'weighted_sum'``."""
    refused, mix = episode.unserved_rewards(), mix_of(episode, reward)
    served = {one.name: getattr(mix, one.name) for one in fields(mix) if one.name not in refused}
    return ", ".join(f"{key} = {value!r}" for key, value in served.items() if value is not None) or "as its rubric says"


def task_of(config: TrainConfig) -> Task:
    """Build the task that ``config`` names, with its options, or the several of ``[tasks.<name>]``."""
    if config.tasks:
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
    served = {"gateway": config.gateway} if config.gateway and config.task.startswith(GATEWAY_TASKS) else {}
    return build_task(config.task, {"seed": config.seed, **config.task_options, **served})


def check_warm_start(config: TrainConfig, task: Task, actors: Sequence[Actor]) -> None:
    """Raise :class:`ConfigError` for a target of the warm start that its rows can't measure."""
    if config.warm_start.steps and config.warm_start.targets() and not checkpoints_to_resume(config):
        check_targets(config, warm_start_rows(config, task), players_of(task, actors))


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
