"""OpenEnv: actions that the server refuses, and servers that are gone, full or without a seed."""

from __future__ import annotations

import copy

import pytest

from turnwise.arena import TreeSampler
from turnwise.integrations.environments.base.forks import ForkError, Replays, RunningPlay
from turnwise.tasks import build_task

from .cases import MOVES
from .helpers import played, request_of, said

pytestmark = pytest.mark.needs("openenv")
NO_ACTIONS = ['{"number": "many"}', '{"digit": 4}', "{}", "4", "[]", "", '{"number": 4', "[" * 5000]


async def test_a_bad_action_is_an_illegal_move(url):
    """The server refuses what doesn't fit the action's schema; what is no JSON object never gets there."""
    task = build_task(f"openenv:{url}", {"invalid_cost": 0.5})
    for text in NO_ACTIONS:
        (rollout,) = await played(task, [request_of(task, 3)], said('{"number": 9}', text))
        assert rollout.rewards == {"player": pytest.approx(-0.6)} and rollout.metrics["legal/player"] == 0.5, text


async def test_a_field_takes_the_text(url):
    """The schema wants a number, which the server reads from a text of digits."""
    task = build_task(f"openenv:{url}", {"field": "number"})
    (rollout,) = await played(task, [request_of(task, 3)], said("5", "four"))
    assert rollout.rewards == {"player": pytest.approx(-1.1)} and rollout.metrics["legal/player"] == 0.5


def test_a_server_that_ignores_the_seed_is_refused():
    from .openenv_server import Unseeded, serving

    with serving(Unseeded) as url:
        task = build_task(f"openenv:{url}", MOVES)
        with pytest.raises(ValueError, match=r"can't be forked \(replays: .*; expected rollout.branches = 1"):
            task.episodes(TreeSampler(branches=2))
        task.game.fork_method = Replays()
        play = RunningPlay.start(task.game, 1)
        play.act("5")
        with pytest.raises(ForkError, match="after 1 actions the play shows"):
            for _ in range(9):
                copy.deepcopy(play).act("5")


def test_a_missing_server_and_a_full_one_are_named():
    from .openenv_server import serving

    with pytest.raises(ConnectionError, match=r"task='openenv:http://127.0.0.1:9': expected a running OpenEnv server"):
        RunningPlay.start(build_task("openenv:http://127.0.0.1:9", MOVES).game, 1)
    with serving(sessions=1) as url:
        game = build_task(f"openenv:{url}", MOVES).game
        first = RunningPlay.start(game, 1)
        with pytest.raises(ConnectionError, match="expected a server with max_concurrent_envs above"):
            RunningPlay.start(game, 2)
        first.close()


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (RuntimeError("CAPACITY_REACHED"), ConnectionError, "expected a server with max_concurrent_envs above"),
        (RuntimeError("no such seed"), RuntimeError, "^no such seed$"),
    ],
)
def test_an_answer_that_comes_before_the_close_is_read(monkeypatch, error, raised, told):
    def refuse(game, seed):
        raise error

    monkeypatch.setattr("turnwise.integrations.environments.openenv.OpenEnvPlay", refuse)
    with pytest.raises(raised, match=told):
        build_task("openenv:http://127.0.0.1:9", MOVES).game.start(1)
