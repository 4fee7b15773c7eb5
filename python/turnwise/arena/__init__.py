"""The arena: actors, episodes (nested too), rubrics, stores and tree sampling; requests in, a training batch out.

Read in this order: arena, episode, multi_turn, user_actor, answers, runner, stages, episode_checkpoints, setup.
May import: types, utils, settings, state, chat, samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.utils.registry import names_on_use

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena as Arena
    from turnwise.arena.episode import Episode as Episode
    from turnwise.arena.episode import SingleTurnEpisode as SingleTurnEpisode
    from turnwise.arena.episode_checkpoints import EpisodeCheckpoints as EpisodeCheckpoints
    from turnwise.arena.multi_turn import MultiTurnEpisode as MultiTurnEpisode
    from turnwise.arena.rewards.invalid_action import InvalidActionError as InvalidActionError
    from turnwise.arena.rewards.invalid_action import parsing as parsing
    from turnwise.arena.rewards.judge import Judge as Judge
    from turnwise.arena.rewards.mix import RewardMix as RewardMix
    from turnwise.arena.rewards.mix import RewardParts as RewardParts
    from turnwise.arena.rewards.rubric import DropRolloutError as DropRolloutError
    from turnwise.arena.rewards.rubric import Rubric as Rubric
    from turnwise.arena.rewards.rubric import Score as Score
    from turnwise.arena.rewards.verdicts import read_choice as read_choice
    from turnwise.arena.rewards.verdicts import read_number as read_number
    from turnwise.arena.runtime.concurrency import BatchFailedError as BatchFailedError
    from turnwise.arena.runtime.privacy import private as private
    from turnwise.arena.runtime.privacy import reveal as reveal
    from turnwise.arena.runtime.private_text import LeakError as LeakError
    from turnwise.arena.runtime.recording_hooks import record_input as record_input
    from turnwise.arena.stages.rewards.distillation import Distillation as Distillation
    from turnwise.arena.stages.rewards.overlong import OverlongPenalty as OverlongPenalty
    from turnwise.arena.stages.stage import Stage as Stage
    from turnwise.arena.stores.sampling import AttemptStats as AttemptStats
    from turnwise.arena.stores.sampling import Learnability as Learnability
    from turnwise.arena.stores.sampling import PrioritizedLevelReplay as PrioritizedLevelReplay
    from turnwise.arena.stores.store import ArtifactStore as ArtifactStore
    from turnwise.arena.trees.sampler import TreeSampler as TreeSampler
    from turnwise.arena.user_actor import UserActor as UserActor
    from turnwise.arena.user_actor import UserEpisode as UserEpisode
    from turnwise.samples.filters import Filters as Filters
    from turnwise.samples.pack import drop_stale as drop_stale
    from turnwise.samples.pack import pack as pack
    from turnwise.samples.pack import select as select

_HOMES = {
    "Arena": "turnwise.arena.arena",
    "Episode": "turnwise.arena.episode",
    "SingleTurnEpisode": "turnwise.arena.episode",
    "EpisodeCheckpoints": "turnwise.arena.episode_checkpoints",
    "MultiTurnEpisode": "turnwise.arena.multi_turn",
    "InvalidActionError": "turnwise.arena.rewards.invalid_action",
    "parsing": "turnwise.arena.rewards.invalid_action",
    "Judge": "turnwise.arena.rewards.judge",
    "RewardMix": "turnwise.arena.rewards.mix",
    "RewardParts": "turnwise.arena.rewards.mix",
    "DropRolloutError": "turnwise.arena.rewards.rubric",
    "Rubric": "turnwise.arena.rewards.rubric",
    "Score": "turnwise.arena.rewards.rubric",
    "read_choice": "turnwise.arena.rewards.verdicts",
    "read_number": "turnwise.arena.rewards.verdicts",
    "BatchFailedError": "turnwise.arena.runtime.concurrency",
    "private": "turnwise.arena.runtime.privacy",
    "reveal": "turnwise.arena.runtime.privacy",
    "LeakError": "turnwise.arena.runtime.private_text",
    "record_input": "turnwise.arena.runtime.recording_hooks",
    "Distillation": "turnwise.arena.stages.rewards.distillation",
    "OverlongPenalty": "turnwise.arena.stages.rewards.overlong",
    "Stage": "turnwise.arena.stages.stage",
    "AttemptStats": "turnwise.arena.stores.sampling",
    "Learnability": "turnwise.arena.stores.sampling",
    "PrioritizedLevelReplay": "turnwise.arena.stores.sampling",
    "ArtifactStore": "turnwise.arena.stores.store",
    "TreeSampler": "turnwise.arena.trees.sampler",
    "UserActor": "turnwise.arena.user_actor",
    "UserEpisode": "turnwise.arena.user_actor",
    "Filters": "turnwise.samples.filters",
    "drop_stale": "turnwise.samples.pack",
    "pack": "turnwise.samples.pack",
    "select": "turnwise.samples.pack",
}

__all__ = [*sorted(_HOMES)]

__getattr__ = names_on_use(__name__, _HOMES)
