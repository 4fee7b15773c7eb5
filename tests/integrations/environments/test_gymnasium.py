"""Gymnasium: falls, cuts, memory and splits, with FrozenLake."""

from __future__ import annotations

from turnwise.tasks import build_task
from turnwise.tasks.base import split_of

from .helpers import played, request_of, said
from .test_contract import STILL, WAY

NAME = "gymnasium:FrozenLake-v1"


async def test_a_fall_and_a_cut():
    """Field 5 is a hole; the environment cuts off after 100 moves, and the task after ``max_turns``."""
    task, short = build_task(NAME, STILL), build_task(NAME, {**STILL, "max_turns": 3})
    (fell,) = await played(task, [request_of(task)], said("[down]", "[right]"))
    assert (fell.rewards, fell.extras["terminated"], fell.extras["truncated"]) == ({"player": 0.0}, True, False)
    assert fell.metrics["success/player"] == 0.0
    for one, steps, ended in ((task, 100, "done"), (short, 3, "max_turns")):
        (cut,) = await played(one, [request_of(one)], said("[up]"))
        assert (len(cut.steps), cut.extras["truncated"], cut.meta["ended"]) == (steps, True, ended)
        assert not cut.extras["terminated"]


async def test_memory_keeps_the_actors_own_turns():
    task = build_task(NAME, {**STILL, "memory": 2})
    (rollout,) = await played(task, [request_of(task)], said(*WAY))
    texts = [(message["role"], message["content"].splitlines()[0]) for message in rollout.steps[3].prompt[1:]]
    assert texts == [("user", "4"), ("assistant", "down"), ("user", "8"), ("assistant", "right"), ("user", "9")]


def test_splits_hold_different_seeds():
    task = build_task(NAME)
    seeds = {
        split: {request.artifact["seed"] for request in task.eval_requests(split, 300)}
        for split in ("validation", "eval")
    }
    seeds["train"] = {request.artifact["seed"] for step in range(30) for request in task.requests(step, 10, 2)}
    assert [len(seeds[split]) for split in ("train", "validation", "eval")] == [300, 300, 300]
    assert len(set.union(*seeds.values())) == 900
    for split, values in seeds.items():
        assert {split_of(f"{NAME}/{value}") for value in values} == {split}
    assert task.eval_requests("eval", 4) == task.eval_requests("eval", 9)[:4]
