"""Tasks: their players, episodes, rewards and measures of success. None needs a network or a key.

Read in this order: base, generated, own, teams, tiny.
May import: types, utils, arena.

``build_task("sudoku", {"blanks": [4, 6]})`` returns a :class:`Task`, which the training loop and the command line take.
``build_task("my_game:HighCard")`` returns a task that you write, best as a subclass of :class:`OwnTask`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from turnwise.utils.registry import require

require("turnwise.tasks", "numpy", "pydantic")

from pydantic import ValidationError

from turnwise.tasks.base import Demonstration, Player, Split, Task, TaskOptions
from turnwise.tasks.own import OwnOptions, OwnTask
from turnwise.utils.registry import did_you_mean, import_by_name

__all__ = [
    "FOREIGN",
    "TASKS",
    "Demonstration",
    "OwnOptions",
    "OwnTask",
    "Player",
    "Split",
    "Task",
    "TaskOptions",
    "build_task",
    "task_type",
]

TASKS = {
    "code_duel": "turnwise.tasks.code_duel.team:CodeDuelTask",
    "gsm8k": "turnwise.tasks.gsm8k.task:GSM8KTask",
    "kuhn_poker": "turnwise.tasks.kuhn_poker.task:KuhnPokerTask",
    "lookup": "turnwise.tasks.lookup:LookupTask",
    "math_orchestra": "turnwise.tasks.math_orchestra:MathOrchestraTask",
    "negotiation": "turnwise.tasks.negotiation.task:NegotiationTask",
    "plan_path": "turnwise.tasks.plan_path.team:PlanPathTask",
    "proposer_solver": "turnwise.tasks.proposer_solver.team:ProposerSolverTask",
    "refine_loop": "turnwise.tasks.refine_loop.team:RefineLoopTask",
    "search_orchestra": "turnwise.tasks.search_orchestra.team:SearchOrchestraTask",
    "sokoban": "turnwise.tasks.sokoban.team:SokobanTask",
    "split_clues": "turnwise.tasks.split_clues:SplitCluesTask",
    "sudoku": "turnwise.tasks.sudoku.team:SudokuTask",
    "tic_tac_toe": "turnwise.tasks.tic_tac_toe.task:TicTacToeTask",
}
"""Name of each shipped task, and the path of its class, which is imported on first use."""

_ENVIRONMENTS = "turnwise.integrations.environments"
FOREIGN = {
    "gateway": "turnwise.integrations.gateway.task:GatewayTask",
    "gymnasium": f"{_ENVIRONMENTS}.gymnasium:GymnasiumTask",
    "openenv": f"{_ENVIRONMENTS}.openenv:OpenEnvTask",
    "openspiel": f"{_ENVIRONMENTS}.openspiel:OpenSpielTask",
    "pettingzoo": f"{_ENVIRONMENTS}.pettingzoo:PettingZooTask",
    "reasoning_gym": f"{_ENVIRONMENTS}.reasoning_gym:ReasoningGymTask",
    "textarena": f"{_ENVIRONMENTS}.textarena:TextArenaTask",
    "verifiers": "turnwise.integrations.verifiers.task:VerifiersTask",
}
"""Prefix of the tasks of other packages, and the path of the class. In ``"gymnasium:FrozenLake-v1"`` the text
after the first colon is the class's option ``name``."""


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build the task ``name``, one of another package, or your own task ``"module:Class"``, with its options.

    Raises ``ValueError`` for an unknown name or option (naming the nearest known one) or an invalid value, and the
    task's own errors for files that it can't read.
    """
    cls = task_type(name)
    prefix, _, rest = name.partition(":")
    named = {"name": rest} if prefix in FOREIGN else {}
    try:
        parsed = cls.options_type(**{**(options or {}), **named})
    except ValidationError as error:
        raise ValueError("; ".join(_explain(name, problem) for problem in error.errors())) from None
    task: Task = cls(parsed)
    return task


def task_type(name: str) -> Any:
    """Find the class of the task ``name``, or ``"module:Class"``. Raises ``ValueError`` if there is none."""
    prefix, colon, rest = name.partition(":")
    if colon and prefix in FOREIGN:
        if not rest:
            raise ValueError(f"task={name!r}: expected a name after the colon")
        return _type_at(FOREIGN[prefix])
    if colon:
        return _own_type(name)
    if name not in TASKS:
        raise ValueError(f"task={name!r}: unknown; {did_you_mean(name, list(TASKS))} (or 'module:Class' for your own)")
    return _type_at(TASKS[name])


def _type_at(location: str) -> Any:
    module, _, title = location.partition(":")
    return getattr(importlib.import_module(module), title)


def _own_type(name: str) -> Any:
    """Import ``"module:Class"``, and check that it has everything that the training loop needs of a task."""
    cls = import_by_name({}, name, "task")
    needed = ("options_type", *(member for member in dir(Task) if member[0] != "_"))
    missing = sorted(member for member in needed if not hasattr(cls, member))
    if not isinstance(cls, type) or missing:
        lacks = f"it lacks {', '.join(missing)}" if isinstance(cls, type) else "it is no class"
        raise ValueError(f"task={name!r}: {lacks}; expected a class with what turnwise.tasks.OwnTask has")
    return cls


def _explain(task: str, problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key:
        return f"task {task!r}: {message}"
    given = "" if problem["type"] == "missing" else f"={problem['input']!r}"
    return f"task {task!r}: {key}{given}: {message}"
