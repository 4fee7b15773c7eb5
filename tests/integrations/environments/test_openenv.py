"""OpenEnv: a server on the loopback, its environment as a task."""

from __future__ import annotations

import copy
import random
import re

import pytest

from turnwise.arena import TreeSampler
from turnwise.integrations.environments.base.forks import ForkError, Replays, RunningPlay, choose_way, replayed
from turnwise.tasks import build_task
from turnwise.types import EpisodeRequest

from .helpers import check_lines, check_replays, played, trained
from .openenv_server import Unseeded, serving

MOVES = {"moves": {str(number): {"number": number} for number in range(1, 10)}}
PLAYS = 200


@pytest.fixture(scope="module")
def url():
    with serving() as found:
        yield found


def task_at(url, **options):
    return build_task(f"openenv:{url}", options or MOVES)


def requests(task, seed=3):
    return [EpisodeRequest(task.name, {"seed": seed}, seed=1)]


def script(*moves):
    left = list(moves)
    return lambda request: left.pop(0)


async def test_a_game_by_hand(url):
    """Seed 3 hides the 4. The guesses 5, 3 and 4 are too high, too low and right: -0.1, -0.1 and 1."""
    task = task_at(url)
    (rollout,) = await played(task, requests(task), script("[5]", "[3]", "So it is [4]."))
    legal = "\nLegal moves: [1] [2] [3] [4] [5] [6] [7] [8] [9]"
    assert [step.prompt[-1]["content"] for step in rollout.steps] == [
        f"hint: guess\ntries: 0\ntruncated: False{legal}",
        f"hint: lower\ntries: 1\ntruncated: False{legal}",
        f"hint: higher\ntries: 2\ntruncated: False{legal}",
    ]
    assert rollout.rewards == {"player": pytest.approx(0.8)} and rollout.metrics["success/player"] == 1.0
    assert (rollout.extras["terminated"], rollout.extras["truncated"]) == (True, False)
    (cut,) = await played(task, requests(task), script(*["[9]"] * 4))
    assert (cut.extras["terminated"], cut.extras["truncated"]) == (False, True)
    assert cut.rewards == {"player": pytest.approx(-0.4)}


@pytest.mark.parametrize(
    "text", ['{"number": "many"}', '{"digit": 4}', "{}", "4", "[]", "", '{"number": 4', "[" * 5000]
)
async def test_a_bad_action_is_an_illegal_move(url, text):
    """The server refuses what doesn't fit the action's schema; what is no JSON object never gets there."""
    task = task_at(url, invalid_cost=0.5)
    (rollout,) = await played(task, requests(task), script('{"number": 9}', text))
    assert rollout.rewards == {"player": pytest.approx(-0.6)} and rollout.metrics["legal/player"] == 0.5


def as_words(observation):
    return f"try {observation['tries'] + 1}: {observation['hint']}"


def first_number(text, legal):
    return {"number": int(re.findall(r"\d+", text)[0])}


async def test_own_functions_render_and_parse(url):
    task = task_at(url, render=f"{__name__}:as_words", parse=f"{__name__}:first_number")
    (rollout,) = await played(task, requests(task), script("5 or 6", "4"))
    assert [step.prompt[-1]["content"] for step in rollout.steps] == ["try 1: guess", "try 2: lower"]
    assert rollout.rewards == {"player": pytest.approx(0.9)}
    (unread,) = await played(task, requests(task), script("five"))
    assert unread.rewards == {"player": -1.0} and "IndexError" in unread.steps[0].info["illegal_move"]


async def test_a_field_takes_the_text(url):
    """The schema wants a number, which the server reads from a text of digits."""
    task = task_at(url, field="number")
    (rollout,) = await played(task, requests(task), script("5", "four"))
    assert rollout.rewards == {"player": pytest.approx(-1.1)} and rollout.metrics["legal/player"] == 0.5


# --- forks ------------------------------------------------------------------------------------------------------------
def test_forks_equal_the_replayed_original_at_every_node(url):
    game = task_at(url).game
    game.way = choose_way(game)
    for seed in range(PLAYS):
        rng = random.Random(seed)
        play, forks = RunningPlay.start(game, seed), []
        while not play.view.is_over:
            forks.append(copy.deepcopy(play))
            play.act(game.read(game.random_reply(play.view, rng), play.view))
        for node, fork in enumerate(forks):
            assert fork.view == play.views[node]
            assert fork.act(play.actions[node]) == play.views[node + 1]
            fork.close()
        replayed(game, seed, play.actions, play.views).close()


def test_a_server_that_ignores_the_seed_is_refused():
    with serving(Unseeded) as url:
        task = task_at(url)
        with pytest.raises(ValueError, match=r"can't be forked \(replays: .*; expected rollout.branches = 1"):
            task.episodes(TreeSampler(branches=2))
        task.game.way = Replays()
        play = RunningPlay.start(task.game, 1)
        play.act("5")
        with pytest.raises(ForkError, match="after 1 actions the play shows"):
            for _ in range(9):
                copy.deepcopy(play).act("5")


async def test_a_tree_plays_in_sessions_of_its_own(url):
    task = task_at(url)
    for rollout in await played(task, task.requests(1, 2, 1), tree=TreeSampler(branches=3)):
        assert len(rollout.steps) % 3 == 0 and all(step.reward is not None for step in rollout.steps)


# --- faults -----------------------------------------------------------------------------------------------------------
def test_a_missing_server_and_a_full_one_are_named():
    with pytest.raises(ConnectionError, match=r"task='openenv:http://127.0.0.1:9': expected a running OpenEnv server"):
        RunningPlay.start(build_task("openenv:http://127.0.0.1:9", MOVES).game, 1)
    with serving(sessions=1) as url:
        game = task_at(url).game
        first = RunningPlay.start(game, 1)
        with pytest.raises(ConnectionError, match="expected a server with max_concurrent_envs above"):
            RunningPlay.start(game, 2)
        first.close()


def test_options_that_exclude_each_other_are_named(url):
    with pytest.raises(ValueError, match=r"task_options.field='number': has no effect with task_options.moves"):
        task_at(url, field="number", **MOVES)


@pytest.mark.parametrize("branches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_trains(tmp_path, url, branches):
    run, lines = trained(tmp_path, f"openenv:{url}", branches, render=f"{__name__}:as_words", **MOVES)
    check_lines(lines)
    check_replays(tmp_path)
    assert run.task.success_metric == "success/player"
