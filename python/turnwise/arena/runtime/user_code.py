"""The boundary to code that is not turnwise's: tools, rewards, hooks, environments, agents, callbacks.

What such code does stays its own affair: a call that hangs, blocks the event loop, calls ``exit()`` or never ends harms
no other episode, nor the trainer, nor the end of the process.

- :func:`hook` calls a hook where it is: an ``async def`` or a quick function. It names those that hold the event loop.
- :func:`call` calls what may take long: a plain function in a thread, an ``async def`` in a task. The time limit begins
  with the call, not with the wait for a thread.
- :func:`contained`, of :mod:`turnwise.utils.signals`, makes an error of what would end the process or its task.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from turnwise.arena.runtime.concurrency import is_stopped
from turnwise.arena.runtime.context import EpisodeContext, current_context, use_context
from turnwise.types import EpisodeState
from turnwise.utils.registry import name_of, unwrapped
from turnwise.utils.signals import asked_for, contained, error_text, exited
from turnwise.utils.threads import DaemonThreads

THREADS = {"agent": 512, "tool": 64, "reward": 32, "hook": 64}
"""Concurrent calls in threads, by kind. Abandoned calls don't count."""
THREADS_OF_EPISODE = 8
"""Of these, concurrent calls of one episode."""
MOST_HANGING = 100
"""Abandoned calls of one function that still run. Further calls fail at once, until some of these end."""
BLOCKED = 0.1
"""Seconds from which code that holds the event loop is named."""
UNCOUNTED = 1e-4
"""Seconds below which time in the event loop is not counted."""
GRACE = 5.0
"""Seconds that a cancelled ``async def`` gets to end."""
CLOSE_SECONDS = 30.0
"""Seconds that a call of ``close`` gets."""


class CallTimeoutError(TimeoutError):
    """A call took longer than its time limit, and was abandoned."""


def is_async(function: Any) -> bool:
    """Tell whether ``function`` is an ``async def``, or an object or partial that calls one."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# ----------------------------------------------------------------------------------------------------------------------
# In the event loop
# ----------------------------------------------------------------------------------------------------------------------
class _Held(threading.local):
    """Seconds in which code of the user held this thread's event loop. What runs in a thread of its own counts not."""

    seconds: float = 0.0


_held = _Held()
_in_user_code: contextvars.ContextVar[bool] = contextvars.ContextVar("turnwise_in_user_code", default=False)
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, list, dict})


async def hook(
    function: Callable[..., Any], *arguments: Any, blocking: bool = False, late: Callable[[Any], Any] | None = None
) -> Any:
    """Return ``function(*arguments)``, awaited if it is awaitable. Warn once if it holds the event loop.

    With ``blocking``, or if the object of the method is ``blocking``, a plain function runs in a thread. ``late`` gets
    what a thread returns too late, after a time limit or a cancellation.
    """
    blocking = blocking or getattr(getattr(function, "__self__", None), "blocking", False)
    if blocking and not is_own(function) and not is_async(function):
        return await call("hook", functools.partial(function, *arguments), late=late)
    before, begun = _held.seconds, perf_counter()
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
            _count_held(function, before, begun)
    if type(value) in _PLAIN_TYPES:  # nearly all hooks return one of these, and ``isawaitable`` is slow
        return value
    if not inspect.isawaitable(value):
        return value
    return await (value if is_own(function) else watched(value, function))


async def close_states(episode: Any, states: Iterable[EpisodeState]) -> None:
    """Call the hook ``episode.close(state)`` of each state. Errors are counted, and harm nothing.

    A cancellation lets the calls end, for ``GRACE`` seconds.
    """
    if is_own(episode.close):
        return

    async def close(state: EpisodeState) -> None:
        with contained("close"):
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
            await _end(one, what)
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
    """Close all states that an attempt at an episode has left."""
    states = {id(state): state for state in (context.state, *context.forked)}
    context.forked = []
    with use_context(context):
        await close_states(episode, states.values())


def is_own(function: Any) -> bool:
    """Tell whether ``function`` is a default of turnwise's own, which neither blocks nor holds anything."""
    return str(getattr(function, "__module__", "")).startswith("turnwise.arena.")


@contextlib.asynccontextmanager
async def own_cancellation_contained(what: str) -> AsyncIterator[None]:
    """Raise ``UserCodeError`` for a cancellation of this task of ``gather_or_cancel`` that its owner didn't ask for."""
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
        await _end(task, what)
        raise
    return task.result()


