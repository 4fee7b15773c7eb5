from __future__ import annotations

import asyncio
import time

from turnwise.replay.event_loop import DeadlockDetectingLoop


def run(main):
    with asyncio.Runner(loop_factory=DeadlockDetectingLoop) as runner:
        return runner.run(main())


def test_who_waits_for_ever_is_told_of():
    async def main():
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        loop.on_idle = told.set
        await told.wait()
        return "told"

    assert run(main) == "told"


def test_timers_threads_and_pipes_are_no_idleness():
    async def main():
        calls = []
        asyncio.get_running_loop().on_idle = lambda: calls.append("idle")
        await asyncio.sleep(0.3)
        await asyncio.to_thread(time.sleep, 0.3)
        process = await asyncio.create_subprocess_exec("sleep", "0.3", stdout=asyncio.subprocess.PIPE)
        await process.communicate()
        return calls, asyncio.get_running_loop().in_threads

    assert run(main) == ([], 0)
