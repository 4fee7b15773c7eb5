"""Limits concurrent model calls over the whole tree of episodes, and isolates failures.

Only model calls hold a slot. An episode that waits for its children holds no slot, so nested episodes can't deadlock
and can't exceed the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar
from weakref import WeakSet

from turnwise.types import ModelError

T = TypeVar("T")
Order = tuple[int, ...]
_NO_CONTEXT = contextvars.Context()
"""Context of timers, which would otherwise keep their episode alive."""

LEAVE = 60.0
"""Seconds in which cancelled episodes may end and close what they opened."""


class BatchFailedError(RuntimeError):
    """More episodes failed than ``failure_threshold`` allows; the message ends with the first traceback."""


class PrioritySemaphore:
    """Limits holders to ``limit`` at once. The others wait in ascending ``order``.

    Among equal orders, the first to wait is the first to get a slot.

    It is not bound to an event loop, so one arena may be used in several ``asyncio.run`` calls.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_concurrency={limit!r}: expected at least 1")
        self.limit = limit
        self.in_use = 0
        self._waiting: list[tuple[Order, int, asyncio.Future[None]]] = []
        self._ticket = itertools.count()

    @property
    def bound(self) -> int:
        """The largest limit that there may be: the limit itself, where nothing moves it."""
        return self.limit

    @bound.setter
    def bound(self, bound: int) -> None:
        self.limit = bound

    @contextlib.contextmanager
    def limited_to(self, limit: int | None) -> Iterator[None]:
        """Lower the bound for the block; ``None`` keeps it."""
        if limit is not None and limit < 1:
            raise ValueError(f"concurrency={limit!r}: expected at least 1, or None")
        before = self.bound
        self.bound = before if limit is None else min(before, limit)
        try:
            yield
        finally:
            self.bound = before

    def slot(self, order: Order) -> Slot:
        """Return a slot: ``async with`` holds it for the block. A call that is cancelled while waiting gives it up."""
        return Slot(self, order)

    async def acquire(self, order: Order) -> None:
        if self.in_use < self.limit and not self._waiting:
            self.in_use += 1
            return
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._ticket), granted))
        if self.in_use < self.limit:
            self._grant_soon()
        try:
            await granted
        except asyncio.CancelledError:
            # The loop may have granted the slot in the same tick as the cancellation: pass it on.
            if granted.done() and not granted.cancelled():
                self.release()
            raise

    def release(self) -> None:
        self.in_use -= 1
        if self._waiting:
            self._grant_soon()

    def _grant_soon(self) -> None:
        # Wait two iterations of the loop, so that an episode that just finished a call can ask for its next one, or
        # start its children, before a new root gets the free slot.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._grant)

    def _grant(self) -> None:
        while self._waiting and self.in_use < self.limit:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                self.in_use += 1
                granted.set_result(None)


class Slot:
    """One slot of a :class:`PrioritySemaphore`. It is a class because generators are slower."""

    __slots__ = ("_budget", "_order")

    def __init__(self, budget: PrioritySemaphore, order: Order) -> None:
        self._budget, self._order = budget, order

    async def __aenter__(self) -> None:
        await self._budget.acquire(self._order)

    async def __aexit__(self, *failure: object) -> None:
        self._budget.release()


