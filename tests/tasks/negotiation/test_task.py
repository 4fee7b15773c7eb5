"""The task: held-out questions, both payoffs, and what its players earn."""

from __future__ import annotations

import pytest

from turnwise.tasks.negotiation import NegotiationOptions, NegotiationTask
from turnwise.tasks.negotiation import task as module


def task(**options):
    return NegotiationTask(NegotiationOptions(**options))


async def test_a_negotiation_worked_by_hand(table):
    question = {"pool": [3, 2, 1], "values": [[1, 2, 3], [2, 0, 4]]}
    lines = ["[keep 3 2 1]", "[keep 3 0 1]", "[keep 0 2 1]", "[accept]"]
    for payoff, rewards in (("zero_sum", (0.1, -0.1)), ("general_sum", (0.7, 0.6))):
        result = await table(task(payoff=payoff), lines).one(question)
        assert list(result.rollout.rewards.values()) == pytest.approx(rewards)
        assert result.rollout.extras["deal"] == [0, 2, 1] and result.rollout.extras["nash_share"] == pytest.approx(1.0)
        assert [step.actor_id for step in result.rollout.steps] == ["player0", "player1"] * 2


async def test_a_mistake_ends_it(table):
    question = {"pool": [3, 2, 1], "values": [[1, 2, 3], [2, 0, 4]]}
    zero = await table(task(), ["[keep 3 2 1]", "[keep 9 9 9]"]).one(question)
    assert zero.rollout.rewards == {"player0": 1.5, "player1": -1.5}
    general = await table(task(payoff="general_sum"), ["[accept]"]).one(question)
    assert general.rollout.rewards == {"player0": -1.5, "player1": 0.0}


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
