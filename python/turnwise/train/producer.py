"""Sampling beside training: batches are drawn in order, played side by side, and handed over in order.

Batch ``b`` trains as step ``b``. It may start once the weights of step ``b - ahead`` are published, so what it holds is
at most ``ahead`` versions old when it trains: staleness is bounded by waiting, nothing has to be thrown away.
``ahead`` 0 is the synchronous loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from turnwise.arena import Arena
from turnwise.types import GenerateResult

Results = list[GenerateResult]


def refuse_own_step(arena: Arena) -> None:
    """Raise ``TypeError`` for an arena with a ``step`` of its own: training calls its two halves, never ``step``."""
    if type(arena).step is not Arena.step or "step" in vars(arena):
        raise TypeError(
            f"arena={type(arena).__name__}: its own step() would never be called, as training samples ahead of the "
            "updates and calls sample() and then finish(results). Override these, or a stage of them: get_batch, "
            "generate_rollouts, assign_credit, build_training_batch"
        )


class _Batch:
    """One batch on its way. ``before`` is the sampler's state before it was drawn, ``None`` until then; a ``spare`` one
    is for who trains on."""

    def __init__(self, *, spare: bool = False) -> None:
        self.before: Any | None = None
        self.spare = spare
        self.drawn = asyncio.Event()
        self.results: asyncio.Future[Results]

    @property
    def whole(self) -> bool:
        return self.results.done() and not self.results.cancelled() and self.results.exception() is None


@dataclass(frozen=True, slots=True)
class Pending:
    """What a checkpoint keeps of a producer: whole batches that wait to be trained, and where drawing goes on.

    ``before`` is the sampler's state before the first batch that was under way, ``None`` where none was.
    """

    batches: list[Results]
    before: Any | None


class Producer:
    """Samples batches ahead of training with ``sample(drawn)``, which calls ``drawn()`` when it has what it will play;
    then the next one draws. ``snapshot`` gives the sampler's state before each of them.

    ``async with producer:`` cancels whatever is under way on every way out, and waits until it has ended.

    Example::

        async with Producer(arena.sample, arena.state_dict, ahead=1) as producer:
            producer.allow(0, until=10)
            results = await producer.oldest()
            producer.taken()
    """

    def __init__(
        self,
        sample: Callable[[Callable[[], None]], Awaitable[Results]],
        snapshot: Callable[[], Any],
        *,
        ahead: int,
        first: int = 0,
    ) -> None:
        if ahead < 0:
            raise ValueError(f"ahead={ahead!r}: expected a count >= 0")
        self.ahead = ahead
        self._sample, self._snapshot = sample, snapshot
        self._next = first
        self._batches: list[_Batch] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    def put(self, batches: Sequence[Results]) -> None:
        """Take up whole batches that a checkpoint kept; they come before all that is drawn."""
        for results in batches:
            whole = _Batch()
            whole.results = asyncio.get_running_loop().create_future()
            whole.results.set_result(results)
            whole.drawn.set()
            self._batches.append(whole)
            self._next += 1

    def allow(self, step: int, *, until: int, spare: bool = False) -> None:
        """The weights of ``step`` are published: start each batch up to ``step + ahead`` that is below ``until``.

        With ``spare`` those from ``until`` on too, which only a longer run trains on: it would have had them sampled by
        the weights of now. A failure of theirs is no failure of this run; see :meth:`failed_spare`.
        """
        while self._next < (step + self.ahead + 1 if spare else min(step + self.ahead + 1, until)):
            batch, previous = _Batch(spare=self._next >= until), self._batches[-1] if self._batches else None
            batch.results = asyncio.ensure_future(self._play(batch, previous))
            self._batches.append(batch)
            self._next += 1

    async def _play(self, batch: _Batch, previous: _Batch | None) -> Results:
        if previous is not None:
            await previous.drawn.wait()
        batch.before = self._snapshot()
        try:
            return await self._sample(batch.drawn.set)
        finally:
            batch.drawn.set()

    async def oldest(self) -> Results:
        """The oldest batch, once it is whole; it stays until :meth:`taken`. Cancelling the wait changes nothing.

        Raises what failed in it, or in a younger one before it is whole.
        """
        if not self._batches:
            raise RuntimeError("no batch was started: call allow(step, until=...) first")
        oldest = self._batches[0].results
        running = {batch.results for batch in self._batches if not (batch.results.done() or batch.spare)} | {oldest}
        while not oldest.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {oldest}:
                task.result()
        return oldest.result()

    def taken(self) -> None:
        """The oldest batch is the trainer's now."""
        assert self._batches and self._batches[0].whole, "there is no whole batch to take"
        del self._batches[0]

    async def settle(self) -> None:
        """Wait until nothing is under way. What failed is raised by :meth:`oldest`."""
        running = [batch.results for batch in self._batches if not batch.results.done()]
        if running:
            await asyncio.wait(running)

    def failed_spare(self) -> BaseException | None:
        """What the first spare batch failed with, where one did."""
        done = (batch.results for batch in self._batches if batch.spare and batch.results.done())
        return next((result.exception() for result in done if not result.cancelled() and result.exception()), None)

    async def cancel(self) -> Any | None:
        """Give up what is under way, wait for its end, and return the sampler's state before it (or ``None``).

        Whole batches in front of it stay and can still be taken.
        """
        place = next((i for i, batch in enumerate(self._batches) if not batch.whole), len(self._batches))
        given_up = self._batches[place:]
        for batch in given_up:
            batch.results.cancel()
        await asyncio.gather(*(batch.results for batch in given_up), return_exceptions=True)
        del self._batches[place:]
        self._next -= len(given_up)
        return given_up[0].before if given_up else None

    def pending(self) -> Pending:
        """What a checkpoint taken now has to keep: no batch is lost, and none that was trained is in it."""
        place = next((i for i, batch in enumerate(self._batches) if not batch.whole), len(self._batches))
        whole = [batch.results.result() for batch in self._batches[:place]]
        return Pending(whole, self._batches[place].before if place < len(self._batches) else None)
