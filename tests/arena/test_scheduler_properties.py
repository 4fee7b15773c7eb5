"""Random trees of episodes on a virtual clock: whatever fails, is late or is cancelled, every slot comes back."""

from __future__ import annotations

import asyncio
import random

import pytest

from turnwise.arena import Arena, Episode, Rubric
from turnwise.train.virtual_clock import run_virtually
from turnwise.types import Actor, EpisodeRequest, ModelError

from .conftest import CharTokenizer, respond


class Client:
    """Takes its time, hangs, or fails; counts how each call ended."""

    def __init__(self, rng):
        self.rng = rng
        self.asked = self.answered = self.failed = self.cancelled = 0
        self.in_flight = self.peak = 0
        self.of_helper = self.helper_peak = 0

    def version(self, policy):
        return 0

    async def generate(self, requests):
        self.asked += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        helped = requests[0].policy == "helper"
        self.of_helper += helped
        self.helper_peak = max(self.helper_peak, self.of_helper)
        try:
            luck = self.rng.random()
            # In quarters, so that answers, time limits and cancellations meet in one turn of the loop.
            await asyncio.sleep(self.rng.randrange(8) / 4 if luck > 0.03 else 500.0)
            if luck > 0.9:
                raise ModelError("the model failed")
            self.answered += 1
            return [respond("1")]
        except ModelError:
            self.failed += 1
            raise
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
            self.of_helper -= helped


class Node(Episode):
    """Plays the calls and children of its artifact, one after the other or at once; notes when it began and ended."""

    episode_type = "node"
    rubric = Rubric([lambda: {"player": 1.0, "helper": 1.0}])

    def __init__(self):
        self.spans = []

    async def rollout(self, arena, artifact, state=None):
        began = asyncio.get_running_loop().time()
        try:
            works = [self.call_model(who, "go", arena) for who in artifact["calls"]]
            if artifact["children"]:
                works.append(arena.generate_rollouts([request_of(child) for child in artifact["children"]]))
            if artifact["at_once"]:
                ended = await asyncio.gather(*works, return_exceptions=True)
                for outcome in ended:
                    if isinstance(outcome, BaseException):
                        raise outcome
            else:
                for work in works:
                    try:
                        await work
                    except ModelError:
                        if artifact["breaks"]:
                            raise
            if artifact["breaks"] and len(artifact["calls"]) > 2:
                raise RuntimeError("a bug of the game")
            return state
        finally:
            for work in works:
                work.close()
            self.spans.append((artifact["timeout"], asyncio.get_running_loop().time() - began))


def random_tree(rng, depth):
    fan_out = rng.choice([0, 0, 1, 2, 4]) if depth else 0
    return {
        "calls": rng.choices(["player", "helper"], k=rng.randrange(4)),
        "at_once": rng.random() < 0.5,
        "breaks": rng.random() < 0.2,
        "timeout": rng.choice([None, None, 0.5, 3.0, 40.0]),
        "priority": rng.choice([0, 0, 1]),
        "children": [random_tree(rng, depth - 1) for _ in range(fan_out)],
    }


def request_of(tree):
    return EpisodeRequest("node", tree, group_id=0, timeout=tree["timeout"], priority=tree["priority"])


async def play_one(seed):
    rng = random.Random(seed)
    limit, client, node = rng.randint(1, 6), Client(rng), Node()
    arena = Arena(client, CharTokenizer(), max_concurrency=limit, failure_threshold=1.0, retries=rng.choice([0, 0, 2]))
    quota = rng.choice([None, 1, 2])
    arena.add_actor(Actor("player"))
    arena.add_actor(Actor("helper", policy="helper", max_concurrency=quota))
    arena.add_episode(node)
    requests = [request_of(random_tree(rng, rng.randint(0, 5))) for _ in range(rng.randint(1, 4))]
    playing = asyncio.ensure_future(arena.generate_rollouts(requests))
    if rng.random() < 0.2:
        await asyncio.sleep(rng.randrange(32) / 4)
        playing.cancel()
    [results] = await asyncio.gather(playing, return_exceptions=True)
    if not isinstance(results, asyncio.CancelledError):
        assert [result.rollout.artifact for result in results] == [request.artifact for request in requests]
        for result in (node for top in results for node in top.walk()):
            if result.rollout.error is None:
                asked = result.rollout.artifact["children"]
                assert [child.rollout.artifact for child in result.children] == asked, "one result each, in order"
    assert client.peak <= limit and (quota is None or client.helper_peak <= quota)
    assert client.asked == client.answered + client.failed + client.cancelled, "each call ended once"
    slots = [arena.budget.in_use, *(budget.in_use for budget in arena.quotas.values())]
    assert client.in_flight == sum(slots) == 0, "every slot came back"
    assert len(asyncio.all_tasks()) == 1, "nothing runs on"
    for timeout, took in node.spans:
        assert timeout is None or took <= timeout + 1e-6
    # The budget still serves whoever comes next.
    client.rng = random.Random(0)
    [after] = await arena.generate_rollouts([request_of({**random_tree(rng, 0), "calls": [], "breaks": False})])
    assert after.rollout.error is None
    return client


@pytest.mark.parametrize("block", range(10))
def test_random_trees(block):
    """100 of them each; a deadlock is an error of the virtual clock. A failure names its seed."""
    total = {"answered": 0, "failed": 0, "cancelled": 0}
    for seed in range(block * 100, block * 100 + 100):
        try:
            client = run_virtually(play_one(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        for name in total:
            total[name] += getattr(client, name)
    assert all(total.values()), f"not all of it happened: {total}"
