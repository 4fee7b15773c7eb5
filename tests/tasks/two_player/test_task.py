"""What the tasks for two share: matches in pairs, demonstrations of whole games, no trees."""

from __future__ import annotations

import pytest

from turnwise.tasks import build_task

GAMES = ("kuhn_poker", "negotiation", "tic_tac_toe")


@pytest.fixture(params=GAMES)
def task(request):
    return build_task(request.param)


def test_each_match_is_played_from_both_seats_with_one_luck(task):
    requests = task.eval_requests("eval", 40)
    for first, second in zip(requests[::2], requests[1::2], strict=True):
        assert (first.artifact["model"], second.artifact["model"]) == ("player0", "player1")
        assert {**first.artifact, "model": ""} == {**second.artifact, "model": ""}
        assert (first.seed, first.group_id) == (second.seed, second.group_id)
        assert not first.is_trainable and first.artifact["opponent"] == "random"
    assert len({request.seed for request in requests}) == 20
    assert len(task.eval_requests("eval", 7)) == 7
    assert requests == build_task(task.name, {"seed": 5}).eval_requests("eval", 40)