class watched:
    """Await ``awaitable``, which ``function`` gave, and time each part of it between two waits.

    Example: ``await watched(episode.rollout(arena, artifact), episode.rollout)``
    """

    __slots__ = ("_awaitable", "_function")

    def __init__(self, awaitable: Awaitable[Any], function: Callable[..., Any]) -> None:
        self._awaitable, self._function = awaitable, function

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = _awaited(self._awaitable)
        go_on: Callable[[Any], Any] = coroutine.send
        given: Any = None
        while True:
            before, begun = _held.seconds, perf_counter()
            try:
                waits_for = go_on(given)
            except StopIteration as end:
                return end.value
            except Exception:
                raise
            except BaseException as error:
                if isinstance(given, GeneratorExit) or asked_for(error):  # this coroutine is closed, or cancelled
                    raise
                raise exited(repr(name_of(self._function)), error) from error
            finally:
                if perf_counter() - begun >= UNCOUNTED:
                    _count_held(self._function, before, begun)
            try:
                go_on, given = coroutine.send, (yield waits_for)
            except BaseException as error:  # a cancellation, or the end of this coroutine
                go_on, given = coroutine.throw, error


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    _guard_tasks()
    token = _in_user_code.set(True)
    try:
        return await awaitable
    finally:
        _in_user_code.reset(token)


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Don't count the time of the block for the code of the user that called it."""
    begun = perf_counter()
    try:
        yield
    finally:
        _held.seconds += perf_counter() - begun


def _count_held(function: Callable[..., Any], before: float, begun: float) -> None:
    """Count the seconds since ``begun``, without those that nested code of the user was counted for."""
    seconds = perf_counter() - begun - (_held.seconds - before)
    if seconds < UNCOUNTED:
        return
    _held.seconds += seconds
    name = name_of(function)
    _seconds[name] += seconds
    if seconds >= BLOCKED:
        of = getattr(unwrapped(function), "__self__", None)
        owner = "" if of is None or inspect.ismodule(of) else getattr(of, "episode_type", type(of).__name__)
        warn_once(
            ("blocked", name, owner),
            f"{name!r}{f' of {owner!r}' if owner else ''} blocked the event loop for {seconds:.1f} s, and all episodes "
            "waited: make it async, or set blocking = True on its episode or rubric",
        )


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose ``exit()`` is an error of its task."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._go_on(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._go_on(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def _go_on(self, step: Callable[..., Any], *given: Any) -> Any:
        try:
            return step(*given)
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            if asked_for(error) or GeneratorExit in map(type, given):
                raise
            raise exited("a task of user code", error) from error


_guarded: WeakKeyDictionary[asyncio.AbstractEventLoop, bool] = WeakKeyDictionary()


def _guard_tasks() -> None:
    """Contain tasks that code of the user starts: ``exit()`` in a task would end the event loop."""
    loop = asyncio.get_running_loop()
    if loop in _guarded:
        return
    _guarded[loop] = True
    former = loop.get_task_factory()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        if _in_user_code.get():
            coroutine = _Contained(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options) if former is None else former(loop, coroutine, **options)

    loop.set_task_factory(make)


# ----------------------------------------------------------------------------------------------------------------------
# In threads and tasks, with a time limit
# ----------------------------------------------------------------------------------------------------------------------
Key = tuple[str, str]
"""Kind and name of the called function."""

_threads = DaemonThreads("user")
_hanging: Counter[Key] = Counter()
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
    return await _in_thread(_Call(key, work, late), limit)


class _Call:
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
        """Give a late result to who must free it."""
        if self._late is not None and self.error is None:
            with contextlib.suppress(BaseException):  # nobody waits for it
                self._late(self.value)

    def abandon(self) -> None:
        with _lock:
            if self.is_abandoned is None:  # it ended in this moment
                if self._late is not None:
                    _threads.submit(self._pass_on)
                return
            self.is_abandoned = True
            _hanging[self.key] += 1
            _counts["user_code/abandoned"] += 1


async def _in_thread(one: _Call, limit: float | None) -> Any:
    kind, name = key = one.key
    if _hanging[key] >= MOST_HANGING:
        raise CallTimeoutError(
            f"{kind} {name!r} is not called: {MOST_HANGING} of its calls passed their time limit and still hang"
        )
    async with _gate(kind).slot():
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
    if inspect.isawaitable(found := one.value):  # a plain function that calls an async one
        return await _in_task(key, lambda: found, None if limit is None else max(limit - one.seconds, 0.0))
    return found


