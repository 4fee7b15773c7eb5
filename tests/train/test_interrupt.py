from __future__ import annotations

import asyncio

import pytest

from turnwise.train.interrupt import StopRequest


async def test_work_is_cancelled_when_a_stop_is_requested():
    stop, cancelled = StopRequest(), []

    async def endless():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with stop.listening():
        asyncio.get_running_loop().call_later(0.01, stop.request)
        assert await asyncio.wait_for(stop.unless_requested(endless()), timeout=10) is None
    assert cancelled == [True] and stop.requested


async def test_finished_work_is_returned_and_its_error_raised():
    stop = StopRequest()

    async def work(value):
        return 1 / value

    with stop.listening():
        assert await stop.unless_requested(work(2)) == 0.5
        with pytest.raises(ZeroDivisionError):
            await stop.unless_requested(work(0))
