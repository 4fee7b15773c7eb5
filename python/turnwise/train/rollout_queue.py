"""Samples batches ahead of training: draws them in order, runs them concurrently, and returns them in order.

Step ``b`` trains batch ``b``. The batch may start once the client has the weights of step ``b - max_ahead``, so its
tokens are at most ``max_ahead`` versions old when it trains. Waiting bounds staleness; no batch is thrown away.
``max_ahead`` 0 is the synchronous loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from turnwise.arena import Arena
from turnwise.train.interrupt import leave
from turnwise.types import GenerateResult

Results = list[GenerateResult]


def check_step_not_overridden(arena: Arena) -> None:
    """Raise ``TypeError`` for an arena that overrides ``step``: training calls the stages instead."""
    if type(arena).step is not Arena.step or "step" in vars(arena):
        raise TypeError(
            f"arena={type(arena).__name__}: training never calls step(), as it samples ahead of the updates: it calls "
            "sample() and then assign_credit_and_pack(results). Override these, or a stage of them: "
            "get_batch, generate_rollouts, assign_credit, build_training_batch"
        )


class _Batch:
    """A started batch. ``before`` is the sampler's state before the batch was drawn, ``None`` until then.

    A ``spare`` batch is past the run's end: it trains only if the run is extended.
    """

    def __init__(self, *, spare: bool = False) -> None:
        self.before: Any | None = None
        self.spare = spare
        self.drawn = asyncio.Event()
        self.results: asyncio.Future[Results]

    @property
    def finished(self) -> bool:
        return self.results.done() and not self.results.cancelled() and self.results.exception() is None


@dataclass(frozen=True, slots=True)
class Pending:
    """The part of a queue that a checkpoint keeps: finished batches, and the state from which to draw the next ones.

    ``before`` is the sampler's state before the first unfinished batch, ``None`` if all are finished.
    """

    batches: list[Any]
    before: Any | None


class RolloutQueue:
    """Runs ``sample(on_requests_fixed)`` for each batch.

    ``sample`` calls ``on_requests_fixed`` once its requests are fixed; then the next batch draws. ``snapshot`` returns
    the sampler's state, which the queue takes before each batch. ``async with`` cancels running batches on every exit,
    and waits until they have ended.

    Example::

        async with RolloutQueue(arena.sample, arena.state_dict, max_ahead=1) as rollouts:
            rollouts.start_up_to(0, until=10)
            results = await rollouts.get_oldest()
            rollouts.pop_oldest()
    """

    def __init__(
        self,
        sample: Callable[[Callable[[], None]], Awaitable[Results]],
        snapshot: Callable[[], Any],
        *,
        max_ahead: int,
        first: int = 0,
    ) -> None:
        if max_ahead < 0:
            raise ValueError(f"max_ahead={max_ahead!r}: expected a count >= 0")
        self.max_ahead = max_ahead
        self._sample, self._snapshot = sample, snapshot
        self._next = first
        self._batches: list[_Batch] = []
        self._popped: _Batch | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.cancel()

    def restore(self, batches: Sequence[Results]) -> None:
        """Add finished batches of a checkpoint to the queue, before any batch is drawn."""
        for results in batches:
            batch = _Batch()
            batch.results = asyncio.get_running_loop().create_future()
            batch.results.set_result(results)
            batch.drawn.set()
            self._batches.append(batch)
            self._next += 1

    def start_up_to(self, step: int, *, until: int, spare: bool = False) -> None:
        """Start each batch up to ``step + max_ahead`` and below ``until``, once the client has the weights of ``step``.

        With ``spare``, also start batches from ``until`` on. Only an extended run trains on them: a run with that
        length from its start would sample them with the present weights. If one fails, this run continues; see
        :meth:`failed_spare`.
        """
        end = step + self.max_ahead + 1
        while self._next < (end if spare else min(end, until)):
            batch, previous = _Batch(spare=self._next >= until), self._batches[-1] if self._batches else None
            batch.results = asyncio.ensure_future(self._run(batch, previous))
            self._batches.append(batch)
            self._next += 1

    async def _run(self, batch: _Batch, previous: _Batch | None) -> Results:
        if previous is not None:
            await previous.drawn.wait()
        batch.before = self._snapshot()
        try:
            return await self._sample(batch.drawn.set)
        finally:
            batch.drawn.set()

    async def get_oldest(self) -> Results:
        """Wait for the oldest batch and return it; it stays until :meth:`pop_oldest`. Cancelling the wait is safe.

        Raises the error of this batch, or of a younger one that fails first; younger spare batches are not watched.
        """
        if not self._batches:
            raise RuntimeError("no batch was started: call start_up_to(step, until=...) first")
        oldest = self._batches[0].results
        running = {batch.results for batch in self._batches if not (batch.results.done() or batch.spare)} | {oldest}
        while not oldest.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {oldest}:
                task.result()
        return oldest.result()

    def pop_oldest(self) -> None:
        """Remove the oldest batch, which must be finished. :meth:`put_back` undoes it."""
        assert self._batches and self._batches[0].finished, "there is no finished batch to remove"
        self._popped = self._batches.pop(0)

    def put_back(self) -> None:
        """Put the batch of the last :meth:`pop_oldest` back in front, as it was not trained."""
        assert self._popped is not None, "no batch was removed, or it was already put back"
        self._batches.insert(0, self._popped)
        self._popped = None

    async def wait_idle(self) -> None:
        """Wait until no batch runs. :meth:`get_oldest` raises the error of a failed one."""
        running = [batch.results for batch in self._batches if not batch.results.done()]
        if running:
            await asyncio.wait(running)

    @property
    def metrics(self) -> dict[str, float]:
        """Return nothing: a step trains the batch that was drawn for it."""
        return {}

    @property
    def finished(self) -> int:
        """The number of finished batches that wait to be trained."""
        return self._first_running()

    def failed_spare(self) -> BaseException | None:
        """Return the error of the first spare batch that failed, or ``None``."""
        done = (batch.results for batch in self._batches if batch.spare and batch.results.done())
        return next((result.exception() for result in done if not result.cancelled() and result.exception()), None)

    async def cancel(self) -> Any | None:
        """Discard the first unfinished batch and all batches behind it, and wait until they have ended.

        Returns the sampler's state before them, or ``None`` if every batch is finished. Finished batches in front of
        them stay. It stops waiting for batches that don't end soon.
        """
        before, running = self.discard()
        await leave(running)
        return before

    def discard(self, index: int | None = None) -> tuple[Any | None, list[asyncio.Future[Results]]]:
        """Discard the batches from ``index`` on, by default from the first unfinished one.

        Returns the sampler's state before them, and their tasks, which still run.
        """
        index = self._first_running() if index is None else index
        discarded = self._batches[index:]
        del self._batches[index:]
        self._next -= len(discarded)
        return (discarded[0].before if discarded else None), [batch.results for batch in discarded]

    def pending(self, most: int | None = None) -> Pending:
        """Return the part of the queue that a checkpoint must keep now, with at most ``most`` finished batches."""
        index = self._first_running() if most is None else most
        finished = [batch.results.result() for batch in self._batches[:index]]
        return Pending(finished, self._batches[index].before if index < len(self._batches) else None)

    def _first_running(self) -> int:
        return next((i for i, batch in enumerate(self._batches) if not batch.finished), len(self._batches))
