"""Forks are independent of one another, and what objects share they share in each copy."""

from __future__ import annotations

import pytest

from turnwise.state import fork_many


def test_copies_are_independent_and_keep_what_is_shared_inside():
    board = [[0, 1]]
    forks = fork_many(({"board": board}, [board]), 3)
    assert len(forks) == 3
    for index, (env, agents) in enumerate(forks):
        assert env["board"] is agents[0] and env["board"] is not board
        env["board"][0][0] = index + 5
    assert [env["board"][0][0] for env, _ in forks] == [5, 6, 7] and board == [[0, 1]]
    assert fork_many(board, 0) == []


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="n=-1"):
        fork_many([], -1)
