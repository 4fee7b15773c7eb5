"""One program has one event loop, from its first check to the closing of its clients."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from turnwise.utils import threads
from turnwise.utils.threads import end_program_loop, run_in_program, run_to_end

from .test_output import callers


def test_what_is_kept_between_calls_serves_all_of_them() -> None:
    """A lock that is waited for, a queue, a task in the background."""
    lock, queue, ended = asyncio.Lock(), asyncio.Queue[int](1), []
    tasks = []

    async def count() -> None:
        try:
            for number in range(100):
                await queue.put(number)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def use() -> int:
        if not tasks:
            tasks.append(asyncio.create_task(count()))

        async def locked() -> int:
            async with lock:
                await asyncio.sleep(0)
                return await queue.get()

        return sum(await asyncio.gather(locked(), locked()))

    assert [run_in_program(use()) for _ in range(3)] == [1, 5, 9]
    assert not tasks[0].done()
    end_program_loop()
    assert ended == ["cancelled"]
    end_program_loop()
    lock, queue, tasks = asyncio.Lock(), asyncio.Queue(1), []
    assert run_in_program(use()) == 1, "the next program has its own"


def test_an_error_ends_one_call_and_not_the_loop() -> None:
    async def loop_of(error: BaseException | None = None) -> asyncio.AbstractEventLoop:
        if error is not None:
            raise error
        return asyncio.get_running_loop()

    first = run_in_program(loop_of())
    for error in (ValueError("x"), RuntimeError("y"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            run_in_program(loop_of(error))
    assert run_in_program(loop_of()) is first


def test_a_signal_cancels_the_call_alone() -> None:
    seen: list[str] = []

    async def wait() -> None:
        seen.append("begins")
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("ends")

    async def interrupted() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await wait()

    with pytest.raises(KeyboardInterrupt):
        run_in_program(interrupted())
    assert seen == ["begins", "ends"]

    async def after() -> int:
        return 4

    assert run_in_program(after()) == 4


@pytest.mark.parametrize("run", [run_in_program, run_to_end])
async def test_in_a_notebook_the_error_says_what_to_do(run) -> None:
    async def main() -> int:
        return 4

    with pytest.raises(RuntimeError, match=r"an event loop runs in this thread already.*asyncio.to_thread"):
        run(main())
    assert await asyncio.to_thread(run, main()) == 4


def test_two_threads_at_once_are_two_loops() -> None:
    both = threading.Barrier(2, timeout=10)
    loops = []

    async def meet() -> None:
        loops.append(asyncio.get_running_loop())
        await asyncio.to_thread(both.wait)

    threads = [threading.Thread(target=lambda: run_in_program(meet())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(loops)) == 2


LOOPS = {
    "utils/threads.py", "replay/replay.py",  # a replay's own, which detects deadlocks
    "inference/common/http.py",  # of a thread that sends requests
    "inference/pool/follower.py", "inference/transformers_server/launch.py",
}  # fmt: skip


def test_nothing_else_makes_an_event_loop() -> None:
    assert callers("asyncio.run", "asyncio.new_event_loop", "asyncio.Runner") == LOOPS


def test_the_loop_ends_beside_one_that_runs_in_this_thread() -> None:
    """As after a notebook, or in a program that drives a browser by Playwright: it was tried again for ever."""
    loops, left = [], []

    async def work() -> None:
        loops.append(asyncio.get_running_loop())
        left.append(asyncio.get_running_loop().create_task(asyncio.sleep(99)))

    async def other() -> None:
        with pytest.raises(RuntimeError, match="another loop is running"):
            loops[0].run_until_complete(asyncio.sleep(0))
        end_program_loop()

    run_in_program(work())
    asyncio.run(other())
    assert loops[0].is_closed() and left[0].cancelled()


def test_a_loop_that_is_left_at_the_end_of_a_program_is_closed(monkeypatch) -> None:
    """Where the names of its module are gone."""
    loop = threads._Loop()
    monkeypatch.setattr(threads, "os", None)
    with pytest.warns(ResourceWarning, match="unclosed event loop"):
        loop.__del__()
    assert loop.is_closed()
