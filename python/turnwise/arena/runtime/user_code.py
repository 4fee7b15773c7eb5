"""The boundary to code that is not turnwise's: tools, rewards, hooks, environments, agents, callbacks.

A call that hangs, blocks the event loop, calls ``exit()`` or never ends fails alone: other episodes and the trainer go
on, and the process can end.

- :func:`hook` calls a hook in place: an ``async def`` or a quick function. It names hooks that hold the event loop.
- :func:`call` calls code that may take long: a plain function in a thread, an ``async def`` in a task. The time limit
  begins with the call, not with the wait for a thread.
- :func:`exits_as_errors`, of :mod:`turnwise.utils.signals`, turns attempts to end the process or its task into errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from time import perf_counter
from types import CoroutineType
from typing import Any
from weakref import WeakKeyDictionary

from turnwise.arena.runtime.concurrency import is_stopped
from turnwise.arena.runtime.context import EpisodeContext, current_context, use_context
from turnwise.arena.runtime.watch import (
    UNCOUNTED,
    blocked,
    count_blocked,
    count_error,
    count_in_process,
    is_async,
    is_own,
    warn_once,
    watched,
)
from turnwise.types import EpisodeState
from turnwise.utils.registry import name_of
from turnwise.utils.signals import asked_for, exited, exits_as_errors
from turnwise.utils.threads import DaemonThreads

THREADS = {"agent": 512, "tool": 64, "reward": 32, "hook": 64}
"""Concurrent calls in threads, by kind. Abandoned calls don't count."""
THREADS_OF_EPISODE = 8
"""Concurrent calls of one episode among them."""
MAX_HANGING = 100
"""Abandoned calls of one function that still run. Further calls fail at once, until some of these end."""
GRACE = 5.0
"""Seconds that a cancelled ``async def`` gets to end."""
CLOSE_SECONDS = 30.0
"""Seconds that a call of ``close`` gets."""


class CallTimeoutError(TimeoutError):
    """A call took longer than its time limit, and was abandoned."""


_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, list, dict})


# ----------------------------------------------------------------------------------------------------------------------
# In the event loop
# ----------------------------------------------------------------------------------------------------------------------
async def hook(
    function: Callable[..., Any], *arguments: Any, blocking: bool = False, late: Callable[[Any], Any] | None = None
) -> Any:
    """Return ``function(*arguments)``, awaited if it is awaitable. Warn once if it holds the event loop.

    With ``blocking``, or if the object of the method is ``blocking``, a plain function runs in a thread. ``late`` gets
    what a thread returns too late, after a time limit or a cancellation.
    """
    try:
        blocking = blocking or function.__self__.blocking  # type: ignore[attr-defined]
    except AttributeError:  # no method of an episode or rubric
        blocking = False
    if blocking and not is_own(function) and not is_async(function):
        return await call("hook", functools.partial(function, *arguments), late=late)
    before, begun = blocked.seconds, perf_counter()
    try:
        value = function(*arguments)
    except Exception:
        raise
    except BaseException as error:
        if asked_for(error):
            raise
        raise exited(repr(name_of(function)), error) from error
    finally:
        if perf_counter() - begun >= UNCOUNTED:
            count_blocked(function, before, begun)
    if type(value) in _PLAIN_TYPES:  # nearly all hooks return one of these, and ``isawaitable`` is slow
        return value
    if type(value) is not CoroutineType and not inspect.isawaitable(value):
        return value
    return await (value if is_own(function) else watched(value, function))


async def close_states(episode: Any, states: Iterable[EpisodeState]) -> None:
    """Call the hook ``episode.close(state)`` of each state. Errors are only counted.

    A cancellation lets the calls end, for ``GRACE`` seconds.
    """
    if is_own(episode.close):
        return

    async def close(state: EpisodeState) -> None:
        with exits_as_errors("close"):
            await hook(episode.close, state)

    what = f"close of {episode.episode_type!r}"
    closing = [asyncio.create_task(close(state), name=what) for state in states]
    cancelled, limit = None, CLOSE_SECONDS
    while True:
        try:
            await ended_within(asyncio.gather(*map(asyncio.shield, closing), return_exceptions=True), limit)
            break
        except asyncio.CancelledError as error:
            if cancelled is not None:
                raise
            cancelled, limit = error, GRACE
    for one in closing:
        failed: BaseException | None = None
        if not one.done():
            await end_task(one, what)
            failed = CallTimeoutError(f"{what} took longer than {limit:g} s")
        elif one.cancelled():
            failed = exited(what, asyncio.CancelledError())
        else:
            failed = one.exception()
        if failed is not None:
            count_error("close", episode.episode_type, failed)
    if cancelled is not None:
        raise cancelled


