"""The environments that the shared tests play, and what each needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from turnwise.tasks import build_task

PACKAGES = {
    "gymnasium": "gymnasium",
    "openenv": "openenv",
    "openspiel": "pyspiel",
    "pettingzoo": "pettingzoo",
    "reasoning_gym": "reasoning_gym",
    "textarena": "textarena",
}
"""The package that the tasks of each prefix need."""


class Case(NamedTuple):
    """A task, its options, and how many moves of a random play are forked."""

    task: str
    options: Mapping[str, Any] = MappingProxyType({})
    moves: int = 40

    @property
    def prefix(self) -> str:
        return self.task.partition(":")[0]

    def build(self, url: str, **options: Any) -> Any:
        """Build the task; ``url`` is that of an OpenEnv server."""
        return build_task(self.task.format(url=url), {**self.options, **options})


MOVES = {"moves": {str(number): {"number": number} for number in range(1, 10)}}
"""The moves of the OpenEnv server beside this file."""

LAKE = Case("gymnasium:FrozenLake-v1")
KUHN = Case("openspiel:kuhn_poker")
TICTACTOE = Case("pettingzoo:tictactoe_v3")
FOUR = Case("pettingzoo:connect_four_v3", moves=15)
GUESSING = Case("openenv:{url}", MOVES)
TEXT_KUHN = Case("textarena:KuhnPoker-v0")
TEXT_TICTACTOE = Case("textarena:TicTacToe-v0")
CASES = [
    LAKE,
    Case("gymnasium:Blackjack-v1"),
    KUHN,
    Case("openspiel:leduc_poker"),
    Case("openspiel:tic_tac_toe"),
    Case("openspiel:goofspiel(num_cards=3)"),
    TICTACTOE,
    FOUR,
    Case("pettingzoo:rps_v2", {"parallel": True, "max_turns": 5}, moves=8),
    TEXT_KUHN,
    TEXT_TICTACTOE,
    GUESSING,
]


def param(case: Case, *values: Any, marks: Any = (), name: str = "") -> Any:
    """Return ``pytest.param(case, *values)`` for where the case's package is installed."""
    marks = [pytest.mark.needs(PACKAGES[case.prefix]), *marks]
    return pytest.param(case, *values, marks=marks, id=name or case.task.format(url="here"))
