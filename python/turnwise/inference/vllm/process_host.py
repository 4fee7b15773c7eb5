"""Run one vLLM engine in a child process: start it, watch it, and restart it with its weights when it dies.

Everything in :class:`EngineHost` runs on one event loop in its own thread, so little of it needs a lock: only a change
of weights and a restart exclude each other. A request that ran when the process died is recomputed from its seed, and
answered once.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from turnwise.inference.vllm.engine import PendingRequest, model_error, to_response
from turnwise.inference.vllm.lora import Adapter
from turnwise.inference.vllm.process_handle import EngineLost, EngineProcess, kill
from turnwise.inference.vllm.stats import EnginePeaks, EngineStats
from turnwise.inference.weights.sync import WeightTransfer
from turnwise.types import ModelError, Tokenizer

ATTEMPTS = 2
"""The most attempts to send new weights before the engine counts as broken."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    timeout: float | None
    """Seconds for one request, or for one step of a change of weights."""

    restarts: int
    """The most starts in a row without an answer in between."""


@dataclass(slots=True)
class WeightUpdate:
    """New weights for ``policy``: its base, its adapter, or both."""

    policy: str
    version: int
    base: Mapping[str, Tensor] = field(default_factory=dict)
    adapter: Adapter | None = None
    own: Mapping[str, Tensor] = field(default_factory=dict)
    """The adapter's weights."""


