"""Search by a team of a verifier, a searcher and an answerer, over a folder of text or a made-up world.

Read in this order: team, corpus, prompts.
May import: types, utils, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.search_orchestra.corpus import (
    Passage,
    SearchIndex,
)
from turnwise.tasks.search_orchestra.team import SearchOrchestraEpisode, SearchOrchestraOptions, SearchOrchestraTask

__all__ = [
    "Passage",
    "SearchIndex",
    "SearchOrchestraEpisode",
    "SearchOrchestraOptions",
    "SearchOrchestraTask",
]
