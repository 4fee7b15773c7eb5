"""Builds a league from a configuration, and checks its requirements on the task and the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from turnwise.inference.weights.lora import AdaptedModel
from turnwise.settings.section import RunFacts
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.league.league import MATCHMAKERS, League, Matchmaker
from turnwise.train.league.pool import OpponentSlots, slot_names
from turnwise.train.model.loading import peft_config
from turnwise.types import Actor, InferenceClient
from turnwise.utils.registry import build_with_options, import_class

FOLDER = "league"
"""Folder of past policies, inside the run folder."""


def matchmaker_problems(run: RunFacts) -> list[str]:
    """Return the problems of ``league.matchmaker`` and its options, one line each."""
    problems = Problems()
    if run.config.league.share and run.task is not None:
        with problems.gathered():
            build_matchmaker(run.config)
    return problems.lines


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
