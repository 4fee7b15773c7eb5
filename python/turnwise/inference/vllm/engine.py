"""One vLLM engine with its requests, and the thread that steps it.

Everything in :class:`Engine` runs in the :class:`EngineThread`, between two steps. Only there does it add and cancel
requests and change weights, so it needs no lock.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from turnwise.inference.common.base import cut_at_stop
from turnwise.inference.vllm.build import end_engine
from turnwise.inference.vllm.lora import Adapter
from turnwise.inference.vllm.stats import EnginePeaks, EngineStats, SchedulerWatch
from turnwise.types import ModelError, ModelRequest, ModelResponse, PolicyVersions, Tokenizer


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One unanswered request. The event loop of ``future`` sets ``abandoned``, and other threads read it. ``timer``
    ends the request when its time is over."""

    request: ModelRequest
    params: Any
    adapter: Adapter | None
    future: asyncio.Future[ModelResponse]
    abandoned: bool = False
    timer: asyncio.TimerHandle | None = None

    def resolve(self, result: ModelResponse | Exception) -> None:
        """Answer from any thread. If the event loop has ended, there is no caller to answer."""
        loop = self.future.get_loop()
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._set, result)
            except RuntimeError:
                self.abandoned = True  # the loop was closed after the check above

    def _set(self, result: ModelResponse | Exception) -> None:
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


@dataclass(slots=True)
class WeightChange:
    """New weights for ``policy``. The engine calls ``apply`` between two steps; the caller waits for ``done``."""

    policy: str
    version: int
    apply: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


class Engine:
    """An ``llm`` (a vLLM ``LLMEngine``) with its requests. It serves ``policies``, which start at version 0.

    With ``in_flight`` it loads new weights between two tokens of running requests. It then recomputes their keys and
    values, so each token has the log-probability of its own weights. Else weights wait until nothing runs.
    """

    def __init__(self, llm: Any, policies: Sequence[str], tokenizer: Tokenizer, in_flight: bool) -> None:
        self.llm = llm
        self.stats = EngineStats()
        self.watch = SchedulerWatch(llm.engine_core.engine_core.scheduler, self.stats)
        self._tokenizer, self._in_flight = tokenizer, in_flight
        self._name = ", ".join(map(repr, policies))
        self._jobs: dict[str, PendingRequest] = {}
        self._waiting: deque[PendingRequest] = deque()
        self._changes: deque[WeightChange] = deque()
        self._numbers = itertools.count()
        # vLLM labels tokens with one number per engine; here it counts the weight changes. Each policy keeps pairs of
        # (label, version), as far back as running requests need them.
        self._label = 0
        self._versions: dict[str, list[tuple[int, int]]] = {policy: [(0, 0)] for policy in policies}
        self._unusable: str | None = None
        llm.set_weight_version("0")

    # -- from outside, through the thread ------------------------------------------------------------------------------
    def add(self, jobs: Sequence[PendingRequest]) -> None:
        self._waiting.extend(jobs)

    def abandon(self, jobs: Sequence[PendingRequest], timeouts: int = 0) -> None:
        """Cancel ``jobs``; ``timeouts`` is the number of them that timed out."""
        self.stats.timeouts += timeouts
        gone = {id(job) for job in jobs}
        numbers = [number for number, job in self._jobs.items() if id(job) in gone]
        for number in numbers:
            del self._jobs[number]
        if numbers:
            self.llm.abort_request(numbers)

    def change(self, change: WeightChange) -> None:
        self._changes.append(change)

    def close(self) -> None:
        """Fail all requests and free the engine."""
        closed = ModelError("the client was closed before this request was done")
        for job in [*self._jobs.values(), *self._waiting]:
            job.resolve(_fresh_copy(closed))
        for change in self._changes:
            change.done.set_exception(_fresh_copy(closed))
        end_engine(self.llm)

    def peaks(self) -> EnginePeaks:
        """Return the peaks since the last call."""
        return self.watch.take()

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._waiting or self._changes)

    def step(self) -> None:
        """Apply weight changes, admit waiting requests, and compute one token of each running request."""
        while self._changes and (self._in_flight or not self._jobs):
            self._apply(self._changes.popleft())
        if not self._changes:
            self._admit()
        if not self._jobs:
            return
        began = time.perf_counter()
        try:
            for output in self.llm.step():
                if output.finished and (job := self._jobs.get(output.request_id)) is not None:
                    self._answer(job, output)
                    del self._jobs[output.request_id]
        except Exception as error:
            self._fail(model_error(f"vLLM failed on a batch of {len(self._jobs)}", error))
        self.stats.steps += 1
        self.stats.seconds += time.perf_counter() - began

    # -- requests ------------------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            if job.abandoned:
                continue
            if self._unusable is not None:
                job.resolve(ModelError(self._unusable))
                continue
            number = str(next(self._numbers))
            prompt = {"type": "token", "prompt_token_ids": list(job.request.prompt_token_ids)}
            lora = None if job.adapter is None else job.adapter.request()
            try:
                self.llm.add_request(number, prompt, job.params, lora_request=lora)
            except Exception as error:  # vLLM's own checks failed; only this request ends
                job.resolve(model_error(f"vLLM refused a request of policy {job.request.policy!r}", error))
                continue
            self._jobs[number] = job

    def _answer(self, job: PendingRequest, output: Any) -> None:
        self.stats.count(output)
        job.resolve(to_response(job.request, output, self._versions[job.request.policy], self._tokenizer))

    def _fail(self, error: ModelError) -> None:
        """Fail all running requests and empty the engine, which then keeps serving unless emptying fails."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.resolve(_fresh_copy(error))
        try:
            self.llm.abort_request(list(jobs))
            self._clear_cache()
        except Exception as second:
            self._unusable = f"the engine of {self._name} is dead: {error}; emptying it failed too: {second}"

    def _clear_cache(self) -> None:
        """Drop all keys and values. Running requests recompute theirs."""
        if not self.llm.reset_prefix_cache(True):
            raise RuntimeError("vLLM kept its prefix cache")

    # -- weights -------------------------------------------------------------------------------------------------------
    def _apply(self, change: WeightChange) -> None:
        began = time.perf_counter()
        try:
            change.apply()
            self._clear_cache()
        except Exception as error:
            self._unusable = f"new weights for policy {change.policy!r} did not arrive whole ({error}); send them again"
            self._fail(ModelError(self._unusable))
            change.done.set_exception(error)
            return
        # A successful change repairs an unusable engine. Old labels can go when no running request needs them.
        self._unusable = None
        self._label += 1
        self.llm.set_weight_version(str(self._label))
        if not self._jobs:
            self._versions = {policy: known[-1:] for policy, known in self._versions.items()}
        self._versions[change.policy].append((self._label, change.version))
        self.stats.syncs += 1
        self.stats.sync_seconds += time.perf_counter() - began
        change.done.set_result(None)


class EngineThread:
    """Steps engines in its own thread while they have work. Callers give it functions to run between steps.

    One thread serves all engines of a client, because they share the machine, and because vLLM keeps global state that
    two threads would overwrite.
    """

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held to add a call and to end, so that no call is added after the last check
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="turnwise-vllm", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function`` between two steps. Once the thread has ended, the future holds a ``ModelError``."""
        done: Future[Any] = Future()
        with self._lock:
            if self._ended:
                done.set_exception(ModelError("the engine's thread has ended"))
            else:
                self._calls.put((function, done))
        return done

    def stop(self, wait: bool = True) -> None:
        """Close the engines and end the thread. The garbage collector must not ``wait``, as it may hold a lock that the
        thread needs."""
        self._calls.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_calls():
                for engine in self.engines:
                    if engine.busy:
                        engine.step()
        finally:
            self._end()

    def _end(self) -> None:
        """Fail all waiting calls and requests, also after an unexpected error in a step."""
        with self._lock:
            self._ended = True
        while not self._calls.empty():
            if (item := self._calls.get()) is not None:
                item[1].set_exception(ModelError("the engine's thread has ended"))
        for engine in self.engines:
            engine.close()
        self.engines.clear()

    def _take_calls(self) -> bool:
        """Run the calls that were added, and sleep while there is nothing to do. False when it is time to stop."""
        while True:
            try:
                item = self._calls.get(block=not any(engine.busy for engine in self.engines))
            except queue.Empty:
                return True
            if item is None:
                return False
            function, done = item
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)
            del item, function, done  # or the thread would keep them alive while it sleeps


