"""Threads and event loops that end: each call begins at once, and none of them keeps the process from ending."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import multiprocessing
import os
import queue
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, ParamSpec, TypeVar

from turnwise.utils.output import Output, safe_output, write_stderr
from turnwise.utils.signals import asked_for, error_text

T = TypeVar("T")
P = ParamSpec("P")

IDLE_SECONDS = 10.0
"""Seconds after which a thread without work ends."""
END_SECONDS = 5.0
"""Seconds that cancelled tasks get to end when an event loop does."""

_OPENMP = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
"""What OpenMP reads when it is loaded. The last two are the defaults of GNU's, and of Intel's and LLVM's, for how long
a thread without work spins: the policy alone would let it spin for ever."""

_busy: set[threading.Thread] = set()
_Work = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(ThreadPoolExecutor):
    """Runs each call in an idle thread, or else in a new one. So a call that hangs delays no other.

    Its base class has a fixed number of threads, and Python waits for them all before it ends. An event loop accepts
    only subclasses of it as its default executor.

    Example: ``await asyncio.get_running_loop().run_in_executor(DaemonThreads("tools"), work)``
    """

    def __init__(self, name: str) -> None:
        super().__init__(1)
        self.name = name
        self._idle: list[queue.SimpleQueue[_Work]] = []
        self._started = 0
        os.register_at_fork(after_in_child=self._idle.clear)  # a forked process has none of the threads

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        work = (future, lambda: function(*arguments, **options))
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            self._started += 1
            name = f"turnwise-{self.name}-{self._started}"
            threading.Thread(target=self._work, args=(inbox,), name=name, daemon=True).start()
        inbox.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: idle threads end by themselves, and busy ones delay nothing."""

    def _work(self, inbox: queue.SimpleQueue[_Work]) -> None:
        while True:
            try:
                future, call = inbox.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                try:
                    self._idle.remove(inbox)
                except ValueError:  # a call was given to this thread in this moment
                    continue
                return
            if future.set_running_or_notify_cancel():
                _busy.add(threading.current_thread())
                try:
                    result = call()
                except StopIteration as error:  # asyncio's futures reject it, and the caller would wait forever
                    replaced = RuntimeError(f"raised {error!r}")
                    replaced.__cause__ = error
                    future.set_exception(replaced)
                    del replaced
                except BaseException as error:  # the caller of the future gets it
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
                _busy.discard(threading.current_thread())
            del future, call
            self._idle.append(inbox)


def end_process(code: int) -> NoReturn:
    """End the process with exit code ``code``, even if threads and processes of user code still run.

    Threads and processes that don't end within :data:`END_SECONDS` are left behind; one line on stderr names them.
    """

    def end() -> NoReturn:
        if left := _left():
            write_stderr(f"turnwise: ended, and left behind what still runs: {left}")
        logging.shutdown()
        os._exit(code)

    def wait_and_end() -> None:
        time.sleep(END_SECONDS)
        end()

    # Python waits for threads and processes that are no daemons, and runs what is registered for its end.
    threading.Thread(target=wait_and_end, name="turnwise-end", daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        Output.over(stream).finish()
    if not _busy:
        sys.exit(code)
    atexit._run_exitfuncs()  # daemon threads that still run may crash Python's own end
    end()


def _left() -> str:
    """Return the names of threads and processes that still run, with their counts. Terminate these processes."""
    waited_for = {threading.main_thread(), threading.current_thread()}
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread not in waited_for]
    names = Counter(thread.name for thread in (*threads, *tuple(_busy)) if thread.is_alive())
    for child in multiprocessing.active_children():
        if not child.daemon:
            child.terminate()  # it may hold the pipe that somebody reads to its end
            names[f"process {child.name} (terminated)"] += 1
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in sorted(names.items()))


_own = DaemonThreads("own")


