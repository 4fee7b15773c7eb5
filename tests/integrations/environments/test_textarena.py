"""TextArena: the games' own rules for illegal moves, their global generators, and games that list no moves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from turnwise.arena import TreeSampler
from turnwise.integrations.environments.base.forks import RunningPlay
from turnwise.tasks import build_task

from .helpers import played, request_of, said

pytestmark = pytest.mark.needs("textarena")
KUHN, TIC = "textarena:KuhnPoker-v0", "textarena:TicTacToe-v0"


async def test_an_illegal_move_follows_the_games_own_rule():
    """Tic-tac-toe forgives one error in a turn, and the second one loses -1 to 1."""
    task = build_task(TIC)
    (forgiven,) = await played(task, [request_of(task)], said("[0]", "[0]", "[4]", "[1]", "nine", "[8]", "[2]"))
    assert [step.actor_id[-1] for step in forgiven.steps] == list("0110110")
    assert forgiven.metrics["legal/player1"] == 0.5 and forgiven.rewards["player0"] == 1.0
    (lost,) = await played(task, [request_of(task)], said("[0]", "[0]", "[9]"))
    assert lost.rewards == {"player0": 1.0, "player1": -1.0} and lost.metrics["legal/player1"] == 0.0


@pytest.mark.parametrize("name", [KUHN, TIC])
async def test_no_text_stops_an_episode(name):
    task = build_task(name)
    for text in ("", "\x00", "[" * 1000, "[99999999999999999999]", "ü" * 500, "[-1]", "[1][2]"):
        (rollout,) = await played(task, [request_of(task)], said(text))
        assert sum(rollout.rewards.values()) == 0 and -1 in rollout.rewards.values(), text


def test_plays_share_no_global_generator():
    """Kuhn poker deals from the global generator in each of three rounds. Two plays at once get their own cards."""
    random.seed(5)
    np.random.seed(5)
    expected = random.Random(5).random(), np.random.RandomState(5).rand()
    game = build_task(KUHN).game
    alone, first, second = (RunningPlay.start(game, seed) for seed in (3, 3, 4))
    for move in ("[bet]", "[fold]", "[bet]", "[fold]"):
        alone.act(move)
    for move in ("[bet]", "[fold]", "[bet]", "[fold]"):
        first.act(move)
        second.act(move)
    assert first.views == alone.views
    assert (random.random(), np.random.rand()) == expected


async def test_a_game_for_one_that_lists_no_moves():
    task = build_task("textarena:GuessTheNumber-v0", {"moves": [f"[{number}]" for number in range(1, 21)]})
    assert task.game.actors == ("player",) and task.success_metric == "success/player"
    (rollout,) = await played(task, task.eval_requests("eval", 1), said(*(f"[{n}]" for n in range(1, 21))))
    assert len(rollout.steps) <= 10
    assert len({reply for _, _, reply in task.demonstrations(60, 0)}) > 10


def test_a_game_without_listed_moves_has_no_random_player():
    task = build_task("textarena:TruthAndDeception-v0")
    with pytest.raises(ValueError, match="lists no moves here: expected opponent = 'none', without trees"):
        task.episodes(TreeSampler(branches=2))