class AnswerLimit:
    """Ends calls of a client that has answered none of a policy's calls for ``seconds``, as a hung engine does.

    Each answer gives the calls that still wait ``seconds`` more, so a long queue in the client is not a hang. 0 sets no
    limit.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"answer_timeout={seconds!r}: expected seconds >= 0; 0 sets no limit")
        self.seconds = seconds
        self._latest: dict[str, float] = {}
        self._calls: dict[ClientCall, float] = {}
        self._timer: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None

    def begin(self, call: ClientCall, loop: asyncio.AbstractEventLoop) -> None:
        now = self._calls[call] = loop.time()
        if self._timer is None or self._timer[0] is not loop:  # one timer for all calls, which is due at the first
            self._timer = loop, loop.call_at(now + self.seconds, self._look, context=_NO_CONTEXT)

    def end(self, call: ClientCall, loop: asyncio.AbstractEventLoop, *, answered: bool) -> None:
        self._calls.pop(call, None)
        if answered:
            self._latest[call.policy] = loop.time()

    def _look(self) -> None:
        """End the calls whose time is up, and look again when that of the next one may be."""
        loop = asyncio.get_running_loop()
        dues = {
            call: max(begun, self._latest.get(call.policy, 0.0)) + self.seconds for call, begun in self._calls.items()
        }
        for call in [call for call, due in dues.items() if due <= loop.time()]:
            del dues[call], self._calls[call]
            call.expire()
        self._timer = (loop, loop.call_at(min(dues.values()), self._look, context=_NO_CONTEXT)) if dues else None


class ClientCall:
    """One call of an inference client. ``async with`` holds a slot of each budget, and limits the wait for the answer.

    Budgets that are ``None`` don't count. Any exception of the client becomes a ``ModelError``. It is one class, with
    no context managers inside, because each model call pays for it.
    """

    __slots__ = ("_budgets", "_cancelling", "_expired", "_limit", "_loop", "_order", "_task", "policy")

    def __init__(self, policy: str, limit: AnswerLimit, order: Order, *budgets: PrioritySemaphore | None) -> None:
        self.policy, self._limit, self._order = policy, limit, order
        self._budgets = [budget for budget in budgets if budget is not None]
        self._task: asyncio.Task[Any] | None = None
        self._expired = False

    async def __aenter__(self) -> None:
        taken = 0
        try:
            for budget in self._budgets:
                await budget.acquire(self._order)
                taken += 1
        except BaseException:
            for budget in self._budgets[:taken]:
                budget.release()
            raise
        if self._limit.seconds:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task(self._loop)
            assert self._task is not None
            self._cancelling = self._task.cancelling()
            self._limit.begin(self, self._loop)

    def expire(self) -> None:
        self._expired = True
        assert self._task is not None
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._task is not None:
            self._limit.end(self, self._loop, answered=kind is None)
        for budget in self._budgets:
            budget.release()
        # As in ``asyncio.timeout``: the limit's own cancellation is taken back, one from outside goes on.
        own = self._expired and self._task is not None and self._task.uncancel() <= self._cancelling
        if own and isinstance(error, asyncio.CancelledError):
            raise ModelError(
                f"the client answered no call of policy {self.policy!r} for {self._limit.seconds:g} s "
                "(rollout.answer_timeout). Is its engine hung? If answers take so long, allow more"
            ) from error
        if isinstance(error, Exception) and not isinstance(error, ModelError):
            raise ModelError(f"{type(error).__name__} in the inference client: {error}") from error


_stopped: WeakSet[asyncio.Future[Any]] = WeakSet()


def stop(task: asyncio.Future[Any]) -> None:
    """Cancel ``task``, so that :func:`is_stopped` is true for it."""
    _stopped.add(task)
    task.cancel()


def is_stopped(task: asyncio.Future[Any]) -> bool:
    """Return True if the owner of ``task`` cancelled it. Code that runs in a task can cancel it as well."""
    return task in _stopped


async def gather_or_cancel(running: Iterable[Coroutine[Any, Any, T] | asyncio.Task[T]]) -> list[T]:
    """Run coroutines concurrently. The first exception, or a cancellation from outside, cancels the rest and is raised.

    A task among ``running`` counts as one of them. A coroutine that runs code of the user holds it in
    :func:`~turnwise.utils.signals.exits_as_errors`, since an exit would end the event loop.
    """
    tasks = list(map(asyncio.ensure_future, running))
    try:
        if tasks:  # unlike ``gather``, ``wait`` leaves it to ``stop`` to cancel them
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and (task.cancelled() or task.exception())]
        return [task.result() for task in failed or tasks]
    except BaseException:
        await _stop_all(tasks)
        raise


async def _stop_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and wait until they have ended. Those that don't end are left behind, with a warning."""
    left = {task for task in tasks if not task.done()}
    try:
        for task in left:
            stop(task)
        if left:
            _, left = await asyncio.wait(left, timeout=LEAVE)
    finally:  # a second cancellation reaches them as well
        for task in left:
            task.cancel()
        for task in tasks:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # asyncio warns of unread ones
    if left:
        warnings.warn(f"{len(left)} cancelled tasks still run, and are left behind", RuntimeWarning, stacklevel=2)


def run_limited(
    starts: Iterable[Callable[[], Coroutine[Any, Any, T]]], limit: int | None
) -> list[Coroutine[Any, Any, T]]:
    """Return one coroutine per item of ``starts``. At most ``limit`` of them run at once; ``None`` sets no limit."""
    if limit is None:
        return [start() for start in starts]
    if limit < 1:
        raise ValueError(f"concurrency={limit!r}: expected at least 1, or None")
    gate = asyncio.Semaphore(limit)

    async def gated(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with gate:
            return await start()  # starts only here, so an earlier cancellation leaves no coroutine behind

    return [gated(start) for start in starts]


class EpisodeCounter:
    """Counts the episodes of all running batches. Calls ``show(ended, asked)``, if set, each time one ends."""

    def __init__(self) -> None:
        self.show: Callable[[int, int], None] | None = None
        self.ended = self.asked = 0

    @contextlib.contextmanager
    def batch(self, asked: int) -> Iterator[Callable[[], None]]:
        """Count ``asked`` more episodes inside the block. Call the yielded function each time one ends."""
        own = 0
        self.asked += asked

        def one_ended() -> None:
            nonlocal own
            own += 1
            self.ended += 1
            if self.show is not None:
                self.show(self.ended, self.asked)

        try:
            yield one_ended
        finally:
            self.asked -= asked
            self.ended -= own


class FailureBudget:
    """Counts the failures of one batch. Raises an error with the first traceback when there are too many."""

    def __init__(self, total: int, threshold: float) -> None:
        self.total, self.threshold = total, threshold
        self.failed = 0
        self.first = ""

    def add(self, error: str) -> None:
        self.failed += 1
        self.first = self.first or error
        if self.failed > self.threshold * self.total:
            raise BatchFailedError(
                f"{self.failed} of {self.total} episodes failed, more than failure_threshold={self.threshold:g} "
                f"allows. The first failure:\n{self.first}"
            )
