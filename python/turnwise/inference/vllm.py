"""The vLLM client: engines in this process, stepped in a thread of their own, that take new weights in place."""

from __future__ import annotations

import asyncio
import copy
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.inference.adapters import AdaptedModel
from turnwise.inference.requests import check_sampling_by_vllm, completion_limit, stop_token_ids
from turnwise.inference.vllm_build import check_engine_args, start_engine, vllm_or_raise
from turnwise.inference.vllm_engine import Change, Engine, EngineThread, Job
from turnwise.inference.vllm_stats import largest, total
from turnwise.inference.vllm_weights import Adapter, full_weights, largest_rank, reload, shapes_of
from turnwise.inference.weights import check_weights, collect_weights
from turnwise.types import ModelError, ModelRequest, ModelResponse, Tokenizer


@dataclass(slots=True)
class _Policy:
    """``base`` and ``own`` are the shapes that its weights must have; ``own`` is empty for what is no adapter."""

    engine: Engine
    context_length: int
    vocabulary: int
    base: dict[str, Tensor]
    own: dict[str, Tensor] = field(default_factory=dict)
    adapter: Adapter | None = None
    version: int = 0


class VLLMClient:
    """Completes prompts with vLLM, in this process and on this machine's device.

    ``policies`` is one policy, then called ``"default"``, or a mapping of names to policies. A policy is a Hugging Face
    model, whose weights are copied into an engine; a folder or hub name, which vLLM loads; or an
    :class:`~turnwise.inference.adapters.AdaptedModel`. Every full policy has an engine of its own; the adapters over
    one base share one, which computes requests of several adapters in one batch.

    Requests join what runs at any time (continuous batching), ``max_num_seqs`` at most per engine, and prompts share
    the keys and values of their equal beginnings. ``kv_cache_bytes`` is the memory for them, per engine.
    ``engine_args`` are further fields of vLLM's ``EngineArgs``. A request that takes longer than ``timeout`` seconds,
    its wait for others among them, is given up and raises ``ModelError``. A request's draws depend on its own seed
    alone; its logits differ in their last bits with what else is in the batch. Requests without a seed get one each,
    drawn by ``seed``.

    New weights come through :meth:`load_weights` and wait until nothing runs, unless ``in_flight``: then they land
    between two tokens, what runs goes on with its keys and values computed anew, and ``policy_versions`` tells which
    tokens came from which weights.

    Log-probabilities are those of ``log_softmax(logits / temperature)``. As vLLM can't tell these where it samples by
    top-p or top-k, requests that ask for those are refused.

    Raises ``ImportError`` where vLLM is missing, and ``ValueError`` for models and settings that it can't serve. On a
    CPU it turns ``torch.compile`` off for the whole process, which vLLM's sampler would spend 10 seconds on.

    Example::

        client = VLLMClient(model, tokenizer, kv_cache_bytes=2**28)
        [response] = await client.generate([ModelRequest([1, 17, 9], Sampling(max_tokens=8, seed=3))])
    """

    shares_weights = False

    def __init__(
        self,
        policies: Mapping[str, nn.Module | str | Path] | nn.Module | str | Path,
        tokenizer: Tokenizer,
        *,
        max_num_seqs: int = 256,
        kv_cache_bytes: int = 2**30,
        in_flight: bool = False,
        timeout: float | None = None,
        engine_args: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("kv_cache_bytes", kv_cache_bytes)):
            if value < 1:
                raise ValueError(f"{name}={value!r}: expected at least 1")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout={timeout!r}: expected seconds > 0, or None")
        models = dict(policies) if isinstance(policies, Mapping) else {"default": policies}
        if not models:
            raise ValueError("policies is empty: expected at least one model")
        vllm_or_raise()
        check_engine_args(engine_args or {})
        self.tokenizer = tokenizer
        self._seeds = np.random.default_rng(seed)
        self._timeout = timeout
        self._paused = self._closed = False
        self._held: list[Job] = []
        self._running: set[Job] = set()
        self._policies: dict[str, _Policy] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-vllm-")
        self._thread = EngineThread()
        self._stop = weakref.finalize(self, self._thread.stop, wait=False)
        self._stop.atexit = False  # then vLLM ends its engines itself
        start = partial(
            start_engine, max_num_seqs=max_num_seqs, kv_cache_bytes=kv_cache_bytes, engine_args=engine_args or {}
        )
        try:
            for group in _sharing(models).values():
                # in the thread that will step it: vLLM and OpenMP keep state by thread
                build = partial(self._build, group, start, in_flight)
                self._policies |= self._thread.call(build).result()
        except BaseException:
            self._thread.stop()
            raise

    # -- the client protocol -------------------------------------------------------------------------------------------
    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """One response per request, in order.

        Raises ``ValueError`` for an unknown policy, an empty prompt or sampling that vLLM can't report on,
        ``ContextLengthError`` for a prompt that leaves no room for a token, and ``ModelError`` if the engine fails, a
        request takes longer than the timeout, or the client is closed. After a failed batch the engine serves on.
        """
        if self._closed:
            raise ModelError("the client is closed")
        jobs = [self._job(request) for request in requests]
        (self._hold if self._paused else self._submit)(jobs)
        try:
            results = await asyncio.gather(*(job.future for job in jobs), return_exceptions=True)
        finally:
            self._give_up([job for job in jobs if not job.future.done() or job.future.cancelled()])
            self._running.difference_update(jobs)
            for job in jobs:
                if job.timer is not None:
                    job.timer.cancel()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]  # exceptions were raised above

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Copy ``weights`` (pairs of name and tensor, as the model's ``state_dict`` has them) into ``policy``.

        Waits until nothing runs, or with ``in_flight`` for the token that is computed. An adapter's policy takes its
        adapter alone, or with it the whole shared base. Names and shapes are checked before a byte moves. If vLLM fails
        on them, its policies serve no request until a later call succeeds.
        """
        held = self._policy(policy)
        if self._closed:
            raise ModelError("the client is closed")
        sources = collect_weights(weights, policy)
        with_base = held.adapter is None or any(name in held.base for name in sources)
        check_weights(sources, held.own | (held.base if with_base else {}), policy)
        change = Change(policy, version, partial(_put, held, sources))
        self._thread.call(partial(held.engine.change, change)).result()
        change.done.result()
        held.version = version

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return self._policy(policy).version

    async def pause(self) -> None:
        """Hold back new requests; returns once nothing runs. Requests wait until :meth:`resume`."""
        self._paused = True
        loop = asyncio.get_running_loop()
        if running := [job.future for job in self._running if job.future.get_loop() is loop]:
            await asyncio.wait(running)

    async def resume(self) -> None:
        """Let waiting requests go on."""
        self._paused = False
        held, self._held = self._held, []
        self._submit([job for job in held if not job.abandoned])

    async def close(self) -> None:
        """Fail what waits and what runs, and free the engines. May be called again."""
        self._closed = True
        for job in self._held:
            job.resolve(ModelError("the client was closed before this request ran"))
        self._held.clear()
        if self._stop.detach() is not None:
            await asyncio.to_thread(self._thread.stop)
            self._folder.cleanup()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def stats(self) -> dict[str, float]:
        """Totals over all engines, by the names of :class:`~turnwise.inference.vllm_stats.Stats`."""
        return total(engine.stats for engine in self._engines())

    def peaks(self) -> dict[str, float]:
        """The most in any engine since the call before: :class:`~turnwise.inference.vllm_stats.Peaks` by name."""
        return largest(engine.watch.take() for engine in self._engines())

    def _engines(self) -> list[Engine]:
        return list({id(policy.engine): policy.engine for policy in self._policies.values()}.values())

    # -- requests ------------------------------------------------------------------------------------------------------
    def _policy(self, name: str) -> _Policy:
        if name not in self._policies:
            raise ValueError(f"policy={name!r}: expected one of {sorted(self._policies)}")
        return self._policies[name]

    def _job(self, request: ModelRequest) -> Job:
        held = self._policy(request.policy)
        params = self._params(request, completion_limit(request, held.vocabulary, held.context_length))
        return Job(request, params, held.adapter, asyncio.get_running_loop().create_future())

    def _params(self, request: ModelRequest, limit: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        check_sampling_by_vllm(sampling)
        seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed
        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=limit,
            stop_token_ids=list(stop_token_ids(request, self.tokenizer)),
            seed=seed & (2**63 - 1),  # torch's generators take 63 bits; -1 would mean none to vLLM
            logprobs=0,  # the sampled token's alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _hold(self, jobs: list[Job]) -> None:
        loop = asyncio.get_running_loop()
        # an event loop that was left behind has left those that waited in it
        self._held = [job for job in self._held if job.future.get_loop() is loop] + jobs

    def _submit(self, jobs: list[Job]) -> None:
        self._running.update(jobs)
        for engine, mine in self._by_engine(jobs):
            self._thread.call(partial(engine.add, mine))
        if self._timeout is not None:
            for job in jobs:
                job.timer = job.future.get_loop().call_later(self._timeout, self._expire, job)

    def _expire(self, job: Job) -> None:
        if not job.future.done():
            message = f"a request of policy {job.request.policy!r} took longer than timeout={self._timeout} s"
            job.resolve(ModelError(message))
            self._give_up([job], timeouts=1)

    def _give_up(self, jobs: list[Job], timeouts: int = 0) -> None:
        for job in jobs:
            job.abandoned = True
        for engine, mine in self._by_engine(jobs):
            self._thread.call(partial(engine.abandon, mine, timeouts))

    def _by_engine(self, jobs: list[Job]) -> list[tuple[Engine, list[Job]]]:
        grouped: dict[int, tuple[Engine, list[Job]]] = {}
        for job in jobs:
            engine = self._policies[job.request.policy].engine
            grouped.setdefault(id(engine), (engine, []))[1].append(job)
        return list(grouped.values())

    # -- engines, in their thread --------------------------------------------------------------------------------------
    def _build(self, models: Mapping[str, Any], start: Any, in_flight: bool) -> dict[str, _Policy]:
        """One engine for ``models``, which share their base."""
        place = Path(self._folder.name) / str(len(self._thread.engines))
        model = next(iter(models.values()))
        base, config, folder, weights = _describe(model, place)
        adapters = {
            name: Adapter(name, number, place / f"adapter{number}", adapted.shared.configs[adapted.name])
            for number, (name, adapted) in enumerate(models.items(), start=1)
            if isinstance(adapted, AdaptedModel) and adapted.name is not None
        }
        lora: dict[str, Any] = {}
        if adapters:
            rank = largest_rank(adapter.config.r for adapter in adapters.values())
            # vLLM's CPU kernels give rows without an adapter the one in the last place, so that one is left empty
            slots = len(adapters) + (len(adapters) < len(models))
            lora = {"enable_lora": True, "max_loras": slots, "max_lora_rank": rank}
        dtype = next(tensor.dtype for tensor in base.values() if tensor.is_floating_point())
        llm = start(folder, dtype, lora=lora, load_format="auto" if weights is None else "dummy")
        engine = Engine(llm, list(models), self.tokenizer, in_flight)
        self._thread.engines.append(engine)
        if weights is not None:
            reload(llm, weights)
        policies = {}
        for name, adapted in models.items():
            policies[name] = _Policy(engine, llm.model_config.max_model_len, config.vocab_size, base)
            if name in adapters:
                policies[name].own = shapes_of(adapted.state_dict())
                policies[name].adapter = adapters[name]
                _put(policies[name], adapted.state_dict())
        return policies


def _sharing(models: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """``models`` put together where they stand on one base."""
    groups: dict[int, dict[str, Any]] = {}
    for number, (name, model) in enumerate(models.items()):
        key = id(model.shared) if isinstance(model, AdaptedModel) else -1 - number
        groups.setdefault(key, {})[name] = model
    return groups


def _describe(model: Any, place: Path) -> tuple[dict[str, Tensor], Any, Path, dict[str, Tensor] | None]:
    """The shapes of a model's weights, its config, a folder for vLLM, and its weights where the folder has none."""
    if isinstance(model, nn.Module):
        weights = full_weights(model)
        plain: Any = model.shared.model if isinstance(model, AdaptedModel) else model
        config = copy.deepcopy(plain.config)
        config.architectures = [type(plain).__name__]  # vLLM chooses its own class by this name
        config.save_pretrained(place)
        return shapes_of(weights), config.get_text_config(), place, weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    return dict(empty.state_dict(keep_vars=True)), config.get_text_config(), Path(model), None


def _put(held: _Policy, sources: Mapping[str, Tensor]) -> None:
    """Checked weights into the engine: the base if it is among them, then the adapter."""
    if base := {name: tensor for name, tensor in sources.items() if name in held.base}:
        reload(held.engine.llm, base)
    if held.adapter is not None:
        held.adapter.write({name: tensor for name, tensor in sources.items() if name in held.own})
        held.engine.llm.add_lora(held.adapter.request(in_place=True))
