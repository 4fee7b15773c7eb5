"""The task: held-out questions, both payoffs, and what its players earn."""

from __future__ import annotations

import pytest

from turnwise.tasks.negotiation import NegotiationOptions, NegotiationTask
from turnwise.tasks.negotiation import task as module


def task(**options):
    return NegotiationTask(NegotiationOptions(**options))


async def test_with_general_sums_two_bargainers_do_much_better_than_two_random_players(table):
    fair = task(payoff="general_sum")
    shares = {}
    for name, player in (("oracle", fair.oracle()), ("random", fair.random_player(0))):
        results = await table(fair, player).play(fair.requests(0, 60, 1))
        shares[name] = sum(result.rollout.extras["nash_share"] for result in results) / 60
        assert all(0 <= result.rollout.extras["nash_share"] <= 1 for result in results)
    assert shares["oracle"] > 0.6 > 0.3 > shares["random"]


def test_training_questions_come_again_and_others_run_out(monkeypatch):
    """With one piece of each resource there are 66 rows of values, so 66 * 66 questions."""
    monkeypatch.setattr(module, "MOST", 1)
    monkeypatch.setattr(module, "_PATIENCE", 200)
    drawn = [str(question) for question in task().questions("train", 5000, 0)]
    assert len(drawn) == 5000 > len(set(drawn)) > 3000
    with pytest.raises(ValueError, match=r"n=500: the eval split holds about \d+ questions"):
        list(task().questions("eval", 500, 0))
