"""One game from both seats: who is asked, what an invalid action costs, scripted opponents, and that no seat leaks."""

from __future__ import annotations

import asyncio

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


async def test_the_model_plays_both_seats(table, task):
    result = await table(task, ["[check]", "[bet]", "[call]"]).one({"cards": "KQ"})
    rollout = result.rollout
    assert [step.actor_id for step in rollout.steps] == ["player0", "player1", "player0"]
    assert rollout.rewards == {"player0": 2.0, "player1": -2.0}
    assert rollout.extras["scores"] == {"player0": 1.0, "player1": 0.0}
    assert rollout.extras["history"] == "pbb" and rollout.extras["invalid"] is None
    assert {name: value for name, value in rollout.metrics.items() if "legal" in name} == {
        "legal/player0": 1.0,
        "legal/player1": 1.0,
    }


@pytest.mark.parametrize(
    ("lines", "won", "readable", "legal"),
    [
        (["hm"], -3.0, {"player0": 0.0}, {"player0": 0.0}),
        (["[fold]"], -3.0, {"player0": 1.0}, {"player0": 0.0}),
        (["[check]", "[call]"], 3.0, {"player0": 1.0, "player1": 1.0}, {"player0": 1.0, "player1": 0.0}),
        (["[check]", "[bet]", ""], -3.0, {"player0": 0.5, "player1": 1.0}, {"player0": 0.5, "player1": 1.0}),
    ],
)
async def test_an_invalid_action_ends_the_game_and_pays_the_other(table, task, lines, won, readable, legal):
    result = await table(task, lines).one({"cards": "KQ"})
    assert result.rollout.rewards == {"player0": won, "player1": -won} and len(result.rollout.steps) == len(lines)
    for name, expected in (("readable", readable), ("legal", legal)):
        metrics = {key.partition("/")[2]: value for key, value in result.rollout.metrics.items() if name in key}
        assert metrics == expected
    assert result.rollout.extras["invalid"] == f"player{(len(lines) - 1) % 2}"


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
    marked = [step.info.get("private") for result in seat.arena.last_results for step in result.rollout.steps]
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


@pytest.mark.parametrize(
    ("artifact", "named"),
    [
        ({"cards": "KK"}, r"artifact\['cards'\]='KK'"),
        ({"cards": "KQ", "model": "player0"}, "expected both 'model' and 'opponent'"),
        ({"cards": "KQ", "model": "me", "opponent": "random"}, r"artifact\['model'\]='me'"),
        ({"cards": "KQ", "model": "player0", "opponent": "me"}, r"artifact\['opponent'\]='me'.*\['oracle', 'random'\]"),
        ("KQ", "artifact='KQ': expected the game's question"),
    ],
)
def test_bad_artifacts_fail_their_episode_by_name(table, task, artifact, named):
    seat = table(task, task.oracle())
    seat.arena.failure_threshold = 1.0
    result = asyncio.run(seat.one(artifact))
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(result.rollout.error)
