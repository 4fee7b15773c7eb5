"""Search by a team: a verifier, a searcher and an answerer over a folder of text, or over a made-up world."""

from __future__ import annotations

from .corpus import Passage, Question, World, made_up_world, read_world
from .index import SearchIndex
from .team import SearchOrchestraEpisode, SearchOrchestraOptions, SearchOrchestraTask

__all__ = [
    "Passage",
    "Question",
    "SearchIndex",
    "SearchOrchestraEpisode",
    "SearchOrchestraOptions",
    "SearchOrchestraTask",
    "World",
    "made_up_world",
    "read_world",
]
