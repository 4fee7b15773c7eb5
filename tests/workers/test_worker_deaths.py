"""Workers that die, hang, and come back at other addresses: nothing is lost, and nothing is recorded twice."""

from __future__ import annotations

import asyncio
import random
import signal
import warnings
from typing import Any

import pytest

from turnwise.run.build import TaskArena
from turnwise.types import EpisodeRequest
from turnwise.workers.remote import MAX_DEATHS, WorkersLostError

from .playing import Workers, attach, build, difference, until
from .test_workers import OneByOne, plain, requests_of

pytestmark = pytest.mark.xdist_group("workers")


async def steps(name: str, arena: Any, count: int) -> list[Any]:
    arena.record_episodes, told = True, []
    for step in range(1, count + 1):
        results = await arena.generate_rollouts(requests_of(name, arena, step))
        told.append(plain(arena, results, arena.assign_credit_and_pack(results))[:4])
        arena.record_attempts()
    return [*told, arena.state_dict()]


@pytest.mark.parametrize("name", ["stores", "sudoku"])
async def test_workers_killed_at_random_moments(name: str, workers: Workers) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    expected = await steps(name, build(name, OneByOne), 4)
    arena = build(name, TaskArena)
    remote = attach(arena, name, workers.members(2))
    ended = asyncio.Event()

    async def kill() -> int:
        """Kill a worker that has episodes at a random moment, then start it again, until the run has ended."""
        kills = 0
        while not ended.is_set() and kills < MAX_DEATHS - 1:
            busy = [n for n in range(2) if (link := remote._links.get(f"worker-{n}")) and link.groups]
            if busy:
                # Until one is lost with its episodes, at once: later these may have ended by themselves.
                await asyncio.sleep(draw.random() * 0.05 if remote.deaths else 0.0)
                victim = draw.choice(busy)
                workers.kill(victim)
                kills += 1
                await asyncio.sleep(draw.random() * 0.1)
                await asyncio.to_thread(workers.start, victim)
            await asyncio.sleep(0.001)
        return kills

    killing = asyncio.ensure_future(kill())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = await steps(name, arena, 4)
        finally:
            ended.set()
            kills = await killing
    assert kills > 0 and remote.deaths > 0
    assert difference(found, expected) == ""


async def test_a_worker_that_hangs_is_given_up(workers: Workers) -> None:
    expected = await steps("stores", build("stores", OneByOne), 1)
    arena = build("stores", TaskArena)
    remote = attach(arena, "stores", workers.members(2), dead_after=1.0)
    await arena.evaluation().generate_rollouts(requests_of("stores", arena, 9))  # both are there
    workers.kill(1, signal.SIGSTOP)
    try:
        with pytest.warns(UserWarning, match=r"worker-1 is lost.*no sign of life for 1 seconds"):
            found = await steps("stores", arena, 1)
            # A step for which it had no work in hand may end before it is lost.
            await until(lambda: remote.playing() == ["worker-0"])
    finally:
        workers.kill(1, signal.SIGCONT)
    assert difference(found, expected) == ""
    await until(lambda: remote.playing() == ["worker-0", "worker-1"])  # it comes back by itself


async def test_episodes_that_kill_every_worker(workers: Workers) -> None:
    arena = build("own", TaskArena)
    remote = attach(arena, "own", workers.members(2))
    asked = [EpisodeRequest("leave", "x"), EpisodeRequest("leave", "die")]
    call = asyncio.ensure_future(arena.generate_rollouts(asked))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while not call.done() or not (workers.is_alive(0) and workers.is_alive(1)):
            for number in range(2):
                if not workers.is_alive(number):
                    await asyncio.to_thread(workers.start, number)
            await asyncio.sleep(0.05)
    assert remote.deaths == MAX_DEATHS
    with pytest.raises(WorkersLostError, match=rf"{MAX_DEATHS} workers died while they played e1: worker-\d: "):
        call.result()


async def test_all_workers_gone(workers: Workers) -> None:
    arena = build("stores", TaskArena)
    remote = attach(arena, "stores", workers.members(2), wait=0.5)
    await until(lambda: len(remote.playing()) == 2)
    call = asyncio.ensure_future(arena.generate_rollouts(requests_of("stores", arena, 1) * 10))
    await until(lambda: all(link.groups for link in remote._links.values()))
    for number in range(2):
        workers.kill(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(WorkersLostError, match=r"no worker for \d seconds: worker-0 at .*; worker-1 at "):
            await call
    assert arena.stores["said"].count() == 0, "nothing of a batch that failed is kept"
    await asyncio.to_thread(workers.start, 0, 1)
