"""The environments that the shared tests play, one line each, and what each needs."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from turnwise.tasks import build_task


class Case(NamedTuple):
    """A task, the module that it needs, its options, and how many moves of a random play are forked."""

    task: str
    module: str
    options: dict
    moves: int = 40

    @property
    def extra(self):
        return self.task.partition(":")[0]


CASES = [
    Case("gymnasium:FrozenLake-v1", "gymnasium", {}),
    Case("gymnasium:Blackjack-v1", "gymnasium", {}),
    Case("openspiel:kuhn_poker", "pyspiel", {}),
    Case("openspiel:leduc_poker", "pyspiel", {}),
    Case("openspiel:tic_tac_toe", "pyspiel", {}),
    Case("openspiel:goofspiel(num_cards=3)", "pyspiel", {}),
    Case("pettingzoo:tictactoe_v3", "pettingzoo", {}),
    Case("pettingzoo:connect_four_v3", "pettingzoo", {}, moves=15),
    Case("pettingzoo:rps_v2", "pettingzoo", {"parallel": True, "max_turns": 5}, moves=8),
    Case("textarena:KuhnPoker-v0", "textarena", {}),
    Case("textarena:TicTacToe-v0", "textarena", {}),
]


def name_of(case):
    return case.task


def build(case):
    """Build the case's task, or skip the test if its package is missing."""
    pytest.importorskip(case.module, reason=f"the extra {case.extra!r} brings it")
    return build_task(case.task, case.options)