def model_error(what: str, error: Exception) -> ModelError:
    failure = ModelError(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _fresh_copy(error: ModelError) -> ModelError:
    """Make a new exception for each caller. A shared one would collect the tracebacks of all."""
    fresh = ModelError(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


# -- answers -----------------------------------------------------------------------------------------------------------
def to_response(
    request: ModelRequest, output: Any, versions: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> ModelResponse | ModelError:
    """Convert vLLM's ``output`` (a ``RequestOutput``) to a response. ``versions`` are its policy's, by first label."""
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        return ModelError(f"vLLM ended a request of policy {request.policy!r}: {completion.finish_reason}")
    ids = list(completion.token_ids)
    response = ModelResponse(
        text=tokenizer.decode(ids, skip_special_tokens=True),
        completion_token_ids=ids,
        logprobs=[at[token].logprob for at, token in zip(completion.logprobs, ids, strict=True)],
        finish_reason=completion.finish_reason,
        policy_versions=_version_runs(completion.weight_versions, versions),
        prompt_token_ids=list(request.prompt_token_ids),
    )
    return cut_at_stop(response, request.sampling, tokenizer)


def _version_runs(spans: Any, versions: Sequence[tuple[int, int]]) -> PolicyVersions:
    """Convert vLLM's spans of labels to runs of a policy's versions. Changes of other policies don't split a run."""
    runs: PolicyVersions = []
    for span in spans:
        label, count = int(span.version), span.end - span.start
        version = next(version for since, version in reversed(versions) if since <= label)
        if runs and runs[-1][1] == version:
            count += runs.pop()[0]
        if count:
            runs.append((count, version))
    return runs
