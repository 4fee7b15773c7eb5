"""Programs and tests: a coder solves a small problem, a tester tries to find its program out, both in a sandbox."""

from __future__ import annotations

from .demonstrations import demonstrations
from .problems import FAMILIES, Problem, draw_problems, find_problem
from .prompts import View, code_duel_messages, read_view
from .sandbox import Limits, Returned, Sandbox, SandboxError, SandboxRun
from .scoring import Case, Judgement, judge_cases, parse_cases, parse_program
from .team import CodeDuelEpisode, CodeDuelOptions, CodeDuelTask

__all__ = [
    "FAMILIES",
    "Case",
    "CodeDuelEpisode",
    "CodeDuelOptions",
    "CodeDuelTask",
    "Judgement",
    "Limits",
    "Problem",
    "Returned",
    "Sandbox",
    "SandboxError",
    "SandboxRun",
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
