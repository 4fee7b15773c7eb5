"""PettingZoo: tictactoe_v3 and connect_four_v3 in turns, rps_v2 parallel."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from turnwise.arena import TreeSampler
from turnwise.integrations.environments.base.forks import Copies, ForkError, Replays, RunningPlay, choose_way, prove
from turnwise.tasks import build_task
from turnwise.types import EpisodeRequest

from .helpers import check_lines, check_replays, played, random_reply, trained

pytest.importorskip("pettingzoo", reason="the extra 'pettingzoo' brings it")
pytest.importorskip("pygame", reason="the extra 'pettingzoo' brings it")
TIC, FOUR, RPS = "pettingzoo:tictactoe_v3", "pettingzoo:connect_four_v3", "pettingzoo:rps_v2"


def board(observation):
    """The marks of a board, the actor's own as X."""
    planes = np.asarray(observation).reshape(-1, 2)
    return "".join("XO"[int(pair[1])] if pair.any() else "." for pair in planes)


def script(*moves):
    left = list(moves)
    return lambda request: left.pop(0)


async def test_a_game_by_hand():
    """Fields 0, 1 and 2 win for the first player; each sees the board from its own side."""
    task = build_task(TIC, {"render": f"{__name__}:board"})
    requests = [EpisodeRequest(TIC, {"seed": 1})]
    (rollout,) = await played(task, requests, script("[0]", "[4]", "[1]", "I take [8]", "[2]"))
    assert [(step.actor_id, step.prompt[-1]["content"]) for step in rollout.steps] == [
        ("player_1", ".........\nLegal moves: [0] [1] [2] [3] [4] [5] [6] [7] [8]"),
        ("player_2", "O........\nLegal moves: [1] [2] [3] [4] [5] [6] [7] [8]"),
        ("player_1", "X...O....\nLegal moves: [1] [2] [3] [5] [6] [7] [8]"),
        ("player_2", "OO..X....\nLegal moves: [2] [3] [5] [6] [7] [8]"),
        ("player_1", "XX..O...O\nLegal moves: [2] [3] [5] [6] [7]"),
    ]
    assert rollout.rewards == {"player_1": 1.0, "player_2": -1.0}
    assert rollout.metrics["score/player_1"] == 1.0 and rollout.extras["terminated"]


@pytest.mark.parametrize("text", ["[0]", "[9]", "", "middle", "[1" * 1000])
async def test_an_illegal_move_never_reaches_the_environment(text, capsys):
    """PettingZoo would print a warning, and pay -1 and 0."""
    task = build_task(TIC)
    (rollout,) = await played(task, [EpisodeRequest(TIC, {"seed": 1})], script("[0]", text))
    assert rollout.rewards == {"player_1": 1.5, "player_2": -1.5}
    assert rollout.extras["illegal"] == "player_2" and "Illegal" not in capsys.readouterr().out


async def test_both_choose_before_either_is_shown():
    """In rock, paper, scissors the second prompt is the first one's; a round pays 1 and -1; 15 rounds truncate it."""
    task = build_task(RPS, {"parallel": True, "actions": ["rock", "paper", "scissors"]})
    (rollout,) = await played(task, [EpisodeRequest(RPS, {"seed": 1})], script(*["[paper]", "[rock]"] * 15))
    assert [step.actor_id for step in rollout.steps] == ["player_0", "player_1"] * 15
    shown = [step.prompt[-1]["content"].splitlines()[0] for step in rollout.steps[:4]]
    assert shown == ["3", "3", "0", "1"], "nothing (3) before the first round, then what the other chose"
    assert rollout.rewards == {"player_0": 15.0, "player_1": -15.0}
    assert (rollout.extras["terminated"], rollout.extras["truncated"]) == (False, True)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", [TIC, FOUR, RPS])
async def test_rewards_are_those_of_the_packages_own_loop(name, seed):
    task = build_task(name)
    (rollout,) = await played(task, [EpisodeRequest(name, {"seed": seed}, seed=seed)])
    env, earned = task.game.maker(), dict.fromkeys(task.game.actors, 0.0)
    env.reset(seed=seed)
    moves = iter(int(step.completion[1:-1]) for step in rollout.steps)
    for agent in env.agent_iter():
        _, reward, terminated, truncated, _ = env.last()
        earned[agent] += reward
        env.step(None if terminated or truncated else next(moves))
    assert rollout.rewards == earned and sum(earned.values()) == 0


class DeepCopies(Copies):
    """The mutation: fork an environment by ``copy.deepcopy``."""

    def fork(self, game, play):
        fork = object.__new__(type(play))
        fork.__dict__ |= {**play.__dict__, "env": copy.deepcopy(play.env), "paid": dict(play.paid)}
        return fork


@pytest.mark.parametrize("name", [TIC, FOUR])
def test_a_deep_copy_is_found_out(name):
    """It is an environment without a game, or a new game."""
    game = build_task(name).game
    with pytest.raises((ForkError, AttributeError)):
        prove(game, DeepCopies())
    game.way = DeepCopies()
    play = RunningPlay.start(game, 1)
    play.act("0")
    with pytest.raises((ForkError, AttributeError)):
        copy.deepcopy(play).act("1")
    game.ways = (DeepCopies(), Replays())
    assert type(choose_way(game)) is Replays


async def test_evaluations_play_each_seat_against_a_random_player():
    task = build_task(FOUR)
    for rollout in await played(task, task.eval_requests("eval", 4), random_reply):
        (seat,) = rollout.rewards
        assert {step.actor_id for step in rollout.steps} == {seat} == {rollout.artifact["model"]}
        assert rollout.metrics["score/model"] in (0.0, 0.5, 1.0)


async def test_a_tree_pays_the_winning_move():
    task = build_task(TIC)
    moves = script(*(f"[{move}]" for move in (0, 4, 1, 8) for _ in range(2)), "[2]", "[3]")
    tree = TreeSampler(branches=2, select="first")
    (rollout,) = await played(task, [EpisodeRequest(TIC, {"seed": 1})], moves, tree=tree)
    assert [step.reward for step in rollout.steps] == [0.0] * 8 + [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("tictactoe_v9", {}, "task='pettingzoo:tictactoe_v9': expected a module of classic"),
        ("tictactoe_v3", {"parallel": True}, "task_options.parallel=True: .*tictactoe_v3 has no parallel_env"),
        ("tictactoe_v3", {"actions": ["a"]}, r"actions=\['a'\]: expected 9 different names"),
        ("tictactoe_v3", {"arguments": {"size": 4}}, r"task_options.arguments=\{'size': 4\}"),
        ("no.such_v0", {}, "task='pettingzoo:no.such_v0': expected a module"),
    ],
)
def test_wrong_names_and_options_are_named(name, options, told):
    with pytest.raises(ValueError, match=told):
        build_task(f"pettingzoo:{name}", options)


@pytest.mark.parametrize("name", [TIC, pytest.param(FOUR, marks=pytest.mark.slow)])
def test_a_run_trains(tmp_path, name):
    run, lines = trained(tmp_path, name, render=f"{__name__}:board", max_turns=4)
    check_lines(lines)
    check_replays(tmp_path)
    assert run.task.credit_rule == "rae" and run.task.success_metric == "score/model"
