"""Gymnasium: FrozenLake and Blackjack as tasks."""

from __future__ import annotations

import pytest

from turnwise.arena import TreeSampler
from turnwise.integrations.environments.base.forks import Copies
from turnwise.tasks import build_task
from turnwise.tasks.base import split_of
from turnwise.types import EpisodeRequest

from .helpers import check_lines, check_replays, played, trained

pytestmark = pytest.mark.usefixtures("narrow_model")

gymnasium = pytest.importorskip("gymnasium", reason="the extra 'gymnasium' brings it")
LAKE = "gymnasium:FrozenLake-v1"
NAMES = ["left", "down", "right", "up"]
STILL = {"arguments": {"is_slippery": False}, "actions": NAMES}
WAY = ["down", "down", "right", "right", "down", "right"]
"""The shortest way over the lake: from field 0 over 4, 8, 9, 10 and 14 to the goal 15."""


def script(*moves):
    """Say the moves one after another, whichever call asks."""
    left = list(moves)
    return lambda request: left.pop(0)


def play(task, seed=1):
    return [EpisodeRequest(task.name, {"seed": seed}, seed=seed)]


async def test_a_walk_over_the_lake():
    task = build_task(LAKE, STILL)
    (rollout,) = await played(task, play(task), script(*(f"I go [{move}]" for move in WAY)))
    assert [step.prompt[-1]["content"].splitlines()[0] for step in rollout.steps] == ["0", "4", "8", "9", "10", "14"]
    assert rollout.steps[0].prompt[-1]["content"] == "0\nLegal moves: [left] [down] [right] [up]"
    assert rollout.rewards == {"player": 1.0} and rollout.meta["ended"] == "done"
    metrics = rollout.metrics
    assert (metrics["success/player"], metrics["legal/player"], metrics["cut_off/player"]) == (1.0, 1.0, 0.0)
    assert rollout.extras["terminated"] and not rollout.extras["truncated"]


async def test_a_fall_and_a_cut():
    """Field 5 is a hole; the environment cuts off after 100 moves, and the task after ``max_turns``."""
    task = build_task(LAKE, STILL)
    (fell,) = await played(task, play(task), script("[down]", "[right]"))
    assert (fell.rewards, fell.extras["terminated"], fell.extras["truncated"]) == ({"player": 0.0}, True, False)
    assert fell.metrics["success/player"] == 0.0
    (cut,) = await played(task, play(task), lambda request: "[up]")
    assert (len(cut.steps), cut.extras["terminated"], cut.extras["truncated"]) == (100, False, True)
    short = build_task(LAKE, {**STILL, "max_turns": 3})
    (cut,) = await played(short, play(short), lambda request: "[up]")
    assert (len(cut.steps), cut.extras["truncated"], cut.meta["ended"]) == (3, True, "max_turns")


@pytest.mark.parametrize("text", ["", "jump", "[5]", "[left", "x" * 10_000, "[\x00]", "[[[]]]"])
async def test_text_that_is_no_move_ends_the_play_and_costs(text):
    task = build_task(LAKE, {**STILL, "invalid_cost": 0.25})
    (rollout,) = await played(task, play(task), script("[down]", text))
    assert rollout.rewards == {"player": -0.25} and rollout.metrics["legal/player"] == 0.5
    assert "no move" in rollout.steps[-1].info["illegal_move"]


async def test_blackjack_pays_what_gymnasium_pays():
    """With seed 3 and no card drawn, the play pays what a plain environment pays."""
    env = gymnasium.make("Blackjack-v1")
    first, _ = env.reset(seed=3)
    _, reward, terminated, *_ = env.step(0)
    task = build_task("gymnasium:Blackjack-v1", {"actions": ["stick", "hit"]})
    (rollout,) = await played(task, play(task, 3), script("[stick]"))
    assert terminated and rollout.rewards == {"player": reward}
    assert rollout.steps[0].prompt[-1]["content"].startswith(f"[{first[0]}, {first[1]}, {int(first[2])}]\n")


def as_words(observation):
    return f"You stand on field {observation}."


def as_letter(text, legal):
    return {"L": "left", "D": "down", "R": "right", "U": "up"}.get(text[:1])


async def test_own_functions_render_and_parse():
    task = build_task(LAKE, {**STILL, "render": f"{__name__}:as_words", "parse": f"{__name__}:as_letter"})
    (rollout,) = await played(task, play(task), script(*(move[0].upper() for move in WAY)))
    assert rollout.steps[1].prompt[-1]["content"].startswith("You stand on field 4.")
    assert rollout.rewards == {"player": 1.0}
    (rollout,) = await played(task, play(task), script("north"))
    assert rollout.rewards == {"player": -1.0}


async def test_memory_keeps_the_actors_own_turns():
    task = build_task(LAKE, {**STILL, "memory": 2})
    (rollout,) = await played(task, play(task), script(*WAY))
    said = [(message["role"], message["content"].splitlines()[0]) for message in rollout.steps[3].prompt[1:]]
    assert said == [("user", "4"), ("assistant", "down"), ("user", "8"), ("assistant", "right"), ("user", "9")]


async def test_a_tree_pays_each_action_what_it_earned():
    """On the last field before the goal, the branch that walks into it earns 1, and the others nothing."""
    task = build_task(LAKE, STILL)
    moves = [move for step in WAY for move in (step, "left")]
    (rollout,) = await played(task, play(task), script(*moves), tree=TreeSampler(branches=2, select="first"))
    assert [step.reward for step in rollout.steps] == [0.0] * 10 + [1.0, 0.0]
    assert type(task.game.way) is Copies


def test_splits_hold_different_seeds():
    task = build_task(LAKE)
    seeds = {
        split: {request.artifact["seed"] for request in task.eval_requests(split, 300)}
        for split in ("validation", "eval")
    }
    seeds["train"] = {request.artifact["seed"] for step in range(30) for request in task.requests(step, 10, 2)}
    assert [len(seeds[split]) for split in ("train", "validation", "eval")] == [300, 300, 300]
    assert len(set.union(*seeds.values())) == 900
    for split, values in seeds.items():
        assert {split_of(f"{LAKE}/{value}") for value in values} == {split}
    assert task.eval_requests("eval", 4) == task.eval_requests("eval", 9)[:4]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"actions": ["left", "right"]}, r"actions=\['left', 'right'\]: expected 4 different names"),
        ({"arguments": {"is_slipery": True}}, "FrozenLake-v1.*is_slipery"),
        ({"render": "nowhere:f"}, "task_options.render.*No module named 'nowhere'"),
        ({"render": "json"}, "task_options.render"),
        ({"actionz": []}, "unknown option 'actionz'; did you mean 'actions'"),
    ],
)
def test_wrong_options_are_named(options, told):
    with pytest.raises(ValueError, match=told):
        build_task(LAKE, options)


def test_wrong_environments_are_named():
    with pytest.raises(ValueError, match=r"task='gymnasium:FrozenLak-v1': .*FrozenLak"):
        build_task("gymnasium:FrozenLak-v1")
    with pytest.raises(ValueError, match=r"its actions are Box.*expected task_options.parse"):
        build_task("gymnasium:Pendulum-v1")
    with pytest.raises(ValueError, match="expected a name after the colon"):
        build_task("gymnasium:")


@pytest.mark.parametrize("branches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_trains(tmp_path, branches):
    run, lines = trained(tmp_path, LAKE, branches, lr=1e-2, actions=NAMES)
    check_lines(lines)
    check_replays(tmp_path)
    assert run.task.success_metric == "success/player"
    assert max(line["metric/legal/player"] for line in lines if "metric/legal/player" in line) > 0
