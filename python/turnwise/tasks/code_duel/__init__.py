"""Programs and tests: a coder solves a small problem, and a tester tries to break its program in a sandbox.

Read in this order: team, problems, prompts, scoring.
May import: types, arena, tasks, sandbox.
"""

from __future__ import annotations

from turnwise.tasks.code_duel.demonstrations import demonstrations
from turnwise.tasks.code_duel.problems import FAMILIES, Problem, draw_problems, find_problem
from turnwise.tasks.code_duel.prompts import View, code_duel_messages, read_view
from turnwise.tasks.code_duel.scoring import Case, Judgement, judge_cases, parse_cases, parse_program
from turnwise.tasks.code_duel.team import CodeDuelEpisode, CodeDuelOptions, CodeDuelTask

__all__ = [
    "FAMILIES",
    "Case",
    "CodeDuelEpisode",
    "CodeDuelOptions",
    "CodeDuelTask",
    "Judgement",
    "Problem",
    "View",
    "code_duel_messages",
    "demonstrations",
    "draw_problems",
    "find_problem",
    "judge_cases",
    "parse_cases",
    "parse_program",
    "read_view",
]