class EngineHost:
    """One engine in a child process, with its requests. It serves ``policies``.

    ``start`` makes vLLM's ``AsyncLLM`` on the running event loop, and passes vLLM's reports to the function that it is
    given. With ``in_flight`` new weights are loaded between two tokens of running requests; else they wait until
    nothing runs.
    """

    def __init__(
        self,
        start: Callable[[Callable[[Any, Any], None]], Any],
        policies: Iterable[str],
        tokenizer: Tokenizer,
        transfer: WeightTransfer,
        limits: HostLimits,
        in_flight: bool,
    ) -> None:
        self.stats = EngineStats()
        self._start, self._transfer, self._limits = start, transfer, limits
        self._tokenizer, self._in_flight = tokenizer, in_flight
        self._name = ", ".join(map(repr, policies))
        self._numbers = itertools.count()
        self._peaks = EnginePeaks()
        self.processes: list[int] = []
        self._engine: EngineProcess | None = None
        self._failures = 0
        self._broken: str | None = None
        self._handle: dict[str, Any] | None = None
        self._adapters: dict[str, Adapter] = {}
        self._label = 0
        self._versions: dict[str, list[tuple[int, int]]] = {policy: [(0, 0)] for policy in policies}
        self._began = 0.0
        self._tasks: dict[PendingRequest, asyncio.Task[None]] = {}
        self._computing: set[PendingRequest] = set()
        self._loop = asyncio.new_event_loop()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._updates, self._exclusive = asyncio.Lock(), asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="turnwise-vllm-host", daemon=True)
        self._thread.start()

    # -- from any thread -----------------------------------------------------------------------------------------------
    def begin(self) -> int:
        """Start the engine, and return the length of its context. Raises ``RuntimeError`` if it doesn't start."""
        return self._run_on_loop(self._begin())

    def add(self, jobs: Sequence[PendingRequest]) -> None:
        """Compute ``jobs``, and resolve each."""
        self._post(self._admit, jobs)

    def abandon(self, jobs: Sequence[PendingRequest], timeouts: int = 0) -> None:
        """Cancel ``jobs``; ``timeouts`` is the number of them that timed out."""
        self.stats.timeouts += timeouts
        self._post(self._cancel, jobs)

    def put(self, update: WeightUpdate) -> None:
        """Load new weights, and return once they are loaded.

        Raises ``ModelError`` if that fails; the engine then serves nothing until a later call succeeds.
        """
        self._run_on_loop(self._change(update))

    def peaks(self) -> EnginePeaks:
        """Return the peaks since the last call."""
        taken, self._peaks = self._peaks, EnginePeaks()
        return taken

    def close(self) -> None:
        """End the process and the thread, and fail all requests. May be called again."""
        if self._thread.is_alive():
            self._run_on_loop(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def kill(self) -> None:
        """Kill the process at once, and end the thread soon, without waiting."""
        kill(self.processes)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _post(self, function: Callable[[Sequence[PendingRequest]], None], jobs: Sequence[PendingRequest]) -> None:
        try:
            self._loop.call_soon_threadsafe(function, jobs)
        except RuntimeError:  # closed in between
            for job in jobs:
                job.resolve(ModelError("the client is closed"))

    def _run_on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    # -- requests ------------------------------------------------------------------------------------------------------
    def _admit(self, jobs: Sequence[PendingRequest]) -> None:
        for job in jobs:
            if not job.abandoned:
                self._tasks[job] = task = self._loop.create_task(self._serve(job))
                task.add_done_callback(partial(self._forget, job))

    def _forget(self, job: PendingRequest, _: asyncio.Task[None]) -> None:
        del self._tasks[job]

    def _cancel(self, jobs: Sequence[PendingRequest]) -> None:
        for job in jobs:
            if job in self._tasks:
                self._tasks[job].cancel()

    async def _serve(self, job: PendingRequest) -> None:
        try:
            output = await self._computed(job)
        except ModelError as error:
            job.resolve(error)
        except Exception as error:  # vLLM's own checks failed; only this request ends
            job.resolve(model_error(f"vLLM failed on a request of policy {job.request.policy!r}", _cause(error)))
        else:
            self._failures = 0
            self.stats.count(output)
            job.resolve(to_response(job.request, output, self._versions[job.request.policy], self._tokenizer))

    async def _computed(self, job: PendingRequest) -> Any:
        """Compute vLLM's ``RequestOutput`` for ``job``, on a new engine each time the current one is lost."""
        while True:
            while not self._open.is_set():
                await self._open.wait()
            if self._broken is not None:
                raise ModelError(self._broken)
            engine = self._engine
            try:
                return await self._compute(engine, job)
            except EngineLost:
                # A separate task continues for other requests if this one is cancelled.
                await asyncio.shield(self._loop.create_task(self._recover(engine)))

    async def _compute(self, engine: EngineProcess | None, job: PendingRequest) -> Any:
        if engine is None or engine.is_dead:
            raise EngineLost
        if not self._computing:
            self._began = time.perf_counter()
        self._computing.add(job)
        self._idle.clear()
        try:
            return await engine.run_unless_dead(self._ask(engine, job))
        except TimeoutError:
            if not await engine.is_responsive():
                raise EngineLost from None
            self.stats.timeouts += 1
            raise ModelError(
                f"a request of policy {job.request.policy!r} took longer than timeout={self._limits.timeout} s"
            ) from None
        finally:
            self._computing.discard(job)
            if not self._computing:
                self._idle.set()
                self.stats.seconds += time.perf_counter() - self._began

    async def _ask(self, engine: EngineProcess, job: PendingRequest) -> Any:
        prompt = {"type": "token", "prompt_token_ids": list(job.request.prompt_token_ids)}
        lora = None if job.adapter is None else job.adapter.request()
        # There is only one output, at the end of the request.
        outputs = engine.llm.generate(prompt, job.params, str(next(self._numbers)), lora_request=lora)
        return [output async for output in outputs][-1]

    # -- weights -------------------------------------------------------------------------------------------------------
    async def _change(self, update: WeightUpdate) -> None:
        began = time.perf_counter()
        async with self._updates:
            self._open.clear()
            try:
                if not self._in_flight:
                    await self._idle.wait()
                async with self._exclusive:
                    await self._apply_update(update)
            finally:
                self._open.set()
        self.stats.syncs += 1
        self.stats.sync_seconds += time.perf_counter() - began

    async def _apply_update(self, update: WeightUpdate) -> None:
        """Store ``update`` and send it to the engine. If the engine is lost, a new one loads the stored weights."""
        if not self._computing:
            self._versions = {policy: known[-1:] for policy, known in self._versions.items()}
        if self._broken is not None:
            self._broken, self._failures = None, 0
        self._label += 1
        self._versions[update.policy].append((self._label, update.version))
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                await self._store_weights(update)
                await self._send_to_engine(update)
                return
            except EngineLost:
                await self._restart()  # it loads the stored weights
                if self._broken is None:
                    return
                failure = ModelError(self._broken)
                break
            except Exception as error:
                failure = error
        self._versions[update.policy].pop()
        self._stop_process()
        self._broken = f"new weights for policy {update.policy!r} did not arrive whole ({failure}); send them again"
        raise ModelError(self._broken) from failure

    async def _store_weights(self, update: WeightUpdate) -> None:
        if update.base:
            self._handle = await asyncio.to_thread(self._transfer.send, update.base)
        if update.adapter is not None:
            await asyncio.to_thread(update.adapter.write, update.own)
            self._adapters[update.adapter.name] = update.adapter

    async def _send_to_engine(self, update: WeightUpdate) -> None:
        engine = self._engine
        if engine is None or engine.is_dead:
            raise EngineLost
        core = engine.llm.engine_core
        await engine.run_or_kill(core.pause_scheduler_async("keep", True))
        if update.base:
            await engine.run_or_kill(engine.llm.collective_rpc("turnwise_reload", args=(self._handle,)))
        if update.adapter is not None:
            await engine.run_or_kill(engine.llm.add_lora(update.adapter.request(in_place=True)))
        await engine.run_or_kill(engine.llm.update_weight_version(str(self._label)))
        await engine.run_or_kill(core.resume_scheduler_async())

    # -- the process ---------------------------------------------------------------------------------------------------
    async def _begin(self) -> int:
        async with self._exclusive:
            try:
                engine = await self._launch()
            except Exception as error:
                raise RuntimeError(
                    f"vLLM's process for {self._name} did not start; it says why on standard error: {error}"
                ) from error
        return int(engine.llm.model_config.max_model_len)

    async def _recover(self, lost: EngineProcess | None) -> None:
        """Replace ``lost`` by a new engine, unless another request has already done so."""
        async with self._exclusive:
            if self._engine is lost and self._broken is None:
                await self._restart()

    async def _restart(self) -> None:
        """Start a new engine with the last weights. If no start succeeds, set ``_broken`` to the reason."""
        failure: Exception | None = None
        while self._failures < self._limits.restarts:
            self._failures += 1
            self.stats.restarts += 1
            try:
                await self._launch()
                return
            except Exception as error:
                failure = error
        self._stop_process()
        why = "" if failure is None else f": {type(failure).__name__}: {failure}"
        self._broken = f"the engine of {self._name} died, also after {self._failures} restarts in a row{why}"

    async def _launch(self) -> EngineProcess:
        self._stop_process()
        engine = EngineProcess(lambda: self._start(self._report), self._limits.timeout)
        self.processes = engine.processes
        try:
            if self._handle is not None:
                await engine.run_or_kill(engine.llm.collective_rpc("turnwise_reload", args=(self._handle,)))
            for adapter in self._adapters.values():
                await engine.run_or_kill(engine.llm.add_lora(adapter.request()))
            await engine.run_or_kill(engine.llm.update_weight_version(str(self._label)))
        except BaseException:
            engine.end()
            raise
        self._engine = engine  # set last, as nothing may be sampled until its weights are loaded
        return engine

    def _stop_process(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.end()

    def _report(self, scheduler: Any, iteration: Any) -> None:
        """Count one step from vLLM's ``SchedulerStats`` and ``IterationStats``; ``None`` if vLLM reports nothing."""
        if scheduler is not None:
            waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._peaks.see(scheduler.num_running_reqs, waiting, scheduler.kv_cache_usage)
        if iteration is not None:
            self.stats.steps += 1
            self.stats.preemptions += iteration.num_preempted_reqs

    async def _close(self) -> None:
        self._broken = "the client was closed before this request was done"
        for job, task in list(self._tasks.items()):
            task.cancel()
            job.resolve(ModelError(self._broken))
        async with self._exclusive:
            self._stop_process()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_default_executor()
        self._transfer.close()


def _cause(error: Exception) -> Exception:
    """The cause of an error, if it has one. vLLM wraps errors in others without a message."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error