def keep_openmp_awake(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the OpenMP threads of torch spin for a moment before they sleep. Call it before torch is imported.

    GNU's OpenMP, which torch uses on Linux, lets a thread sleep after about 1 µs if the process has more OpenMP threads
    than processors. A second thread that computes, such as the local client's, begins a team of its own, so this is
    so wherever torch uses all processors, and each small op then waits for a thread to wake up. Under the policy
    "active" the thread spins for ten times as long. How long threads spin otherwise does not change. Does nothing where
    one of the variables is set, or on other systems.

    ``python bench/bench_real_model.py`` calls it as the command line does.
    """
    if sys.platform == "linux" and not _OPENMP.keys() & environment.keys():
        environment.update(_OPENMP)


def begin(function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> asyncio.Future[T]:
    """Begin ``function(*arguments, **options)`` in a thread that user code can't occupy."""
    context = contextvars.copy_context()
    call: Callable[[], T] = lambda: context.run(function, *arguments, **options)  # noqa: E731
    return asyncio.get_running_loop().run_in_executor(_own, call)


async def to_thread(function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> T:
    """Return ``function(*arguments, **options)``, computed in a thread that user code can't occupy.

    The threads of ``asyncio.to_thread`` are few, and shared with everything else that runs in the event loop.
    """
    return await begin(function, *arguments, **options)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that user code can't end: it continues after ``loop.stop()``, and after an exit in a callback."""

    def __init__(self) -> None:
        self._process = os.getpid()
        super().__init__()
        self.set_default_executor(DaemonThreads("default"))  # of code that calls ``asyncio.to_thread``

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # at the end of a program ``os`` is gone
        if getpid() == self._process:  # a forked process would close what its parent waits for
            super().__del__()

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        while True:
            try:
                return super().run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                if task.done() or asked_for(error):
                    raise
                problem = f"a callback raised {error_text(error)}"
            except RuntimeError as error:
                if task.done() or self.is_closed() or self.is_running() or asyncio._get_running_loop() is not None:
                    raise
                problem = str(error)
            warnings.warn(
                f"{problem}: user code can't end the event loop, which continues", RuntimeWarning, stacklevel=2
            )

    def cancel(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel ``tasks``. Those that don't end within :data:`END_SECONDS` are left behind, with a warning."""
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, left = self.run_until_complete(asyncio.wait(tasks, timeout=END_SECONDS))
        for task in left:
            task._log_destroy_pending = False
        if left:
            names = ", ".join(sorted({task.get_name() for task in left}))
            warnings.warn(f"{names}: cancelled, but still runs, and is left behind", stacklevel=2)

    def end(self) -> None:
        """Cancel all tasks, and close the loop."""
        self.cancel(asyncio.all_tasks(self))
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in a new event loop, as ``asyncio.run`` does, and return its result.

    It ends within seconds: tasks and threads that still run are left behind, with a warning.
    """
    _check_no_loop_runs(main)
    loop = _Loop()
    try:
        return _run(loop, main)
    finally:
        loop.end()


class _Program:
    """The event loop of this program, if it has one yet, and the right to run it."""

    def __init__(self) -> None:
        self.loop: _Loop | None = None
        self.running = threading.Lock()


_program = _Program()
os.register_at_fork(after_in_child=lambda: _program.__init__())  # type: ignore[misc]


def run_in_program(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in the event loop of this program, which all such calls share, and return its result.

    What user code keeps between the calls stays usable: clients, locks, tasks. The loop ends with the command, or with
    the process. While it runs in another thread, ``main`` gets a loop of its own.
    """
    _check_no_loop_runs(main)
    if not _program.running.acquire(blocking=False):
        return run_to_end(main)
    try:
        if _program.loop is None:
            _program.loop = _Loop()
            atexit.register(end_program_loop)
        with safe_output(of_run=True):
            return _run(_program.loop, main)
    finally:
        _program.running.release()


def end_program_loop() -> None:
    """End the loop of :func:`run_in_program`, if there is one: cancel the tasks of user code in it.

    Where another loop runs in this thread, such as a notebook's, another thread ends it.
    """
    if _program.loop is None or not _program.running.acquire(blocking=False):
        return
    loop, _program.loop = _program.loop, None
    atexit.unregister(end_program_loop)
    try:
        if asyncio._get_running_loop() is None:
            loop.end()
        else:
            thread = threading.Thread(target=loop.end, name="turnwise-end")
            thread.start()
            thread.join()
    finally:
        _program.running.release()


def _check_no_loop_runs(main: Coroutine[Any, Any, Any]) -> None:
    """Raise ``RuntimeError`` if this thread runs an event loop, in which no other can run."""
    if asyncio._get_running_loop() is not None:
        main.close()
        raise RuntimeError(
            "an event loop runs in this thread already, as in a notebook: make this call in another thread, such as "
            "`await asyncio.to_thread(run.train)`"
        )


def _run(loop: _Loop, main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in ``loop``, as :class:`asyncio.Runner` does. If a signal ends it, it is cancelled."""
    runner = asyncio.Runner(loop_factory=lambda: loop)
    task: asyncio.Task[Any] | None = None

    async def run() -> T:
        nonlocal task
        task = asyncio.current_task()
        return await main

    try:
        return runner.run(run())
    finally:
        if task is not None and not task.done():
            loop.cancel([task])
