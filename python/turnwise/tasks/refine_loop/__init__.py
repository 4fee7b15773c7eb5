"""A generator and a critic: drafts under rules, reviews of what they break, round by round.

Read in this order: team, rules.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.refine_loop.rules import (
    parse_draft,
    parse_review,
)
from turnwise.tasks.refine_loop.team import RefineLoopEpisode, RefineLoopOptions, RefineLoopTask, RefineLoopView

__all__ = [
    "RefineLoopEpisode",
    "RefineLoopOptions",
    "RefineLoopTask",
    "RefineLoopView",
    "parse_draft",
    "parse_review",
]
