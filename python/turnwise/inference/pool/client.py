"""The client of a pool: several engines of the same policies, which may die, hang, join and leave while it samples."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnwise.inference.common.base import ClientBase, gather_all
from turnwise.inference.common.http import LONGEST_WAIT, LoopThread
from turnwise.inference.pool.engine import EngineFailed, Limits, PoolEngine, Published
from turnwise.inference.pool.router import PrefixRouter, Router
from turnwise.inference.weights.load import collect_weights
from turnwise.types import InferenceClient, ModelError, ModelRequest, ModelResponse

FIRST_WAIT = 0.25
"""Seconds until an engine that failed is tried again; they double up to :data:`LONGEST_WAIT`."""


class PoolClient(ClientBase):
    """Completes prompts with several engines that serve the same policies.

    - ``engines``: clients of the same kind by name. Engines may :meth:`join` and :meth:`leave` later.
    - ``router``: chooses the engine of a request, by default :class:`PrefixRouter`.
    - ``timeout``: seconds that an answer or an update may take.
    - ``dead_after``: seconds without an answer after which the pool calls the client's ``check_health()``, if it has
      that coroutine. An engine that doesn't answer it for as long is lost.
    - ``wait``: seconds to wait for an engine when none is left.
    - ``attempts``: the most times that a request is sent, so that one request can't take down the whole pool.

    If an engine fails, the pool sends the request to another with the same seed. The failed engine serves again once
    it is healthy and has acknowledged all published weights. An answer counts only if its versions are ones that its
    engine acknowledged while it had the request. Engines differ by at most one version, and only inside
    :meth:`load_weights`.

    Example::

        engines = {url: VLLMServerClient(Endpoint(url, patience=0), tokenizer, model) for url in urls}
        async with PoolClient(engines) as client:
            [response] = await client.generate([ModelRequest([1, 17, 9], Sampling(max_tokens=8, seed=3))])
    """

    def __init__(
        self,
        engines: Mapping[str, InferenceClient],
        *,
        router: Router | None = None,
        timeout: float = 600.0,
        dead_after: float = 30.0,
        wait: float = 0.0,
        attempts: int = 3,
        seed: int = 0,
    ) -> None:
        if not engines:
            raise ValueError("engines is empty: expected at least one")
        for name, value in (("timeout", timeout), ("dead_after", dead_after)):
            if not value > 0:
                raise ValueError(f"{name}={value!r}: expected seconds > 0")
        if not wait >= 0:
            raise ValueError(f"wait={wait!r}: expected seconds >= 0")
        if attempts < 1:
            raise ValueError(f"attempts={attempts!r}: expected at least 1")
        self._limits, self._wait, self._attempts = Limits(timeout, dead_after), wait, attempts
        self._router = PrefixRouter() if router is None else router
        self._seeds = np.random.default_rng(seed)
        self._engines = {name: PoolEngine(name, client, self._limits) for name, client in engines.items()}
        for engine in self._engines.values():
            engine.begin()
        self._published: dict[str, Published] = {}
        self._publishing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined, self._open, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._running = 0
        self._restarts = 0
        self._left: Counter[str] = Counter()  # the totals of engines that left
        self._closed = False
        self._thread = LoopThread("turnwise-pool")

    @property
    def shares_weights(self) -> bool:
        """True if an engine samples with the trainer's own modules."""
        return any(getattr(engine.client, "shares_weights", False) for engine in self._engines.values())

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    # -- the client protocol -------------------------------------------------------------------------------------------
    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return one response per request, in order.

        Raises the engines' errors that a request causes (``ValueError``, ``ContextLengthError``), and ``ModelError`` if
        no engine is left, if a request failed ``attempts`` times, or if the client is closed.
        """
        if self._closed:
            raise ModelError("the client is closed")
        return await self._thread.result_of(self._generate(requests), lambda: self._closed)

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Send ``weights`` to all engines at the same time, and return once each has acknowledged them or failed.

        The pool keeps a copy on the CPU for engines that come later. An engine that refuses the weights, while others
        take them, counts as failed. Raises ``ValueError`` or ``TypeError`` if all refuse them, and ``ModelError`` if no
        engine is left.
        """
        self.version(policy)
        if self._closed:
            raise ModelError("the client is closed")
        earlier = [*self._published.values()]
        new = Published.copy(policy, version, collect_weights(weights, policy), earlier)
        self._thread.submit(self._publish(new)).result()

    def version(self, policy: str) -> int:
        """The version that was last published, or else that of the engines, 0 without any."""
        if policy in self._published:
            return self._published[policy].version
        engines = list(self._engines.values())
        return engines[0].client.version(policy) if engines else 0

    async def pause(self) -> None:
        """Hold back new requests, and return once none runs. Requests wait until :meth:`resume`."""
        await asyncio.wrap_future(self._thread.submit(self._close_gate()))

    async def resume(self) -> None:
        """Let waiting requests run."""
        self._thread.call(self._open.set)

    async def close(self) -> None:
        """Fail all requests, and close all engines' clients. If one fails, the others are still closed."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.wrap_future(self._thread.submit(self._end()))
        finally:
            await asyncio.to_thread(self._thread.stop)

    # -- engines that come and go --------------------------------------------------------------------------------------
    def join(self, name: str, client: InferenceClient) -> None:
        """Add an engine. It serves once it has acknowledged the published weights, for which the others don't wait."""
        self._thread.submit(self._join(name, client)).result()

    async def leave(self, name: str, at_once: bool = False) -> None:
        """Remove an engine: it gets no new requests, and its client is closed once it has answered the others.

        With ``at_once`` other engines get those too, and no answer of the removed one counts any more.
        """
        await asyncio.wrap_future(self._thread.submit(self._leave(name, at_once)))

    def serving(self) -> list[str]:
        """The names of the engines that serve now."""
        return [name for name, engine in list(self._engines.items()) if engine.serving]

    def versions(self) -> dict[str, dict[str, int]]:
        """For each engine that serves now, the version of each policy that it acknowledged last."""
        serving = [engine for engine in list(self._engines.values()) if engine.serving]
        return {e.name: {policy: known[-1] for policy, known in e.versions.items()} for e in serving}

    def stats(self) -> dict[str, float]:
        """Sum the totals of all engines, with the pool's ``retries`` (requests asked elsewhere) and ``restarts``
        (engines that serve again). Each engine adds ``engines/<name>/`` with ``requests``, ``retries``, ``deaths``."""
        engines = list(self._engines.values())
        totals = Counter(self._left)
        for engine in engines:
            totals.update(getattr(engine.client, "stats", dict)())
        totals["retries"] += sum(engine.counts["retries"] for engine in engines)
        totals["restarts"] += self._restarts
        own = {f"engines/{e.name}/{name}": float(count) for e in engines for name, count in e.counts.items()}
        return {**totals, **own}

    def peaks(self) -> dict[str, float]:
        """The largest peak, by name, of all engines that have ``peaks``, and ``engines/<name>/outstanding``."""
        largest: dict[str, float] = {}
        for engine in list(self._engines.values()):
            for name, value in getattr(engine.client, "peaks", dict)().items():
                largest[name] = max(value, largest.get(name, value))
            largest[f"engines/{engine.name}/outstanding"] = engine.most_outstanding
            engine.most_outstanding = engine.outstanding
        return largest

    # -- requests, in the pool's thread --------------------------------------------------------------------------------
    async def _close_gate(self) -> None:
        self._open.clear()
        await self._idle.wait()

    async def _generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await gather_all([self._one(request) for request in requests])
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _one(self, request: ModelRequest) -> ModelResponse:
        """Ask one engine after the other, with the same seed, until one answers."""
        request = self._seeded(request)
        failed: dict[str, str] = {}
        for _ in range(self._attempts):
            engine = await self._choose(request, failed)
            try:
                return await engine.ask(request)
            except EngineFailed as error:
                failed[engine.name] = str(error)
                engine.counts["retries"] += 1
                self._exclude(engine, str(error), error.lost)
        raise ModelError(f"a request failed {self._attempts} times: {_list(failed)}")

    def _seeded(self, request: ModelRequest) -> ModelRequest:
        if request.sampling.seed is not None:
            return request
        return replace(request, sampling=request.sampling.with_(seed=int(self._seeds.integers(2**63))))

    async def _choose(self, request: ModelRequest, failed: Mapping[str, str]) -> PoolEngine:
        """Choose among the engines that serve, those that ``failed`` on the request last."""
        await self._wait_for_engines()
        serving = {name: engine.outstanding for name, engine in self._engines.items() if engine.serving}
        fresh = {name: count for name, count in serving.items() if name not in failed}
        return self._engines[self._router.choose(request, fresh or serving)]

    async def _wait_for_engines(self) -> None:
        """Return if an engine serves. Raises ``ModelError`` if none does for ``wait`` seconds."""
        try:
            async with asyncio.timeout(self._wait):
                while not self.serving():
                    if self._closed:
                        raise ModelError("the client was closed before this request was done")
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            errors = {name: engine.error for name, engine in self._engines.items()}
            raise ModelError(f"no engine is left: {_list(errors) or 'all have left the pool'}") from None

    # -- engines, in the pool's thread ---------------------------------------------------------------------------------
    def _exclude(self, engine: PoolEngine, error: str, lost: bool = False) -> None:
        """Send ``engine`` no requests until it is well again and has all weights."""
        was_serving = engine.serving
        engine.end(error, lost)
        if was_serving and not self._closed and self._engines.get(engine.name) is engine:
            engine.counts["deaths"] += 1
            warnings.warn(f"engine {engine.name} failed, and others get its requests: {error}", stacklevel=2)
            self._start(self._bring_back(engine))

    async def _bring_back(self, engine: PoolEngine) -> None:
        if await self._admit(engine):
            self._restarts += 1

    async def _admit(self, engine: PoolEngine) -> bool:
        """Let ``engine`` serve once it is healthy and has acknowledged all published weights. False if it left."""
        for attempt in itertools.count():
            if self._engines.get(engine.name) is not engine:
                return False
            try:
                await engine.check_health()
                # Weights may be published meanwhile: end with those, so that the engine serves no others.
                loaded: dict[str, Published] = {}
                while late := [new for policy, new in self._published.items() if loaded.get(policy) is not new]:
                    await engine.load(late[0])
                    loaded[late[0].policy] = late[0]
                break
            except Exception as error:  # whatever it is, the engine doesn't serve, and the error is kept
                engine.error = str(error) or type(error).__name__
            await asyncio.sleep(min(FIRST_WAIT * 2 ** min(attempt, 16), LONGEST_WAIT))
        if self._engines.get(engine.name) is not engine:
            return False
        engine.begin()
        self._joined.set()
        return True

    async def _join(self, name: str, client: InferenceClient) -> None:
        if name in self._engines:
            raise ValueError(f"name={name!r}: expected a name that no engine of the pool has")
        engine = self._engines[name] = PoolEngine(name, client, self._limits)
        self._start(self._admit(engine))

    async def _leave(self, name: str, at_once: bool) -> None:
        if name not in self._engines:
            raise ValueError(f"name={name!r}: expected one of {sorted(self._engines)}")
        engine = self._engines.pop(name)
        engine.end("it left the pool", lost=at_once)
        while engine.outstanding:
            await asyncio.sleep(0.01)
        self._left.update(getattr(engine.client, "stats", dict)())
        self._left["retries"] += engine.counts["retries"]
        await engine.close()

    async def _publish(self, new: Published) -> None:
        async with self._publishing:
            before = self._published.get(new.policy)
            self._published[new.policy] = new.over(before)  # engines that come meanwhile take these
            engines = [engine for engine in self._engines.values() if engine.serving]
            results = await asyncio.gather(*(engine.load(new) for engine in engines), return_exceptions=True)
            refusals = [result for result in results if isinstance(result, ValueError | TypeError)]
            if refusals and len(refusals) == len(engines):
                del self._published[new.policy]
                self._published |= {} if before is None else {new.policy: before}
                raise refusals[0]
            for engine, result in zip(engines, results, strict=True):
                if isinstance(result, BaseException):
                    self._exclude(engine, str(result) or type(result).__name__)
            await self._wait_for_engines()

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._joined.set()
        self._open.set()
        await gather_all([engine.close() for engine in self._engines.values()])


def _list(errors: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in errors.items())