async def _in_task(key: Key, work: Callable[[], Awaitable[Any]], limit: float | None) -> Any:
    what = f"{key[0]} {key[1]!r}"

    async def run() -> tuple[BaseException | None, Any]:
        try:
            with contained(what):
                return None, await watched(work(), work)
        except Exception as error:
            return error, None

    task = asyncio.create_task(run(), name=what)
    try:
        ended = await ended_within(task, limit)
    except BaseException:
        await _end(task, what)
        raise
    if not ended:
        await _end(task, what)
        raise CallTimeoutError(f"{what} took longer than {limit:g} s")
    if task.cancelled():  # by itself
        raise exited(what, asyncio.CancelledError())
    error, value = task.result()
    if error is not None:
        raise error
    return value


async def ended_within(
    waited: asyncio.Future[Any], limit: float | None, has_ended: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until ``waited`` is done. Return False after ``limit`` seconds without those in which the loop was held."""
    if limit is None:
        await asyncio.wait({waited})
        return True
    now, held = asyncio.get_running_loop().time, _held.seconds
    end = now() + limit
    while True:
        await asyncio.wait({waited}, timeout=max(end - now(), 0.0))
        if waited.done() or has_ended():
            return True
        lost = max(_held.seconds - held, now() - end)
        if lost < 0.005:
            return False
        end, held = now() + lost, _held.seconds


async def _end(task: asyncio.Task[Any], what: str) -> None:
    """Cancel ``task``. One that doesn't end is abandoned."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # asyncio warns of unread errors
    await asyncio.wait({task}, timeout=GRACE)
    if not task.done():
        _counts["user_code/abandoned"] += 1
        warn_once(("cancelled", what), f"{what} was cancelled and goes on all the same: its result counts no more")
        _runaways.add(task)
        task.add_done_callback(_runaways.discard)


class _Gate:
    """At most ``limit`` holders at once, of them at most ``THREADS_OF_EPISODE`` of one episode. The first to wait is
    the first to go on, if its episode may."""

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
            _counts["user_code/waiting"] += 1
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


_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Gate]] = WeakKeyDictionary()


def _gate(kind: str) -> _Gate:
    of_loop = _gates.setdefault(asyncio.get_running_loop(), {})
    if kind not in of_loop:
        of_loop[kind] = _Gate(THREADS[kind])
    return of_loop[kind]


# ----------------------------------------------------------------------------------------------------------------------
# What is told
# ----------------------------------------------------------------------------------------------------------------------
_lock = threading.Lock()
_counts: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
_told: set[tuple[Any, ...]] = set()

MISHAPS = "mishaps"
"""Key of ``rollout.meta``: what went wrong, by metric, such as ``{"tool_errors/search": 2}``. A batch has the sums."""


def warn_once(key: tuple[Any, ...], text: str) -> None:
    """Warn with ``text``, without keys of the episode, unless something was warned of under ``key`` before."""
    if key not in _told:
        _told.add(key)
        warnings.warn(_without_secrets(text), RuntimeWarning, stacklevel=3)


def _without_secrets(text: str) -> str:
    context = current_context()
    return text if context is None else str(context.without_secrets(text))


def count_error(kind: str, name: str, error: BaseException) -> None:
    """Count a failed call in the running episode, as ``<kind>_errors/<name>``. Warn of the first of each type."""
    metric, told = f"{kind}_errors/{name}", _without_secrets(error_text(error))[:500]
    count(metric)
    warn_once((metric, type(error)), f"{kind} {name!r} failed, and is counted as {metric}: {told}")


def count(metric: str, amount: int = 1) -> None:
    """Add ``amount`` to a metric that counts what went wrong in the running episode."""
    context = current_context()
    if context is not None:
        mishaps = context.rollout.meta.setdefault(MISHAPS, {})
        mishaps[metric] = mishaps.get(metric, 0) + amount


def take_counts() -> dict[str, float]:
    """Return the metrics of this process since the last call, and reset them.

    ``user_code/waiting`` (calls that waited for a thread), ``user_code/abandoned`` (calls that passed their time limit)
    and ``hook_seconds/<hook>``, the time in which a hook held the event loop.
    """
    with _lock:
        seconds = {f"hook_seconds/{name}": value for name, value in _seconds.items() if value >= 0.01}
        taken: dict[str, float] = {**_counts, **seconds}
        _counts.clear()
        _seconds.clear()
    return {name: float(value) for name, value in taken.items()}
