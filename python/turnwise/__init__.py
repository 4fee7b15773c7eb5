"""turnwise trains teams of language-model agents with reinforcement learning.

The names below load on first use, so ``import turnwise`` costs nothing and needs no torch. The rooms are subpackages:
``turnwise.ops``, ``turnwise.arena``, ``turnwise.train`` and so on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Actor": "turnwise.types",
    "EpisodeRequest": "turnwise.types",
    "EpisodeState": "turnwise.types",
    "Rollout": "turnwise.types",
    "Step": "turnwise.types",
    "Arena": "turnwise.arena",
    "ArtifactStore": "turnwise.arena",
    "Episode": "turnwise.arena",
    "MultiTurnEpisode": "turnwise.arena",
    "Rubric": "turnwise.arena",
    "SingleTurnEpisode": "turnwise.arena",
    "TreeSampler": "turnwise.arena",
    "ATGRPOCredit": "turnwise.credit",
    "DrMASCredit": "turnwise.credit",
    "GRPOCredit": "turnwise.credit",
    "RAECredit": "turnwise.credit",
    "TrainConfig": "turnwise.train",
    "Trainer": "turnwise.train",
    "State": "turnwise.state",
    "Store": "turnwise.state",
}
_ROOMS = frozenset({"arena", "credit", "inference", "ops", "state", "tasks", "train", "types"})

if TYPE_CHECKING:
    from turnwise import train as train
    from turnwise.arena import Arena as Arena
    from turnwise.arena import ArtifactStore as ArtifactStore
    from turnwise.arena import Episode as Episode
    from turnwise.arena import MultiTurnEpisode as MultiTurnEpisode
    from turnwise.arena import Rubric as Rubric
    from turnwise.arena import SingleTurnEpisode as SingleTurnEpisode
    from turnwise.arena import TreeSampler as TreeSampler
    from turnwise.credit import ATGRPOCredit as ATGRPOCredit
    from turnwise.credit import DrMASCredit as DrMASCredit
    from turnwise.credit import GRPOCredit as GRPOCredit
    from turnwise.credit import RAECredit as RAECredit
    from turnwise.state import State as State
    from turnwise.state import Store as Store
    from turnwise.train import TrainConfig as TrainConfig
    from turnwise.train import Trainer as Trainer
    from turnwise.types import Actor as Actor
    from turnwise.types import EpisodeRequest as EpisodeRequest
    from turnwise.types import EpisodeState as EpisodeState
    from turnwise.types import Rollout as Rollout
    from turnwise.types import Step as Step

__all__ = [*sorted(_HOME), "train"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"turnwise.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
