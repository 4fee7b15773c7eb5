"""Programs and tests: a coder solves a small problem, and a tester tries to break its program in a sandbox.

Read in this order: team, problems, prompts, scoring.
May import: types, arena, tasks, sandbox.
"""

from __future__ import annotations

from turnwise.tasks.code_duel.problems import find_problem
from turnwise.tasks.code_duel.prompts import CodeDuelView, read_view
from turnwise.tasks.code_duel.scoring import parse_cases, parse_program
from turnwise.tasks.code_duel.team import CodeDuelEpisode, CodeDuelOptions, CodeDuelTask

__all__ = [
    "CodeDuelEpisode",
    "CodeDuelOptions",
    "CodeDuelTask",
    "CodeDuelView",
    "find_problem",
    "parse_cases",
    "parse_program",
    "read_view",
]
