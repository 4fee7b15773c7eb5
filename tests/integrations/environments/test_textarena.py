"""TextArena: Kuhn poker over several rounds, and tic-tac-toe."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from turnwise.arena import TreeSampler
from turnwise.integrations.environments.base.forks import Copies, ForkError, Replays, RunningPlay, choose_way, prove
from turnwise.tasks import build_task
from turnwise.types import EpisodeRequest

from .helpers import check_lines, check_replays, played, trained

textarena = pytest.importorskip("textarena", reason="the extra 'textarena' brings it")
KUHN, TIC = "textarena:KuhnPoker-v0", "textarena:TicTacToe-v0"


def script(*moves):
    left = list(moves)
    return lambda request: left.pop(0)


async def test_a_game_by_hand():
    """Player 0 begins, its fields 0, 1 and 2 win; each prompt is what the game tells the player."""
    task = build_task(TIC)
    requests = [EpisodeRequest(TIC, {"seed": 1})]
    (rollout,) = await played(task, requests, script("[0]", "[4]", "I take [1].", "[8]", "[2]"), check_private=True)
    assert [step.actor_id for step in rollout.steps] == ["player0", "player1", "player0", "player1", "player0"]
    assert rollout.rewards == {"player0": 1.0, "player1": -1.0}
    assert rollout.metrics["score/player0"] == 1.0 == rollout.metrics["legal/player1"]
    last = rollout.steps[-1].prompt[-1]["content"]
    assert last.startswith("[GAME] You are Player 0") and last.endswith("'[2]', '[3]', '[5]', '[6]', '[7]'")


async def test_an_illegal_move_follows_the_games_own_rule():
    """Tic-tac-toe forgives one error in a turn, and the second one loses -1 to 1."""
    task = build_task(TIC)
    (forgiven,) = await played(
        task, [EpisodeRequest(TIC, {"seed": 1})], script("[0]", "[0]", "[4]", "[1]", "nine", "[8]", "[2]")
    )
    assert [step.actor_id[-1] for step in forgiven.steps] == list("0110110")
    assert forgiven.metrics["legal/player1"] == 0.5 and forgiven.rewards["player0"] == 1.0
    (lost,) = await played(task, [EpisodeRequest(TIC, {"seed": 1})], script("[0]", "[0]", "[9]"))
    assert lost.rewards == {"player0": 1.0, "player1": -1.0} and lost.metrics["legal/player1"] == 0.0


@pytest.mark.parametrize("text", ["", "\x00", "[" * 1000, "[99999999999999999999]", "ü" * 500, "[-1]", "[1][2]"])
@pytest.mark.parametrize("name", [KUHN, TIC])
async def test_no_text_stops_an_episode(name, text):
    task = build_task(name)
    (rollout,) = await played(task, [EpisodeRequest(name, {"seed": 1})], lambda request: text)
    assert sum(rollout.rewards.values()) == 0 and -1 in rollout.rewards.values()


# --- the global generators --------------------------------------------------------------------------------------------
def test_a_play_leaves_the_global_generators_alone():
    random.seed(5)
    np.random.seed(5)
    expected = random.Random(5).random(), np.random.RandomState(5).rand()
    play = RunningPlay.start(build_task(KUHN).game, 3)
    play.act("[bet]")
    play.act("[call]")
    assert (random.random(), np.random.rand()) == expected


def test_two_plays_at_once_are_dealt_the_cards_of_one_alone():
    """Kuhn poker deals from the global generator in each of three rounds."""
    game = build_task(KUHN).game
    alone = RunningPlay.start(game, 3)
    for move in ("[bet]", "[fold]", "[bet]", "[fold]"):
        alone.act(move)
    first, second = RunningPlay.start(game, 3), RunningPlay.start(game, 4)
    for move in ("[bet]", "[fold]", "[bet]", "[fold]"):
        first.act(move)
        second.act(move)
    assert first.views == alone.views


class DeepCopies(Copies):
    """The mutation: fork by ``copy.deepcopy`` while all copies draw from one generator, as TextArena's games do."""

    def fork(self, game, play):
        fork = object.__new__(type(play))
        fork.__dict__ |= {**play.__dict__, "env": copy.deepcopy(play.env), "paid": dict(play.paid)}
        return fork


def test_a_deep_copy_is_found_out():
    game = build_task(KUHN).game
    with pytest.raises(ForkError, match=r"after \d actions the play shows text="):
        prove(game, DeepCopies())
    game.ways = (DeepCopies(), Replays())
    assert type(choose_way(game)) is Replays
    # At run time the fork that was dealt other cards raises at its first action.
    game.way = DeepCopies()
    play = RunningPlay.start(game, 3)
    play.act("[bet]")
    with pytest.raises(ForkError, match="after 2 actions"):
        for _ in range(10):
            copy.deepcopy(play).act("[fold]")


# --- tasks ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [KUHN, TIC])
async def test_evaluations_play_each_seat_against_a_random_player(name):
    task = build_task(name)

    def reply(request):
        return random.Random(request.sampling.seed).choice(task.game.moves_in(request.messages[-1]["content"]))

    for rollout in await played(task, task.eval_requests("eval", 4), reply):
        (seat,) = rollout.rewards
        assert {step.actor_id for step in rollout.steps} <= {seat} == {rollout.artifact["model"]}
        assert rollout.metrics["score/model"] in (0.0, 0.5, 1.0)


async def test_a_game_for_one_that_lists_no_moves():
    task = build_task("textarena:GuessTheNumber-v0", {"moves": [f"[{number}]" for number in range(1, 21)]})
    assert task.game.actors == ("player",) and task.success_metric == "success/player"
    (rollout,) = await played(task, task.eval_requests("eval", 1), script(*(f"[{n}]" for n in range(1, 21))))
    assert len(rollout.steps) <= 10
    assert len({reply for _, _, reply in task.demonstrations(60, 0)}) > 10


def test_a_game_without_listed_moves_has_no_random_player():
    task = build_task("textarena:TruthAndDeception-v0")
    with pytest.raises(ValueError, match="lists no moves here: expected opponent = 'none', without trees"):
        task.episodes(TreeSampler(branches=2))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("KuhnPokr-v0", {}, "task='textarena:KuhnPokr-v0': .*not found"),
        ("KuhnPoker-v0", {"num_players": 3}, "task_options.num_players=3: KuhnPoker-v0 refuses it"),
        ("KuhnPoker-v0", {"arguments": {"rounds": 3}}, "rounds"),
    ],
)
def test_wrong_names_and_options_are_named(name, options, told):
    with pytest.raises(ValueError, match=told):
        build_task(f"textarena:{name}", options)


def last_line(observation):
    return observation.strip().splitlines()[-1]


@pytest.mark.parametrize("name", [KUHN, pytest.param(TIC, marks=pytest.mark.slow)])
def test_a_run_trains(tmp_path, name):
    run, lines = trained(tmp_path, name, render=f"{__name__}:last_line", max_turns=4)
    check_lines(lines)
    check_replays(tmp_path)
    assert run.task.credit_rule == "rae" and run.task.success_metric == "score/model"
