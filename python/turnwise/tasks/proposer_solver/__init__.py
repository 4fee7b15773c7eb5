"""A proposer and a solver: the one writes problems that the other solves half of the time, and both learn."""

from __future__ import annotations

from .arithmetic import Size, draw_problems, read_answer, read_problem, value_of
from .curves import CURVES
from .episodes import ProposeEpisode, SolveEpisode
from .team import ProposerSolverOptions, ProposerSolverTask

__all__ = [
    "CURVES",
    "ProposeEpisode",
    "ProposerSolverOptions",
    "ProposerSolverTask",
    "Size",
    "SolveEpisode",
    "draw_problems",
    "read_answer",
    "read_problem",
    "value_of",
]
