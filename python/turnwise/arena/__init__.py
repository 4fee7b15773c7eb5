"""The arena: actors, episodes (nested too), rubrics, stores, tree sampling; requests in, a training batch out."""

from turnwise.arena.arena import Arena
from turnwise.arena.drawing import Learnability, Outcome, Prioritised
from turnwise.arena.episode import Episode, SingleTurnEpisode
from turnwise.arena.filters import Filters
from turnwise.arena.invalid_action import InvalidActionError, parsing
from turnwise.arena.judge import Judge, read_choice, read_number
from turnwise.arena.multi_turn import MultiTurnEpisode
from turnwise.arena.overlong import OverlongPenalty
from turnwise.arena.privacy import LeakError, private, reveal
from turnwise.arena.progress import EpisodeProgress
from turnwise.arena.rubric import DropRolloutError, Rubric, Score
from turnwise.arena.samples import drop_stale, pack, select
from turnwise.arena.scheduler import BatchFailedError
from turnwise.arena.seating import Seating
from turnwise.arena.store import ArtifactStore
from turnwise.arena.tape import logged
from turnwise.arena.tree import TreeSampler

__all__ = [
    "Arena",
    "ArtifactStore",
    "BatchFailedError",
    "DropRolloutError",
    "Episode",
    "EpisodeProgress",
    "Filters",
    "InvalidActionError",
    "Judge",
    "LeakError",
    "Learnability",
    "MultiTurnEpisode",
    "Outcome",
    "OverlongPenalty",
    "Prioritised",
    "Rubric",
    "Score",
    "Seating",
    "SingleTurnEpisode",
    "TreeSampler",
    "drop_stale",
    "logged",
    "pack",
    "parsing",
    "private",
    "read_choice",
    "read_number",
    "reveal",
    "select",
]
