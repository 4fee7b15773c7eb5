"""The client of a pool: engines of the same policies, which may die, hang, join and leave while it samples.

This is the one place that sends a request again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from turnwise.inference.common.base import GatedClient, GatedScoringClient, gather_all, loads_of
from turnwise.inference.common.http import LoopThread
from turnwise.inference.pool.engine import EngineFailed, EngineLimits, PoolEngine, PrefixRouter, Router, WeightSnapshot
from turnwise.inference.weights.load import collect_weights
from turnwise.types import (
    ClientCapabilities,
    EngineReport,
    InferenceClient,
    ModelError,
    ModelRequest,
    ModelResponse,
    capabilities_of,
)
from turnwise.utils.threads import to_thread

FIRST_WAIT, LONGEST_WAIT = 0.25, 10.0
"""Seconds until a failed engine is looked at again, or a request goes to it again: the first time, and at most."""


class PoolClient(GatedScoringClient):
    """Completes prompts with one or several engines that serve the same policies, and repeats what failed.

    - ``engines``: clients of the same kind by name. Engines may :meth:`join` and :meth:`leave` later.
    - ``router``: chooses the engine of a request, by default :class:`PrefixRouter`.
    - ``timeout``: seconds that an answer or an update may take.
    - ``dead_after``: seconds without an answer after which the pool calls the client's ``check_health()``, if it has
      that coroutine. An engine that doesn't answer it for as long is lost.
    - ``wait``: seconds to wait for an engine when none is left.
    - ``attempts``: the most times that a request is sent, so that one request can't take down the whole pool.
    - ``keeps_weights``: keeps a copy of the last weights on the CPU, for engines that join. Without it none can join.
      An engine that lost its weights then gets them by ``recover()`` of its client. Clients then get the caller's own
      tensors, so they must not share a :class:`SharedTransfer`.

    If an engine fails, the pool sends the request to another with the same seed, or after a pause to the same one if
    that may succeed. Pauses double up to :data:`LONGEST_WAIT` seconds, and the pool obeys ``Retry-After``. The failed
    engine serves again once it is healthy and has acknowledged all published weights. An answer counts only if its
    versions are ones that its engine acknowledged while it had the request. Engines differ by at most one version, and
    only inside :meth:`load_weights`.

    Example::

        engines = {url: VLLMServerClient(url, tokenizer, model) for url in urls}
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
        wait: float = 60.0,
        attempts: int = 3,
        keeps_weights: bool = True,
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
        alone = next(iter(engines.values())) if len(engines) == 1 else None
        name = "turnwise-pool"
        super().__init__(alone.share_thread(name) if isinstance(alone, GatedClient) else LoopThread(name))
        self._stop_thread = weakref.finalize(self, self._thread.stop)
        self._limits, self._wait, self._attempts = EngineLimits(timeout, dead_after), wait, attempts
        self._keeps = keeps_weights
        self._random = random.Random()  # the global generator belongs to the run
        self._router = PrefixRouter() if router is None else router
        self._seeds = np.random.default_rng(seed)
        self._engines = {name: PoolEngine(name, client, self._limits) for name, client in engines.items()}
        for engine in self._engines.values():
            engine.begin()
        self._published: dict[str, WeightSnapshot] = {}
        self._publishing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # set when an engine serves, or can't be waited for any more
        self._restarts = 0
        self._left: Counter[str] = Counter()  # the totals of engines that left

    @property
    def capabilities(self) -> ClientCapabilities:
        """The weights are shared if one engine shares them; a policy is fixed if all engines fix it; grammars work if
        all engines take them."""
        declared = [capabilities_of(engine.client, ClientCapabilities) for engine in self._engines.values()]
        fixed = [each.fixed_policies for each in declared]
        return ClientCapabilities(
            shares_weights=any(each.shares_weights for each in declared),
            fixed_policies=frozenset.intersection(*fixed) if fixed else frozenset(),
            grammars=bool(declared) and all(each.grammars for each in declared),
        )

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    # -- the client protocol -------------------------------------------------------------------------------------------
    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Send ``weights`` to all engines at the same time, and return once each has acknowledged them or failed.

        An engine that refuses the weights, while others take them, counts as failed. Raises ``ValueError`` or
        ``TypeError`` if all refuse them, and ``ModelError`` if no engine is left.
        """
        self.version(policy)
        if self._closed:
            raise ModelError("the client is closed")
        sources = collect_weights(weights, policy)
        new = WeightSnapshot(policy, version, sources)
        if self._keeps:
            new = WeightSnapshot.copy(policy, version, sources, [*self._published.values()])
        self._thread.submit(self._publish(new)).result()

    def version(self, policy: str) -> int:
        """The version that was last published; else that of the engines, or 0 without engines."""
        if policy in self._published:
            return self._published[policy].version
        engines = list(self._engines.values())
        return engines[0].client.version(policy) if engines else 0

    async def close(self) -> None:
        """Fail all requests, and close all engines' clients. If one fails, the others are still closed."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.wrap_future(self._thread.submit(self._end()))
        finally:
            await to_thread(self._stop_thread)

    # -- engines that come and go --------------------------------------------------------------------------------------
    def join(self, name: str, client: InferenceClient) -> None:
        """Add an engine. It serves once it has acknowledged the published weights. The others don't wait for it."""
        if not self._keeps:
            raise ValueError("keeps_weights=False: expected True, as an engine that joins needs the weights")
        self._thread.submit(self._join(name, client)).result()

    async def leave(self, name: str, at_once: bool = False) -> None:
        """Remove an engine: it gets no new requests, and its client is closed once it has answered the others.

        With ``at_once``, other engines get those too, and answers of the removed one no longer count.
        """
        await asyncio.wrap_future(self._thread.submit(self._leave(name, at_once)))

    def serving(self) -> list[str]:
        """The names of the engines that serve now."""
        return [name for name, engine in list(self._engines.items()) if engine.serving]

    def versions(self) -> dict[str, dict[str, int]]:
        """For each engine that serves now, the version of each policy that it acknowledged last."""
        serving = [engine for engine in list(self._engines.values()) if engine.serving]
        return {e.name: {policy: versions[-1] for policy, versions in e.versions.items()} for e in serving}

    def stats(self) -> dict[str, float]:
        """Sum the totals of all engines, with the pool's ``retries`` (requests asked elsewhere) and ``restarts``
        (engines that serve again). Each engine adds ``engines/<name>/`` with ``requests``, ``retries``, ``deaths``."""
        engines = list(self._engines.values())
        totals = Counter(self._left)
        for engine in engines:
            totals.update(engine.stats())
        totals["retries"] += sum(engine.counts["retries"] for engine in engines)
        totals["restarts"] += self._restarts
        by_engine = {f"engines/{e.name}/{name}": float(count) for e in engines for name, count in e.counts.items()}
        return {**totals, **by_engine}

    def peaks(self) -> dict[str, float]:
        """The largest peak, by name, of all engines that have ``peaks``, and ``engines/<name>/outstanding``."""
        largest: dict[str, float] = {}
        for engine in list(self._engines.values()):
            for name, value in engine.peaks().items():
                largest[name] = max(value, largest.get(name, value))
            largest[f"engines/{engine.name}/outstanding"] = engine.most_outstanding
            engine.most_outstanding = engine.outstanding
        return largest

    async def load(self) -> dict[str, EngineReport | None]:
        """Join the reports of the engines that serve now."""
        if self._closed:
            return {}
        return await self._result(self._thread.submit(self._loads()))

    # -- requests, in the pool's thread --------------------------------------------------------------------------------
    async def _one(self, request: ModelRequest) -> ModelResponse:
        """Ask one engine after the other, with the same seed, until one answers.

        Raises the errors that the request causes (``ValueError``, ``ContextLengthError``, ``DeadEndError``), and
        ``ModelError`` if no engine is left, if the request failed ``attempts`` times, or if no engine can answer it.
        """
        if request.sampling.seed is None:
            request = replace(request, sampling=request.sampling.with_(seed=int(self._seeds.integers(2**63))))
        pause = FIRST_WAIT
        failed: dict[str, EngineFailed] = {}
        for _ in range(self._attempts):
            unable = [name for name, error in failed.items() if not error.retryable]
            engine = await self._choose(request, failed, unable)
            if engine.name in failed:
                await asyncio.sleep(max(pause * self._random.uniform(0.5, 1.0), failed[engine.name].seconds))
                pause = min(2 * pause, LONGEST_WAIT)
                engine = await self._choose(request, failed, unable)
            answer = asyncio.ensure_future(engine.client.generate([request]))
            try:
                return await engine.wait_for(answer, request)
            except EngineFailed as error:
                failed[engine.name] = error
                engine.counts["retries"] += 1
                self._exclude(engine, str(error), error.lost)
                if not error.retryable and all(name in failed and not failed[name].retryable for name in self._engines):
                    raise ModelError(_list(failed)) from error
        raise ModelError(f"a request failed {self._attempts} times: {_list(failed)}")

    async def _loads(self) -> dict[str, EngineReport | None]:
        return await loads_of([engine.client for engine in self._engines.values() if engine.serving])

    async def _choose(self, request: ModelRequest, failed: Collection[str], unable: Collection[str]) -> PoolEngine:
        """Choose among the engines that serve: none that is ``unable``, and those that ``failed`` last."""
        await self._wait_for_engines(unable)
        able = {name: e.outstanding for name, e in self._engines.items() if e.serving and name not in unable}
        fresh = {name: count for name, count in able.items() if name not in failed}
        return self._engines[self._router.choose(request, fresh or able)]

    async def _wait_for_engines(self, unable: Collection[str] = ()) -> None:
        """Return if an engine serves that is not ``unable``.

        Raises ``ModelError`` if none does for ``wait`` seconds, or if each was healthy and refused often enough.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait):
                while not set(self.serving()) - set(unable):
                    if self._closed:
                        raise ModelError("the client was closed before this request was done")
                    left = [engine for name, engine in self._engines.items() if name not in unable]
                    if left and all(engine.refusals >= self._attempts for engine in left):
                        break
                    self._changed.clear()
                    await self._changed.wait()
                else:
                    return
        errors = {name: engine.error for name, engine in self._engines.items()}
        raise ModelError(f"no engine is left: {_list(errors) or 'all have left the pool'}")

    # -- engines, in the pool's thread ---------------------------------------------------------------------------------
    def _exclude(self, engine: PoolEngine, error: str, lost: bool = False) -> None:
        """Send ``engine`` no requests until it is healthy again and has all weights."""
        was_serving = engine.serving
        engine.end(error, lost)
        if was_serving and not self._closed and self._engines.get(engine.name) is engine:
            engine.counts["deaths"] += 1
            warnings.warn(f"engine {engine.name} failed, and its requests are sent again: {error}", stacklevel=2)
            self._start(self._admit(engine, again=True))

    async def _admit(self, engine: PoolEngine, again: bool = False) -> None:
        """Let ``engine`` serve, or serve ``again``, once it is healthy and has acknowledged all published weights."""
        for attempt in itertools.count():
            if self._engines.get(engine.name) is not engine:
                return  # it left the pool
            try:
                await engine.check_health()
                engine.refusals += 1  # unless the next line succeeds
                await self._catch_up(engine)
                break
            except Exception as error:  # whatever it is, the engine doesn't serve, and the error is kept
                engine.error = str(error) or type(error).__name__
                if isinstance(error, ModelError | EngineFailed) and not error.retryable:
                    engine.refusals = max(engine.refusals, self._attempts)
                self._changed.set()
            await asyncio.sleep(min(FIRST_WAIT * 2 ** min(attempt, 16), LONGEST_WAIT))
        if self._engines.get(engine.name) is engine:
            engine.begin()
            self._changed.set()
            self._restarts += again

    async def _catch_up(self, engine: PoolEngine) -> None:
        """Let ``engine`` acknowledge all published weights, also those published in the meantime."""

        def missing() -> list[WeightSnapshot]:
            return [new for policy, new in self._published.items() if loaded.get(policy) is not new]

        loaded = dict(engine.held)
        if not missing() and not await engine.recover():
            loaded = {}
        while news := missing():
            # The first one brings the base, which the server may have lost.
            first = max(news, key=lambda new: len(new.weights))
            await engine.load(first)
            loaded[first.policy] = engine.held[first.policy] = first

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
        self._left.update(engine.stats())
        self._left["retries"] += engine.counts["retries"]
        await engine.close()

    async def _publish(self, new: WeightSnapshot) -> None:
        async with self._publishing:
            for engine in self._engines.values():
                engine.refusals = 0  # perhaps it takes these
            before = self._published.get(new.policy)
            whole = self._published[new.policy] = new.over(before)  # engines that join now take these
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
                else:
                    engine.held[new.policy] = whole
            try:
                await self._wait_for_engines()
            finally:
                if not self._keeps:  # the weights are the caller's, and may change once this returns
                    kept = self._published[new.policy] = WeightSnapshot(new.policy, new.version, {})
                    for engine in self._engines.values():
                        if engine.held.get(new.policy) is whole:
                            engine.held[new.policy] = kept

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._changed.set()
        self._open.set()
        await gather_all([engine.close() for engine in self._engines.values()])


def _list(errors: Mapping[str, object]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in errors.items())
