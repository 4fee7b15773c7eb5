"""Search by a team of a verifier, a searcher and an answerer, over a folder of text or a made-up world.

Read in this order: team, corpus, index, prompts, demonstrations.
May import: types, utils, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.search_orchestra.corpus import Passage, Question, World, made_up_world, read_world
from turnwise.tasks.search_orchestra.index import SearchIndex
from turnwise.tasks.search_orchestra.team import SearchOrchestraEpisode, SearchOrchestraOptions, SearchOrchestraTask

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
