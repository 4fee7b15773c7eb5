"""One vLLM engine in a process of its own: started, watched, and started again with its weights when it dies.

Everything in :class:`EngineHost` runs on an event loop in a thread of its own, so little of it needs a lock: only a
change of weights and a new start exclude each other. What was computing when the process died is computed anew from its
seed, and answered once.
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

from turnwise.inference.transfer import WeightTransfer
from turnwise.inference.vllm_engine import Job, answer_of, failure_of
from turnwise.inference.vllm_running import EngineLost, RunningEngine, kill
from turnwise.inference.vllm_stats import Peaks, Stats
from turnwise.inference.vllm_weights import Adapter
from turnwise.types import ModelError, Tokenizer

ATTEMPTS = 2
"""How often new weights are sent before the engine is given up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``timeout``: seconds for one request or one change of weights; ``restarts``: starts in a row without an answer
    in between."""

    timeout: float | None
    restarts: int


@dataclass(slots=True)
class Update:
    """New weights for ``policy``: its ``base``, its ``adapter`` with the adapter's weights, or both."""

    policy: str
    version: int
    base: Mapping[str, Tensor] = field(default_factory=dict)
    adapter: Adapter | None = None
    own: Mapping[str, Tensor] = field(default_factory=dict)


class EngineHost:
    """``start`` makes vLLM's ``AsyncLLM`` on the running event loop, which calls what it is given with vLLM's reports;
    ``policies`` are those that it serves.

    With ``in_flight`` new weights land between two tokens of what runs, else they wait until nothing runs.
    """

    def __init__(
        self,
        start: Callable[[Callable[[Any, Any], None]], Any],
        policies: Iterable[str],
        tokenizer: Tokenizer,
        transfer: WeightTransfer,
        limits: Limits,
        in_flight: bool,
    ) -> None:
        self.stats = Stats()
        self._start, self._transfer, self._limits = start, transfer, limits
        self._tokenizer, self._in_flight = tokenizer, in_flight
        self._name = ", ".join(map(repr, policies))
        self._numbers = itertools.count()
        self._peaks = Peaks()
        self.processes: list[int] = []
        self._engine: RunningEngine | None = None
        self._failures = 0
        self._broken: str | None = None
        self._parcel: dict[str, Any] | None = None
        self._adapters: dict[str, Adapter] = {}
        self._label = 0
        self._versions: dict[str, list[tuple[int, int]]] = {policy: [(0, 0)] for policy in policies}
        self._began = 0.0
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._computing: set[Job] = set()
        self._loop = asyncio.new_event_loop()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._updates, self._exclusive = asyncio.Lock(), asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="turnwise-vllm-host", daemon=True)
        self._thread.start()

    # -- from any thread -----------------------------------------------------------------------------------------------
    def begin(self) -> int:
        """Start the engine; the length of its context. Raises ``RuntimeError`` where it doesn't start."""
        return self._do(self._begin())

    def add(self, jobs: Sequence[Job]) -> None:
        """Compute ``jobs`` and resolve each."""
        self._post(self._admit, jobs)

    def abandon(self, jobs: Sequence[Job], timeouts: int = 0) -> None:
        """Stop computing ``jobs``; nobody waits for them."""
        self.stats.timeouts += timeouts
        self._post(self._cancel, jobs)

    def put(self, update: Update) -> None:
        """Returns when the new weights are in. Raises ``ModelError`` where they don't arrive; the engine then serves
        nothing until a later call succeeds."""
        self._do(self._change(update))

    def peaks(self) -> Peaks:
        """The most of anything since the call before."""
        taken, self._peaks = self._peaks, Peaks()
        return taken

    def close(self) -> None:
        """End the process and the thread, and fail what is left. May be called again."""
        if self._thread.is_alive():
            self._do(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def kill(self) -> None:
        """End the process at once, and the thread soon, for who can't wait."""
        kill(self.processes)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _post(self, function: Callable[[Sequence[Job]], None], jobs: Sequence[Job]) -> None:
        try:
            self._loop.call_soon_threadsafe(function, jobs)
        except RuntimeError:  # closed in between
            for job in jobs:
                job.resolve(ModelError("the client is closed"))

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    # -- requests ------------------------------------------------------------------------------------------------------
    def _admit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not job.abandoned:
                self._tasks[job] = task = self._loop.create_task(self._serve(job))
                task.add_done_callback(partial(self._forget, job))

    def _forget(self, job: Job, _: asyncio.Task[None]) -> None:
        del self._tasks[job]

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job in self._tasks:
                self._tasks[job].cancel()

    async def _serve(self, job: Job) -> None:
        try:
            output = await self._computed(job)
        except ModelError as error:
            job.resolve(error)
        except Exception as error:  # vLLM's own checks: this request fails, the others go on
            job.resolve(failure_of(f"vLLM failed on a request of policy {job.request.policy!r}", _cause(error)))
        else:
            self._failures = 0
            self.stats.count(output)
            job.resolve(answer_of(job.request, output, self._versions[job.request.policy], self._tokenizer))

    async def _computed(self, job: Job) -> Any:
        """vLLM's ``RequestOutput`` for ``job``, from as many engines as it takes."""
        while True:
            while not self._open.is_set():
                await self._open.wait()
            if self._broken is not None:
                raise ModelError(self._broken)
            engine = self._engine
            try:
                return await self._compute(engine, job)
            except EngineLost:
                # in a task of its own: it goes on for the others if this job is given up
                await asyncio.shield(self._loop.create_task(self._recover(engine)))

    async def _compute(self, engine: RunningEngine | None, job: Job) -> Any:
        if engine is None or engine.gone:
            raise EngineLost
        if not self._computing:
            self._began = time.perf_counter()
        self._computing.add(job)
        self._idle.clear()
        try:
            return await engine.race(self._ask(engine, job))
        except TimeoutError:
            if not await engine.answers():
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

    async def _ask(self, engine: RunningEngine, job: Job) -> Any:
        prompt = {"type": "token", "prompt_token_ids": list(job.request.prompt_token_ids)}
        lora = None if job.adapter is None else job.adapter.request()
        # one output: that of the request's end
        outputs = engine.llm.generate(prompt, job.params, str(next(self._numbers)), lora_request=lora)
        return [output async for output in outputs][-1]

    # -- weights -------------------------------------------------------------------------------------------------------
    async def _change(self, update: Update) -> None:
        began = time.perf_counter()
        async with self._updates:
            self._open.clear()
            try:
                if not self._in_flight:
                    await self._idle.wait()
                async with self._exclusive:
                    await self._take(update)
            finally:
                self._open.set()
        self.stats.syncs += 1
        self.stats.sync_seconds += time.perf_counter() - began

    async def _take(self, update: Update) -> None:
        """Lay ``update`` out and hand it to the engine, or to a new one where this one is or gets lost."""
        if not self._computing:
            self._versions = {policy: known[-1:] for policy, known in self._versions.items()}
        if self._broken is not None:
            self._broken, self._failures = None, 0
        self._label += 1
        self._versions[update.policy].append((self._label, update.version))
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                await self._lay_out(update)
                await self._hand_in(update)
                return
            except EngineLost:
                await self._restart()  # with what is laid out
                if self._broken is None:
                    return
                failure = ModelError(self._broken)
                break
            except Exception as error:
                failure = error
        self._versions[update.policy].pop()
        self._end_process()
        self._broken = f"new weights for policy {update.policy!r} did not arrive whole ({failure}); send them again"
        raise ModelError(self._broken) from failure

    async def _lay_out(self, update: Update) -> None:
        if update.base:
            self._parcel = await asyncio.to_thread(self._transfer.send, update.base)
        if update.adapter is not None:
            await asyncio.to_thread(update.adapter.write, update.own)
            self._adapters[update.adapter.name] = update.adapter

    async def _hand_in(self, update: Update) -> None:
        engine = self._engine
        if engine is None or engine.gone:
            raise EngineLost
        core = engine.llm.engine_core
        await engine.control(core.pause_scheduler_async("keep", True))
        if update.base:
            await engine.control(engine.llm.collective_rpc("turnwise_reload", args=(self._parcel,)))
        if update.adapter is not None:
            await engine.control(engine.llm.add_lora(update.adapter.request(in_place=True)))
        await engine.control(engine.llm.update_weight_version(str(self._label)))
        await engine.control(core.resume_scheduler_async())

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

    async def _recover(self, lost: RunningEngine | None) -> None:
        """A new engine in place of ``lost``, unless somebody else has seen to that."""
        async with self._exclusive:
            if self._engine is lost and self._broken is None:
                await self._restart()

    async def _restart(self) -> None:
        """A new engine with the last weights; without success the host is broken, and says so."""
        failure: Exception | None = None
        while self._failures < self._limits.restarts:
            self._failures += 1
            self.stats.restarts += 1
            try:
                await self._launch()
                return
            except Exception as error:
                failure = error
        self._end_process()
        why = "" if failure is None else f": {type(failure).__name__}: {failure}"
        self._broken = f"the engine of {self._name} died, also after {self._failures} restarts in a row{why}"

    async def _launch(self) -> RunningEngine:
        self._end_process()
        engine = RunningEngine(lambda: self._start(self._report), self._limits.timeout)
        self.processes = engine.processes
        try:
            if self._parcel is not None:
                await engine.control(engine.llm.collective_rpc("turnwise_reload", args=(self._parcel,)))
            for adapter in self._adapters.values():
                await engine.control(engine.llm.add_lora(adapter.request()))
            await engine.control(engine.llm.update_weight_version(str(self._label)))
        except BaseException:
            engine.end()
            raise
        self._engine = engine  # not before: nothing may be sampled until its weights are in
        return engine

    def _end_process(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.end()

    def _report(self, scheduler: Any, iteration: Any) -> None:
        """vLLM's ``SchedulerStats`` and ``IterationStats`` of one step, ``None`` where there is nothing to tell."""
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
            self._end_process()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_default_executor()
        self._transfer.close()


def _cause(error: Exception) -> Exception:
    """vLLM wraps what went wrong in errors without a message."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error
