"""The task: games between scripted players, against the exact chances."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from turnwise.tasks.tic_tac_toe import (
    TicTacToeOptions,
    TicTacToeTask,
    optimal_policy,
    outcomes,
    table_player,
    uniform_policy,
)
from turnwise.tasks.tic_tac_toe.board import LINES, outcome


def task(**options):
    return TicTacToeTask(TicTacToeOptions(**options))


async def test_random_games_end_as_often_as_they_should(table):
    results = await table(task(), task().random_player(1)).play(task().requests(0, 500, 1))
    won = np.array([result.rollout.rewards["player0"] for result in results])
    chances = outcomes(uniform_policy())
    for value, chance in zip((1, 0, -1), chances, strict=False):
        assert (won == value).mean() == pytest.approx(chance, abs=4 * np.sqrt(chance * (1 - chance) / 500))


async def test_the_oracle_never_loses(table):
    hard = await table(task(opponent="oracle"), task().oracle()).play(task(opponent="oracle").eval_requests("eval", 40))
    assert {result.rollout.metrics["score/model"] for result in hard} == {0.5}
    easy = await table(task(), task().oracle()).play(task().eval_requests("eval", 60))
    assert min(result.rollout.metrics["score/model"] for result in easy) >= 0.5


def test_a_table_player_plays_its_table():
    policy = np.zeros((4520, 9))
    policy[:, 8] = 1.0
    player = table_player(policy, Random(0))
    assert player("player0", [{"role": "user", "content": "0 1 2\n3 4 5\n6 7 8"}]) == "[8]"
    assert optimal_policy().shape == (4520, 9)


def test_eight_lines_win():
    for line in LINES:
        for mark, won in (("X", 1.0), ("O", -1.0)):
            assert outcome("".join(mark if cell in line else "." for cell in range(9))) == won
    assert len({tuple(sorted(line)) for line in LINES}) == 8
    magic = (2, 7, 6, 9, 5, 1, 4, 3, 8)
    assert all(sum(magic[cell] for cell in line) == 15 for line in LINES), "the lines of a magic square"
