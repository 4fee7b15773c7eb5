"""Builds a league from a configuration, and checks its requirements on the task and the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from turnwise.inference.weights.lora import AdaptedModel
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.league.league import MATCHMAKERS, League, Matchmaker
from turnwise.train.league.pool import OpponentSlots, slot_names
from turnwise.train.model.loading import peft_config
from turnwise.types import Actor, InferenceClient
from turnwise.utils.registry import build_with_options, import_class

FOLDER = "league"
"""Folder of past policies, inside the run folder."""

CLIENTS: dict[str, bool] = {"transformers": True, "vllm": False}
"""Clients that can hold frozen policies in addition to the live ones. ``True``: also full models; ``False``: only
adapters, because a vLLM server has one base model, so each full copy would need another server."""


def check_league(config: TrainConfig, actors: Sequence[Actor], seats: Sequence[str], task: str) -> list[str]:
    """List the problems that prevent league games with ``config`` (with resolved policies), one line each."""
    if not config.league.share:
        return []
    problems = []
    try:
        build_matchmaker(config)
    except ConfigError as error:
        problems.append(str(error))
    key = f"config key 'league.share' = {config.league.share}"
    reasons = [*_task_problems(config, actors, seats, task), *_client_problems(config)]
    return problems + [f"{key}: {reason}" for reason in reasons]


def _task_problems(config: TrainConfig, actors: Sequence[Actor], seats: Sequence[str], task: str) -> list[str]:
    """List the reasons why the task and the settings don't allow games against past policies."""
    problems = []
    questions, share = config.rollout.prompts_per_step, config.league.share
    if len(seats) < 2:
        problems.append(f"task {task!r} has no seats that play against each other")
    elif share * questions < len(seats) / 2:
        problems.append(
            f"of rollout.prompts_per_step = {questions} that is no question from each of {len(seats)} seats"
        )
    if config.filter.dynamic_sampling_rounds:
        problems.append("needs filter.dynamic_sampling_rounds = 0, as each draw would seat others")
    if config.rollout.branches > 1 or config.rollout.tree.playouts:
        problems.append("needs rollout.branches = 1, games that are played to their end")
    return problems + [
        f"actor {actor.id!r} plays with policy {actor.policy!r}, which is frozen and has no past"
        for actor in actors
        if actor.id in seats and actor.policy in config.policies and not config.policies[actor.policy].trainable
    ]


def _client_problems(config: TrainConfig) -> list[str]:
    kind = config.rollout.client
    if kind not in CLIENTS:
        able = ", ".join(map(repr, CLIENTS))
        return [f"rollout.client = {kind!r} serves the live policies alone; past ones play with {able}"]
    engines = config.cluster.has_engines
    if config.rollout.server.url is not None and not engines:
        return ["the servers of rollout.server.url serve the live policies alone; past ones play without it"]
    sampler = "cluster.engines" if engines else f"rollout.client = {kind!r}"
    return [
        f"with {sampler} past policies are adapters, and policies.{name} is a whole model: give it a lora section, or "
        f"set rollout.client = 'transformers'{' without engines' if engines else ''}"
        for name, settings in config.policies.items()
        if settings.trainable and settings.lora is None and (engines or not CLIENTS[kind])
    ]


def build_matchmaker(config: TrainConfig) -> Matchmaker:
    """Build the matchmaker that ``league.matchmaker`` names, with ``league.options``. Raises :class:`ConfigError`."""
    try:
        like = "turnwise.train.league.league.UniformMatchmaker"
        kind = import_class(MATCHMAKERS, config.league.matchmaker, "league.matchmaker", methods=["weights"], like=like)
        maker: Matchmaker = build_with_options(kind, config.league.options, "league.options")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return maker


def groups_of(config: TrainConfig) -> int:
    """Return the number of batches that may run at once, each with its own opponents."""
    return config.loop.max_staleness + 1


def past_models(config: TrainConfig, models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models that a client needs in addition to the live ``models``: one per slot of each trained policy.

    For an adapter this is a new adapter over the same base. For a full model it is the model itself, which the client
    copies.
    """
    if not config.league.share:
        return {}
    trained = [name for name in models if config.policies[name].trainable]
    slots: dict[str, nn.Module] = {}
    for slot, policy in slot_names(trained, config.league.opponents_per_step * groups_of(config)).items():
        model, lora = models[policy], config.policies[policy].lora
        if isinstance(model, AdaptedModel) and lora is not None:
            slots[slot] = model.shared.add_adapter(slot, peft_config(lora), config.seed)
            slots[slot].requires_grad_(False)
        else:
            slots[slot] = model
    return slots


def build_league(
    config: TrainConfig, actors: Sequence[Actor], seats: Sequence[str], client: InferenceClient
) -> League | None:
    """Build the league of ``config`` for a client with the :func:`past_models`; ``None`` without league games."""
    if not config.league.share:
        return None
    trained = [name for name, settings in config.policies.items() if settings.trainable]
    groups = groups_of(config)
    return League(
        config.league,
        build_matchmaker(config),
        {actor.id: actor.policy for actor in actors if actor.id in seats},
        OpponentSlots(client, trained, config.league.opponents_per_step * groups),
        config.run_dir / FOLDER,
        groups=groups,
        seed=config.seed,
    )
