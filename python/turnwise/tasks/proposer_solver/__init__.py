"""A proposer and a solver that both learn: the proposer writes problems that the solver solves half of the time.

Read in this order: team, episodes, arithmetic.
May import: types, utils, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.proposer_solver.arithmetic import Size, read_problem, value_of
from turnwise.tasks.proposer_solver.episodes import ProposeEpisode, SolveEpisode
from turnwise.tasks.proposer_solver.team import ProposerSolverOptions, ProposerSolverTask

__all__ = [
    "ProposeEpisode",
    "ProposerSolverOptions",
    "ProposerSolverTask",
    "Size",
    "SolveEpisode",
    "read_problem",
    "value_of",
]
