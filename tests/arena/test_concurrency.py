"""The budget of model calls, and running side by side."""

from __future__ import annotations

import asyncio

import pytest
from virtual_clock import run_virtually

from turnwise.arena import BatchFailedError
from turnwise.arena.runtime.concurrency import (
    AnswerLimit,
    ClientCall,
    EpisodeCounter,
    FailureBudget,
    PrioritySemaphore,
    gather_or_cancel,
)
from turnwise.types import ModelError


def test_waiting_calls_are_served_in_order_then_first_come():
    budget, served = PrioritySemaphore(1), []

    async def call(name, order):
        async with budget.slot(order):
            served.append(name)
            await asyncio.sleep(0)

    async def main():
        await gather_or_cancel(
            call(name, order) for name, order in [("first", (9,)), ("b", (1,)), ("c", (1,)), ("a", (0,)), ("d", (2,))]
        )

    asyncio.run(main())
    assert served == ["first", "a", "b", "c", "d"]


def test_one_budget_serves_several_event_loops():
    budget = PrioritySemaphore(1)

    async def abandoned():
        async def wait():
            async with budget.slot((0,)):
                await asyncio.sleep(60)

        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        return tasks  # the loop ends with one task in its slot and two waiting

    async def again():
        async with asyncio.timeout(1), budget.slot((5,)):
            return "served"

    asyncio.run(abandoned())
    assert asyncio.run(again()) == asyncio.run(again()) == "served"


async def test_run_all_raises_the_first_exception_tells_of_every_end_and_leaves_nothing_running():
    ended, told = [], []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    async def broken():
        await asyncio.sleep(0)
        raise KeyError("first")

    def task(work):
        made = asyncio.ensure_future(work)
        made.add_done_callback(lambda _: told.append(1))
        return made

    await gather_or_cancel([task(asyncio.sleep(0)), asyncio.sleep(0)])
    assert len(told) == 1
    with pytest.raises(KeyError, match="first"):
        await gather_or_cancel([slow(), task(broken()), task(slow())])
    assert len(told) == 3 and len(asyncio.all_tasks()) == 1 and ended == ["slow", "slow"]


@pytest.mark.parametrize(("total", "threshold", "allowed"), [(4, 0.5, 2), (4, 0.0, 0), (4, 1.0, 4), (3, 0.5, 1)])
def test_the_failure_after_the_last_allowed_one_raises(total, threshold, allowed):
    failures = FailureBudget(total, threshold)
    for number in range(allowed):
        failures.add(f"traceback {number}")
    if allowed < total:
        with pytest.raises(BatchFailedError, match=f"{allowed + 1} of {total} episodes failed.*\n.*traceback 0"):
            failures.add("traceback 0")


def test_a_client_that_answers_nothing_fails_its_calls_and_a_long_queue_is_no_hang():
    """On a clock that jumps: answers of 60 s each, and one engine that never answers."""
    limit, ended = AnswerLimit(100), {}

    async def call(name, policy, seconds):
        began = asyncio.get_running_loop().time()
        try:
            async with ClientCall(policy, limit, (0,)):
                await asyncio.sleep(seconds)
            ended[name] = "answered"
        except ModelError as error:
            ended[name] = str(error).partition(" (")[0], asyncio.get_running_loop().time() - began

    async def main():
        queue = [call(f"{place}", "busy", 60 * place) for place in range(1, 6)]
        await asyncio.gather(*queue, call("alone", "hung", 9999), call("last", "busy", 9999))
        limit.seconds = 0
        await call("unlimited", "hung", 9999)

    run_virtually(main())
    told = "the client answered no call of policy {} for 100 s"
    assert ended.pop("alone") == (told.format("'hung'"), 100)
    assert ended.pop("last") == (told.format("'busy'"), 400)
    assert ended == dict.fromkeys(["1", "2", "3", "4", "5", "unlimited"], "answered")


def test_a_budget_needs_a_slot():
    with pytest.raises(ValueError, match="max_concurrency=0"):
        PrioritySemaphore(0)


def test_episodes_under_way_are_counted_over_all_batches():
    shown: list[tuple[int, int]] = []
    count = EpisodeCounter()
    with count.batch(2) as ended:
        ended()  # nobody is watching yet
        count.show = lambda ended, asked: shown.append((ended, asked))
        with count.batch(3) as other:
            other()
        ended()
    with count.batch(1) as ended:
        ended()
    assert shown == [(2, 5), (2, 2), (1, 1)]
    assert (count.ended, count.asked) == (0, 0)
