"""Watches code of the user: times it in the event loop, contains its tasks, and counts and warns of what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from turnwise.arena.runtime.context import current_context
from turnwise.types import Rollout
from turnwise.utils.registry import name_of, unwrapped
from turnwise.utils.signals import asked_for, error_text, exited

BLOCKED = 0.1
"""Minimum seconds that code must hold the event loop to be named."""
UNCOUNTED = 1e-4
"""Seconds below which time in the event loop is not counted."""


class _BlockedSeconds(threading.local):
    """Seconds in which code of the user held this thread's event loop, without what runs in its own thread."""

    seconds: float = 0.0


blocked = _BlockedSeconds()
_in_user_code: contextvars.ContextVar[bool] = contextvars.ContextVar("turnwise_in_user_code", default=False)


def is_async(function: Any) -> bool:
    """True if ``function`` is an ``async def``, or an object or partial that calls one."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_own(function: Any) -> bool:
    """True if ``function`` is one of turnwise's own defaults, which neither block nor open anything."""
    return str(getattr(function, "__module__", "")).startswith("turnwise.arena.")


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
            before, begun = blocked.seconds, perf_counter()
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
                    count_blocked(self._function, before, begun)
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
        blocked.seconds += perf_counter() - begun


def count_blocked(function: Callable[..., Any], before: float, begun: float) -> None:
    """Count the seconds since ``begun``, without those already counted for nested code of the user."""
    seconds = perf_counter() - begun - (blocked.seconds - before)
    if seconds < UNCOUNTED:
        return
    blocked.seconds += seconds
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
# Counts and warnings
# ----------------------------------------------------------------------------------------------------------------------
_lock = threading.Lock()
_counts: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
_warned: set[tuple[Any, ...]] = set()


def warn_once(key: tuple[Any, ...], text: str) -> None:
    """Warn with ``text``, without keys of the episode, unless an earlier warning had the same ``key``."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(_without_secrets(text), RuntimeWarning, stacklevel=3)


def _without_secrets(text: str) -> str:
    context = current_context()
    return text if context is None else str(context.without_secrets(text))


def count_error(kind: str, name: str, error: BaseException) -> None:
    """Count a failed call in the running episode, as ``<kind>_errors/<name>``. Warn of the first of each type."""
    metric, text = f"{kind}_errors/{name}", _without_secrets(error_text(error))[:500]
    count(metric)
    warn_once((metric, type(error)), f"{kind} {name!r} failed, and is counted as {metric}: {text}")


def count(metric: str, amount: int = 1) -> None:
    """Add ``amount`` to a metric that counts what went wrong in the running episode."""
    context = current_context()
    if context is not None:
        facts = context.rollout.facts
        mishaps = facts.mishaps = {} if facts.mishaps is None else facts.mishaps
        mishaps[metric] = mishaps.get(metric, 0) + amount


def count_without_calls(rollout: Rollout, has_parts: bool, is_evaluation: bool) -> None:
    """Count the running episode if no actor of it called a model, and it has no parts (children, continuations) either.

    A measured episode of an evaluation is complete without calls: its agent may call models of another server.
    """
    acted = has_parts or any(step.actor_id is not None for step in rollout.steps)
    if acted or (is_evaluation and rollout.metrics):
        return
    count("episodes/without_calls")
    lost = "baselines" if rollout.rewards else "rewards, success and baselines"
    warn_once(
        ("without_calls", rollout.episode_type),
        f"an attempt of episode {rollout.episode_type!r} called no model of its actors, and is counted as "
        "episodes/without_calls: where a cache or another client answers, there is nothing to train, and the attempt "
        f"has no part in {lost}",
    )


def count_in_process(metric: str) -> None:
    """Add 1 to a metric that :func:`take_counts` returns."""
    with _lock:
        _counts[metric] += 1


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
