from __future__ import annotations

import asyncio
import time

import pytest

from turnwise.train.simulate.virtual_clock import run_virtually


def test_an_hour_passes_at_once_and_in_order():
    async def main():
        happened = []

        async def after(seconds, name):
            await asyncio.sleep(seconds)
            happened.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(after(3600, "late"), after(0.25, "early"), after(7, "between"))
        return happened

    began = time.perf_counter()
    assert run_virtually(main()) == [("early", 0.25), ("between", 7.0), ("late", 3600.0)]
    assert time.perf_counter() - began < 60, "the clock must not be the machine's"


def test_timeouts_are_virtual_too():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 1000.0


def test_a_deadlock_is_told():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="everything waits and no timer is set"):
        run_virtually(main())
