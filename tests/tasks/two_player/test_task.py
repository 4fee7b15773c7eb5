"""What the tasks for two share: matches in pairs, demonstrations of whole games, no trees."""

from __future__ import annotations

from collections import Counter

import pytest

from turnwise.arena import TreeSampler
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


def test_training_is_self_play_on_seeds_of_its_own(task):
    requests = task.requests(4, 6, 3)
    assert requests == task.requests(4, 6, 3) and len(requests) == 18
    assert all("model" not in request.artifact and request.is_trainable for request in requests)
    assert Counter(request.group_id for request in requests) == {f"4/{index}": 3 for index in range(6)}
    seeds = {request.seed for request in requests}
    assert len(seeds) == 18
    assert not seeds & {request.seed for request in task.requests(5, 6, 3)}
    assert not seeds & {request.seed for request in build_task(task.name, {"seed": 1}).requests(4, 6, 3)}


async def test_demonstrations_are_legal_and_of_both_seats(table, task):
    shown = task.demonstrations(60, 1)
    assert len(shown) == 60 and shown == task.demonstrations(60, 1) != task.demonstrations(60, 2)
    assert {actor for actor, _, _ in shown} == {"player0", "player1"}
    results = await table(task, task.oracle()).play(task.requests(0, 10, 1))
    assert all(f"legal/{seat}" in r.rollout.metrics for r in results for seat in ("player0",))
    prompts = {str(message) for _, messages, _ in shown for message in messages[:1]}
    assert prompts == {str({"role": "system", "content": actor.system_prompt}) for actor in task.actors}


async def test_the_oracle_scores_more_than_the_random_player(table, task):
    requests = task.eval_requests("eval", 600 if task.name == "kuhn_poker" else 60)
    score = {}
    for name, player in (("oracle", task.oracle()), ("random", task.random_player(0))):
        results = await table(task, player).play(requests)
        metrics = [result.rollout.metrics for result in results]
        assert all(
            value == 1.0 for one in metrics for key, value in one.items() if key.startswith(("legal", "readable"))
        )
        score[name] = sum(one[task.success_metric] for one in metrics) / len(metrics)
    assert score["oracle"] > score["random"]


def test_a_tree_is_refused_by_name(task):
    with pytest.raises(ValueError, match=f"task '{task.name}' is played to its end: expected rollout.branches = 1"):
        task.episodes(TreeSampler(branches=4))
