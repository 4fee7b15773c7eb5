"""Two rows of digits, each seen by one actor alone: the smallest task that one agent with one view can't solve.

Read in this order: team, rows, prompts, demonstrations.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.split_clues.demonstrations import demonstrations
from turnwise.tasks.split_clues.prompts import split_clues_messages
from turnwise.tasks.split_clues.rows import Rows, draw_questions, maximum, parse_digits, parse_question
from turnwise.tasks.split_clues.team import SplitCluesEpisode, SplitCluesOptions, SplitCluesTask

__all__ = [
    "Rows",
    "SplitCluesEpisode",
    "SplitCluesOptions",
    "SplitCluesTask",
    "demonstrations",
    "draw_questions",
    "maximum",
    "parse_digits",
    "parse_question",
    "split_clues_messages",
]
