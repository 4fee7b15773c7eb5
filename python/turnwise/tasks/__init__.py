"""Shipped tasks: what the team plays, how it is rewarded, and how success is measured. None needs a network or a key.

``build_task("sudoku", {"blanks": [4, 6]})`` gives a :class:`Task`, which the training loop and the command line take.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from turnwise.naming import nearest
from turnwise.tasks.base import Demonstration, Player, Split, Task, TaskOptions

__all__ = ["TASKS", "Demonstration", "Player", "Split", "Task", "TaskOptions", "build_task"]

TASKS = {
    "code_duel": "turnwise.tasks.code_duel.team:CodeDuelTask",
    "gsm8k": "turnwise.tasks.gsm8k.task:GSM8KTask",
    "kuhn_poker": "turnwise.tasks.kuhn_poker.task:KuhnPokerTask",
    "math_orchestra": "turnwise.tasks.math_orchestra:MathOrchestraTask",
    "negotiation": "turnwise.tasks.negotiation.task:NegotiationTask",
    "plan_path": "turnwise.tasks.plan_path.team:PlanPathTask",
    "proposer_solver": "turnwise.tasks.proposer_solver.team:ProposerSolverTask",
    "refine_loop": "turnwise.tasks.refine_loop.team:RefineLoopTask",
    "search_orchestra": "turnwise.tasks.search_orchestra.team:SearchOrchestraTask",
    "sokoban": "turnwise.tasks.sokoban.team:SokobanTask",
    "sudoku": "turnwise.tasks.sudoku.team:SudokuTask",
    "tic_tac_toe": "turnwise.tasks.tic_tac_toe.task:TicTacToeTask",
}
"""Name of each shipped task, and where its class is found when it is first asked for."""


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """The task called ``name``, with its options.

    Raises ``ValueError`` for an unknown name or option (naming the nearest known one) or a value that does not fit, and
    whatever the task raises for files that it can't read.
    """
    if name not in TASKS:
        raise ValueError(f"task={name!r}: unknown; {nearest(name, list(TASKS))}")
    module, _, title = TASKS[name].partition(":")
    task_type = getattr(importlib.import_module(module), title)
    try:
        parsed = task_type.options_type(**(options or {}))
    except ValidationError as error:
        raise ValueError("; ".join(_explain(name, problem) for problem in error.errors())) from None
    return task_type(parsed)


def _explain(task: str, problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key:
        return f"task {task!r}: {message}"
    given = "" if problem["type"] == "missing" else f"={problem['input']!r}"
    return f"task {task!r}: {key}{given}: {message}"
