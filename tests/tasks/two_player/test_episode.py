"""One game from both seats: who is asked, what an invalid action costs, scripted opponents, and that no seat leaks."""

from __future__ import annotations

import pytest

from turnwise.arena import LeakError
from turnwise.tasks import build_task
from turnwise.tasks.kuhn_poker import KuhnPokerTask, KuhnRules
from turnwise.tasks.two_player import SEATS, TwoPlayerEpisode
from turnwise.types import EpisodeRequest

GAMES = ("kuhn_poker", "negotiation", "tic_tac_toe")


@pytest.fixture
def task():
    return KuhnPokerTask()


@pytest.mark.parametrize("seat", SEATS)
async def test_against_a_scripted_player_only_the_models_seat_is_asked_and_rewarded(table, task, seat):
    seen = table(task, lambda actor, messages: "[check]" if "[check]" in messages[-1]["content"] else "[fold]")
    result = await seen.one({"cards": "KQ", "model": seat, "opponent": "oracle"})
    assert {actor for actor, _ in seen.seen} == {seat} == set(result.rollout.rewards)
    assert result.rollout.metrics["score/model"] == result.rollout.metrics[f"score/{seat}"]
    assert set(result.rollout.extras["payoffs"]) == {seat}


async def test_an_opponents_luck_is_the_episodes(table, task):
    artifact = {"cards": "JQ", "model": "player1", "opponent": "random"}
    requests = [EpisodeRequest("kuhn_poker", artifact, seed=seed) for seed in range(20)]
    one = [r.rollout.extras["history"] for r in await table(task, task.oracle()).play(requests)]
    two = [r.rollout.extras["history"] for r in await table(task, task.oracle()).play(requests)]
    assert [history[0] for history in one] == [history[0] for history in two]
    assert len({history[0] for history in one}) == 2


@pytest.mark.parametrize("name", GAMES)
async def test_no_seat_is_shown_what_is_the_others_and_nobody_trains_on_it(table, name):
    """With random players and with the oracle, over self-play and matches: the arena's own check finds nothing."""
    task = build_task(name)
    for player in (task.oracle(), task.random_player(3)):
        seat = table(task, player)
        seat.arena.check_private = True
        seat.arena.source = lambda task=task: task.requests(1, 20, 2)
        batch = await seat.arena.step()
        assert len(batch) == sum(len(result.rollout.steps) for result in seat.arena.last_results)
        await seat.play(task.eval_requests("eval", 20))
    marked = [step.facts.private for result in seat.arena.last_results for step in result.rollout.steps]
    assert all(marked) or name == "tic_tac_toe", "what only one seat may know is marked in its prompts"


async def test_and_the_check_finds_rules_that_leak(table, task):
    class Careless(KuhnRules):
        def observe(self, game, seat):
            super().observe(game, 0)
            return f"{super().observe(game, seat)}\nHint for nobody.\n" + super().observe(game, 1 - seat)

    seat = table(task, task.oracle())
    seat.arena.check_private = True
    seat.arena.episodes["kuhn_poker"] = TwoPlayerEpisode(Careless(), task.players)
    seat.player = lambda actor, messages: "[check]"
    with pytest.raises(
        LeakError, match=r"the prompt of actor 'player\d' holds what is private to 'player\d': 'Your card:"
    ):
        await seat.one({"cards": "KQ"})


@pytest.mark.parametrize("name", GAMES)
def test_each_match_is_played_from_both_seats_with_one_luck(name):
    task = build_task(name)
    requests = task.eval_requests("eval", 40)
    for first, second in zip(requests[::2], requests[1::2], strict=True):
        assert (first.artifact["model"], second.artifact["model"]) == ("player0", "player1")
        assert {**first.artifact, "model": ""} == {**second.artifact, "model": ""}
        assert (first.seed, first.group_id) == (second.seed, second.group_id)
        assert not first.is_trainable and first.artifact["opponent"] == "random"
    assert len({request.seed for request in requests}) == 20
    assert len(task.eval_requests("eval", 7)) == 7
    assert requests == build_task(task.name, {"seed": 5}).eval_requests("eval", 40)
