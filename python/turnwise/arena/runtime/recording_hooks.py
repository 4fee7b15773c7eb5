"""Hooks that record the answers of clocks, tools and stores in an episode, so that a replay has them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

from turnwise.arena.runtime.context import EpisodeContext, current_context, use_context
from turnwise.types import Artifact
from turnwise.utils.copies import own_copy

T = TypeVar("T")
P = ParamSpec("P")


# ---------------------------------------------------------------------------------------------------------------------
# Asked from inside episodes
# ---------------------------------------------------------------------------------------------------------------------
def record_input(name: str, call: Callable[..., T], *arguments: Any) -> T:
    """Return ``call(*arguments)`` and record it: a replay of this episode gets the same answer without the call.

    Example: ``found = await record_input("search", client.search, query)``, ``now = record_input("clock", time.time)``

    Use it for inputs that the episode's seed does not determine: clocks, tools, judges outside the arena. ``call`` may
    be async; then await the result. Exceptions are recorded too. Answers must be picklable. Inside ``call`` the episode
    has another generator, and side effects of ``call`` do not happen in a replay. Outside of episodes, nothing
    is recorded. Model calls need no recording, because the arena keeps them as steps.
    """
    return _record(name, arguments, lambda: call(*arguments))


def _record(name: str, arguments: Sequence[Any], call: Callable[[], Any], *, draws: bool = True) -> Any:
    """Call ``call()`` and record it under ``name`` and ``arguments``. With ``draws`` it gets its own generator."""
    context = current_context()
    if context is None:
        return call()
    aside = context.scratch_copy(draws=draws)

    def compute() -> Any:
        with use_context(aside):
            value = call()
        return _await_in(aside, value) if inspect.isawaitable(value) else value

    return compute() if context.recorder is None else context.recorder.record_input(context, name, arguments, compute)


async def _await_in(aside: EpisodeContext, value: Awaitable[T]) -> T:
    with use_context(aside):
        return await value


def records_input(*, draws: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Record the answers of a store's method inside episodes, since they depend on other episodes.

    The store must have a ``label``. An iterator is recorded as a list. An episode gets its own copy of an artifact.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        iterates = method.__name__ == "__iter__"

        @functools.wraps(method)
        def asked(self: Any, *arguments: Any, **options: Any) -> Any:
            if current_context() is None:
                return method(self, *arguments, **options)

            def call() -> Any:
                given: Any = method(self, *arguments, **options)
                return list(given) if iterates else given

            said = (*arguments, options) if options else arguments
            answer = _record(f"{self.label}.{method.__name__}", said, call, draws=draws)
            return iter(answer) if iterates else _own_artifacts(answer)

        return cast("Callable[P, T]", asked)

    return decorate


def _own_artifacts(answer: Any) -> Any:
    """Return copies of the artifacts that a store gave, so that no episode changes what the store holds."""
    if isinstance(answer, Artifact):
        return replace(answer, data=own_copy(answer.data), meta=own_copy(answer.meta))
    return [*map(_own_artifacts, answer)] if type(answer) is list else answer


def recorded_timeout(context: EpisodeContext | None, when: float | None) -> AbstractAsyncContextManager[Any]:
    """Return ``asyncio.timeout_at(when)``, recorded in the running episode."""
    if context is None or context.recorder is None:
        return asyncio.timeout_at(when)
    return context.recorder.timeout(context, when)


def recorded_limit(context: EpisodeContext | None, seconds: float) -> AbstractAsyncContextManager[float | None]:
    """Yield the time limit of a call of user code. The block raises ``CallTimeoutError`` when time runs out.

    A replay has no limit; it cancels the block where time ran out in the record.
    """
    if context is None or context.recorder is None:
        return contextlib.nullcontext(seconds)
    return context.recorder.limit(context, seconds)
