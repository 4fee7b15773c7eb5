"""A generator and a critic: drafts under rules, reviews of what they break, round by round.

Read in this order: team, rules.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.refine_loop.rules import (
    Question,
    answers,
    broken_rules,
    draw_questions,
    parse_draft,
    parse_question,
    parse_review,
)
from turnwise.tasks.refine_loop.team import RefineLoopEpisode, RefineLoopOptions, RefineLoopTask, View

__all__ = [
    "Question",
    "RefineLoopEpisode",
    "RefineLoopOptions",
    "RefineLoopTask",
    "View",
    "answers",
    "broken_rules",
    "draw_questions",
    "parse_draft",
    "parse_question",
    "parse_review",
]