async def close_episode(episode: Any, context: EpisodeContext) -> None:
    """Close all states that an attempt at an episode has left, and the sources of tools that it has opened."""
    states = {id(state): state for state in (context.state, *context.forked)}
    context.forked = []
    try:
        with use_context(context):
            await close_states(episode, states.values())
    finally:
        opened = list(context.sources.values())
        context.sources.clear()
        if opened:
            await asyncio.gather(*[source.close() for source in opened])


@contextlib.asynccontextmanager
async def own_cancellation_contained(what: str) -> AsyncIterator[None]:
    """Raise ``UserCodeError`` for a cancellation of this task of ``gather_or_cancel`` that its owner didn't request."""
    task = asyncio.current_task()
    assert task is not None
    try:
        yield
        if task.cancelling() and not is_stopped(task):
            await asyncio.sleep(0)  # a cancellation that is due is raised here
    except asyncio.CancelledError as error:
        if is_stopped(task):
            raise
        while task.cancelling():
            task.uncancel()
        raise exited(what, error) from error


async def in_own_task(coroutine: Coroutine[Any, Any, Any], what: str) -> Any:
    """Return ``await coroutine``. After a cancellation, one that doesn't end is left behind."""
    task = asyncio.create_task(coroutine, name=what)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await end_task(task, what)
        raise
    return task.result()


# ----------------------------------------------------------------------------------------------------------------------
# In threads and tasks, with a time limit
# ----------------------------------------------------------------------------------------------------------------------
Key = tuple[str, str]
"""Kind and name of the called function."""

_threads = DaemonThreads("user")
_hanging: Counter[Key] = Counter()
_lock = threading.Lock()
_runaways: set[asyncio.Task[Any]] = set()


async def call(
    kind: str,
    work: Callable[[], Any],
    *,
    limit: float | None = None,
    name: str = "",
    late: Callable[[Any], Any] | None = None,
) -> Any:
    """Return ``work()``: a plain function runs in a thread, an ``async def`` in a task.

    ``kind`` is one of ``THREADS``. The call is abandoned ``limit`` seconds after it began, and raises
    ``CallTimeoutError``. Time in which other code held the event loop does not count. Raises what ``work`` raises, and
    ``UserCodeError`` for an exit. Errors and counts use ``name``, by default that of the function. ``late`` gets what
    a thread returns too late.

    Example: ``await call("tool", partial(search, query="tea"), limit=10.0)``
    """
    key = kind, name or name_of(work)
    if is_async(work):
        return await _in_task(key, work, limit)
    return await _in_thread(_ThreadCall(key, work, late), limit)


class _ThreadCall:
    """One call in a thread."""

    __slots__ = ("_late", "_work", "error", "is_abandoned", "key", "seconds", "value")

    def __init__(self, key: Key, work: Callable[[], Any], late: Callable[[Any], Any] | None) -> None:
        self.key, self._work, self._late, self.seconds = key, work, late, 0.0
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_abandoned: bool | None = False
        """``None`` once the call has ended."""

    def run(self) -> None:
        threading.current_thread().name = f"{self.key[0]} {self.key[1]!r}"
        begun = time.monotonic()
        try:
            self.value = self._work()
        except Exception as error:
            self.error = error
        except BaseException as error:
            self.error = exited(f"{self.key[0]} {self.key[1]!r}", error)
            self.error.__cause__ = error
        self.seconds = time.monotonic() - begun
        with _lock:
            is_late = self.is_abandoned
            if is_late:
                _hanging[self.key] -= 1
            self.is_abandoned = None
        if is_late:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give a late result to the caller's ``late``, which frees it."""
        if self._late is not None and self.error is None:
            with contextlib.suppress(BaseException):  # no caller waits for it
                self._late(self.value)

    def abandon(self) -> None:
        with _lock:
            if self.is_abandoned is None:  # it ended in this moment
                if self._late is not None:
                    _threads.submit(self._pass_on)
                return
            self.is_abandoned = True
            _hanging[self.key] += 1
            count_in_process("user_code/abandoned")


