"""The arena: actors, episodes (nested too), rubrics, stores and tree sampling; requests in, a training batch out.

Read in this order: arena, episode, multi_turn, answers, runner, stages, episode_checkpoints, setup.
May import: types, utils, settings, state, chat, samples.
"""

from turnwise.arena.arena import Arena
from turnwise.arena.episode import Episode, SingleTurnEpisode
from turnwise.arena.episode_checkpoints import EpisodeCheckpoints
from turnwise.arena.multi_turn import MultiTurnEpisode
from turnwise.arena.rewards.invalid_action import InvalidActionError, parsing
from turnwise.arena.rewards.judge import Judge
from turnwise.arena.rewards.mix import RewardMix, RewardParts
from turnwise.arena.rewards.rubric import DropRolloutError, Rubric, Score
from turnwise.arena.rewards.verdicts import read_choice, read_number
from turnwise.arena.runtime.concurrency import BatchFailedError
from turnwise.arena.runtime.privacy import private, reveal
from turnwise.arena.runtime.private_text import LeakError
from turnwise.arena.runtime.recording_hooks import record_input
from turnwise.arena.stages.distillation import Distillation
from turnwise.arena.stages.overlong import OverlongPenalty
from turnwise.arena.stages.stage import Stage
from turnwise.arena.stores.sampling import AttemptStats, Learnability, PrioritizedLevelReplay
from turnwise.arena.stores.store import ArtifactStore
from turnwise.arena.trees.sampler import TreeSampler
from turnwise.samples.filters import Filters
from turnwise.samples.pack import drop_stale, pack, select

__all__ = [
    "Arena",
    "ArtifactStore",
    "AttemptStats",
    "BatchFailedError",
    "Distillation",
    "DropRolloutError",
    "Episode",
    "EpisodeCheckpoints",
    "Filters",
    "InvalidActionError",
    "Judge",
    "LeakError",
    "Learnability",
    "MultiTurnEpisode",
    "OverlongPenalty",
    "PrioritizedLevelReplay",
    "RewardMix",
    "RewardParts",
    "Rubric",
    "Score",
    "SingleTurnEpisode",
    "Stage",
    "TreeSampler",
    "drop_stale",
    "pack",
    "parsing",
    "private",
    "read_choice",
    "read_number",
    "record_input",
    "reveal",
    "select",
]
