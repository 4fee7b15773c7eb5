"""A generator and a critic: drafts under rules, reviews of what they break, round by round."""

from __future__ import annotations

from .rules import Question, answers, broken_rules, draw_questions, parse_draft, parse_question, parse_review
from .team import RefineLoopEpisode, RefineLoopOptions, RefineLoopTask, View

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