async def _in_thread(one: _ThreadCall, limit: float | None) -> Any:
    kind, name = key = one.key
    if _hanging[key] >= MAX_HANGING:
        raise CallTimeoutError(
            f"{kind} {name!r} is not called: {MAX_HANGING} of its calls passed their time limit and still hang"
        )
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    if kind not in gates:
        gates[kind] = _ThreadSlots(THREADS[kind])
    async with gates[kind].slot():
        context = contextvars.copy_context()
        running = asyncio.get_running_loop().run_in_executor(_threads, context.run, one.run)
        try:
            ended = await ended_within(running, limit, lambda: one.is_abandoned is None)
        except BaseException:
            one.abandon()
            raise
        finally:
            running.cancel()  # so that a late end looks for no event loop
        if not ended:
            one.abandon()
            raise CallTimeoutError(f"{kind} {name!r} took longer than {limit:g} s")
    if one.error is not None:
        raise one.error
    if inspect.isawaitable(value := one.value):  # a plain function that calls an async one
        return await _in_task(key, lambda: value, None if limit is None else max(limit - one.seconds, 0.0))
    return value


async def _in_task(key: Key, work: Callable[[], Awaitable[Any]], limit: float | None) -> Any:
    what = f"{key[0]} {key[1]!r}"

    async def run() -> tuple[BaseException | None, Any]:
        try:
            with exits_as_errors(what):
                return None, await watched(work(), work)
        except Exception as error:
            return error, None

    task = asyncio.create_task(run(), name=what)
    try:
        ended = await ended_within(task, limit)
    except BaseException:
        await end_task(task, what)
        raise
    if not ended:
        await end_task(task, what)
        raise CallTimeoutError(f"{what} took longer than {limit:g} s")
    if task.cancelled():  # its own code cancelled it
        raise exited(what, asyncio.CancelledError())
    error, value = task.result()
    if error is not None:
        raise error
    return value


async def ended_within(
    waited: asyncio.Future[Any], limit: float | None, has_ended: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until ``waited`` is done. Return False after ``limit`` seconds, except those in which the loop was held."""
    if limit is None:
        await asyncio.wait({waited})
        return True
    now, blocked_before = asyncio.get_running_loop().time, blocked.seconds
    end = now() + limit
    while True:
        await asyncio.wait({waited}, timeout=max(end - now(), 0.0))
        if waited.done() or has_ended():
            return True
        lost = max(blocked.seconds - blocked_before, now() - end)
        if lost < 0.005:
            return False
        end, blocked_before = now() + lost, blocked.seconds


async def end_task(task: asyncio.Task[Any], what: str) -> None:
    """Cancel ``task``. One that doesn't end is abandoned. A further cancellation is raised once it has ended."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # asyncio warns of unread errors
    now = asyncio.get_running_loop().time
    again, end = None, now() + GRACE
    while not task.done() and (left := end - now()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            again = error
    if not task.done():
        count_in_process("user_code/abandoned")
        warn_once(("cancelled", what), f"{what} was cancelled and still runs: its result is ignored")
        _runaways.add(task)
        task.add_done_callback(_runaways.discard)
    if again is not None:
        raise again


class _ThreadSlots:
    """Limits threads to ``limit`` at once, of which ``THREADS_OF_EPISODE`` serve one episode. First come, first served,
    among episodes below their limit."""

    def __init__(self, limit: int) -> None:
        self.free = limit
        self._of: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        context = current_context()
        episode = "" if context is None else context.rollout.id
        if not self._take(episode):
            granted = asyncio.get_running_loop().create_future()
            self._waiting.append((episode, granted))
            count_in_process("user_code/waiting")
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._give_back(episode)
                raise
        try:
            yield
        finally:
            self._give_back(episode)

    def _take(self, episode: str) -> bool:
        if not self.free or (episode and self._of[episode] >= THREADS_OF_EPISODE):
            return False
        self.free -= 1
        self._of[episode] += 1
        return True

    def _give_back(self, episode: str) -> None:
        self.free += 1
        self._of[episode] -= 1
        if not self._of[episode]:
            del self._of[episode]
        for waiting in list(self._waiting):
            if not self.free:
                break
            if waiting[1].done():  # cancelled
                self._waiting.remove(waiting)
            elif self._take(waiting[0]):
                self._waiting.remove(waiting)
                waiting[1].set_result(None)


_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _ThreadSlots]] = WeakKeyDictionary()
