"""The task: held-out questions, both payoffs, and what its players earn."""

from __future__ import annotations

import json

import pytest

from turnwise.tasks import build_task
from turnwise.tasks.base import split_of
from turnwise.tasks.negotiation import NegotiationOptions, NegotiationTask


def task(**options):
    return NegotiationTask(NegotiationOptions(**options))


def question_of(request):
    return {key: request.artifact[key] for key in ("pool", "values")}


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


def test_a_question_belongs_to_one_split():
    held_out = [
        question_of(request) for split in ("eval", "validation") for request in task().eval_requests(split, 100)
    ]
    assert {split_of(str(question)) for question in held_out} == {"eval", "validation"}
    trained = {json.dumps(question_of(r)) for step in range(20) for r in task().requests(step, 16, 1)}
    trained |= {json.dumps(dict(q)) for q in task().questions("train", 200, "demonstrations/0")}
    assert not trained & {json.dumps(question) for question in held_out}
    assert len({json.dumps(question) for question in held_out}) == 100


async def test_with_general_sums_two_bargainers_do_much_better_than_two_random_players(table):
    fair = task(payoff="general_sum")
    shares = {}
    for name, player in (("oracle", fair.oracle()), ("random", fair.random_player(0))):
        results = await table(fair, player).play(fair.requests(0, 150, 1))
        shares[name] = sum(result.rollout.extras["nash_share"] for result in results) / 150
        assert all(0 <= result.rollout.extras["nash_share"] <= 1 for result in results)
    assert shares["oracle"] > 0.6 > 0.3 > shares["random"]


async def test_with_zero_sums_the_bargainer_beats_the_random_player(table):
    hard = task()
    for name, low, high in (("oracle", 0.05, 1.0), ("random", -0.1, 0.1)):
        player = hard.oracle() if name == "oracle" else hard.random_player(0)
        results = await table(hard, player).play(hard.eval_requests("eval", 200))
        won = sum(result.rollout.rewards[result.rollout.artifact["model"]] for result in results) / 200
        assert low < won < high, (name, won)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"payoff": "none"}, "payoff='none'"), ({"turns": 1}, "turns=1"), ({"invalid_cost": 0.1}, "invalid_cost=0.1")],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        build_task("negotiation", options)


def test_training_questions_come_again_and_others_run_out():
    task = build_task("negotiation")
    drawn = [str(question) for question in task.questions("train", 16_000, 0)]
    assert len(drawn) == 16_000 > len(set(drawn)) > 10_000
    with pytest.raises(ValueError, match=r"n=5000: the eval split holds about \d+ questions"):
        list(task.questions("eval", 5000, 0))
