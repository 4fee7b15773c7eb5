"""Base of the clients that run vLLM engines themselves: requests, policies and weight updates.

An engine serves one base model and the adapters over it. Subclasses pass it three kinds of calls, from any thread: add
requests, abandon requests, and load new weights.
"""

from __future__ import annotations

import asyncio
import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.inference.common.base import (
    ClientBase,
    check_sampling_by_vllm,
    completion_limit,
    gather_all,
    policy_of,
    stop_token_ids,
)
from turnwise.inference.vllm.engine import PendingRequest
from turnwise.inference.vllm.lora import Adapter, full_weights, largest_rank, shapes_of
from turnwise.inference.vllm.stats import max_peaks, sum_stats
from turnwise.inference.weights.load import check_weights, collect_weights
from turnwise.inference.weights.lora import AdaptedModel
from turnwise.types import ModelError, ModelRequest, ModelResponse, Tokenizer


@dataclass(slots=True)
class ServedPolicy:
    """A policy as its client knows it."""

    engine: Any
    context_length: int
    vocabulary: int
    base: dict[str, Tensor]
    """Shapes that the weights of the full model must have."""

    own: dict[str, Tensor] = field(default_factory=dict)
    """Shapes that the adapter's weights must have; empty for a full model."""

    adapter: Adapter | None = None
    version: int = 0


class VLLMClientBase(ClientBase):
    """A client whose engines run in this or in child processes; subclasses fill ``self._policies``."""

    shares_weights = False

    def __init__(self, tokenizer: Tokenizer, timeout: float | None, seed: int) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout={timeout!r}: expected seconds > 0, or None")
        self.tokenizer = tokenizer
        self._timeout = timeout
        self._seeds = np.random.default_rng(seed)
        self._paused = self._closed = False
        self._held: list[PendingRequest] = []
        self._running: set[PendingRequest] = set()
        self._policies: dict[str, ServedPolicy] = {}

    # -- where the engines are -----------------------------------------------------------------------------------------
    @abstractmethod
    def _add(self, engine: Any, jobs: list[PendingRequest]) -> None:
        """Let ``engine`` compute ``jobs``, and resolve each."""

    @abstractmethod
    def _abandon(self, engine: Any, jobs: list[PendingRequest], timeouts: int) -> None:
        """Cancel ``jobs``; ``timeouts`` is the number of them that timed out."""

    @abstractmethod
    def _put(self, policy: str, sources: dict[str, Tensor], version: int) -> None:
        """Load checked weights into the engine of ``policy``, and return once they are loaded."""

    @abstractmethod
    async def _end(self) -> None:
        """Free the engines. May be called again."""

    # -- the client protocol -------------------------------------------------------------------------------------------
    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return one response per request, in order.

        Raises ``ValueError`` for an unknown policy, an empty prompt or sampling that vLLM can't report on, and
        ``ContextLengthError`` for a prompt that leaves no room for a token. Raises ``ModelError`` if the engine fails,
        a request takes longer than the timeout, or the client is closed. The engine keeps serving after a failed batch.
        """
        if self._closed:
            raise ModelError("the client is closed")
        jobs = [self._job(request) for request in requests]
        (self._hold if self._paused else self._submit)(jobs)
        try:
            return await gather_all(job.future for job in jobs)
        finally:
            self._give_up([job for job in jobs if not job.future.done() or job.future.cancelled()])
            self._running.difference_update(jobs)
            for job in jobs:
                if job.timer is not None:
                    job.timer.cancel()

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Copy ``weights`` (pairs of name and tensor, named as in the model's ``state_dict``) into ``policy``.

        Waits until nothing runs, or with ``in_flight`` only for the current token. The policy of an adapter takes the
        adapter's weights, with or without the whole shared base. All names and shapes are checked before anything is
        copied. If vLLM fails on the weights, the policies of this engine serve no request until a later call succeeds.
        """
        held = policy_of(self._policies, policy)
        if self._closed:
            raise ModelError("the client is closed")
        sources = collect_weights(weights, policy)
        with_base = held.adapter is None or any(name in held.base for name in sources)
        check_weights(sources, held.own | (held.base if with_base else {}), policy)
        self._put(policy, sources, version)
        held.version = version

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return policy_of(self._policies, policy).version

    async def pause(self) -> None:
        """Hold back new requests, and return once nothing runs. Requests wait until :meth:`resume`."""
        self._paused = True
        loop = asyncio.get_running_loop()
        if running := [job.future for job in self._running if job.future.get_loop() is loop]:
            await asyncio.wait(running)

    async def resume(self) -> None:
        """Let waiting requests run."""
        self._paused = False
        held, self._held = self._held, []
        self._submit([job for job in held if not job.abandoned])

    async def close(self) -> None:
        """Fail all waiting and running requests, and free the engines. May be called again."""
        self._closed = True
        for job in self._held:
            job.resolve(ModelError("the client was closed before this request ran"))
        self._held.clear()
        await self._end()

    def stats(self) -> dict[str, float]:
        """Totals over all engines, by the names of :class:`~turnwise.inference.vllm.stats.EngineStats`."""
        return sum_stats(engine.stats for engine in self._engines())

    def peaks(self) -> dict[str, float]:
        """The largest peaks since the last call, by names of :class:`~turnwise.inference.vllm.stats.EnginePeaks`."""
        return max_peaks(engine.peaks() for engine in self._engines())

    def _engines(self) -> list[Any]:
        return list({id(policy.engine): policy.engine for policy in self._policies.values()}.values())

    # -- requests ------------------------------------------------------------------------------------------------------
    def _job(self, request: ModelRequest) -> PendingRequest:
        held = policy_of(self._policies, request.policy)
        params = self._params(request, completion_limit(request, held.vocabulary, held.context_length))
        return PendingRequest(request, params, held.adapter, asyncio.get_running_loop().create_future())

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
            seed=seed & (2**63 - 1),  # torch's generators take 63 bits; vLLM reads -1 as no seed
            logprobs=0,  # only that of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _hold(self, jobs: list[PendingRequest]) -> None:
        loop = asyncio.get_running_loop()
        # Drop requests whose event loop has ended.
        self._held = [job for job in self._held if job.future.get_loop() is loop] + jobs

    def _submit(self, jobs: list[PendingRequest]) -> None:
        self._running.update(jobs)
        for engine, mine in self._by_engine(jobs):
            self._add(engine, mine)
        for job in jobs:
            self._start_timer(job)

    def _start_timer(self, job: PendingRequest) -> None:
        if self._timeout is not None:
            job.timer = job.future.get_loop().call_later(self._timeout, self._expire, job)

    def _expire(self, job: PendingRequest) -> None:
        if not job.future.done():
            message = f"a request of policy {job.request.policy!r} took longer than timeout={self._timeout} s"
            job.resolve(ModelError(message))
            self._give_up([job], timeouts=1)

    def _give_up(self, jobs: list[PendingRequest], timeouts: int = 0) -> None:
        for job in jobs:
            job.abandoned = True
        for engine, mine in self._by_engine(jobs):
            self._abandon(engine, mine, timeouts)

    def _by_engine(self, jobs: list[PendingRequest]) -> list[tuple[Any, list[PendingRequest]]]:
        grouped: dict[int, tuple[Any, list[PendingRequest]]] = {}
        for job in jobs:
            engine = self._policies[job.request.policy].engine
            grouped.setdefault(id(engine), (engine, []))[1].append(job)
        return list(grouped.values())


# -- what one engine serves --------------------------------------------------------------------------------------------
@dataclass(slots=True)
class EngineSpec:
    """An engine to start: the models of policies that share one base."""

    models: dict[str, Any]
    base: dict[str, Tensor]
    config: Any
    folder: Path
    """Holds the base's configuration, and its weights if ``weights`` is ``None``."""

    weights: dict[str, Tensor] | None
    adapters: dict[str, Adapter]

    @property
    def dtype(self) -> torch.dtype:
        return next(tensor.dtype for tensor in self.base.values() if tensor.is_floating_point())

    @property
    def load_format(self) -> str:
        return "auto" if self.weights is None else "dummy"

    @property
    def lora(self) -> dict[str, Any]:
        """The fields of vLLM's ``EngineArgs`` that the adapters need."""
        if not self.adapters:
            return {}
        rank = largest_rank(adapter.config.r for adapter in self.adapters.values())
        # vLLM's CPU kernels apply the adapter in the last slot to rows without an adapter, so that slot stays empty.
        slots = len(self.adapters) + (len(self.adapters) < len(self.models))
        return {"enable_lora": True, "max_loras": slots, "max_lora_rank": rank}

    def policies(self, engine: Any, context_length: int) -> dict[str, ServedPolicy]:
        """The policies by name. The engine doesn't have their adapters' weights yet."""
        policies = {}
        for name, model in self.models.items():
            policies[name] = ServedPolicy(engine, context_length, self.config.vocab_size, self.base)
            if name in self.adapters:
                policies[name].own = shapes_of(model.state_dict())
                policies[name].adapter = self.adapters[name]
        return policies


def policies_by_name(policies: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Policies by name. A single one is named ``"default"``."""
    models = dict(policies) if isinstance(policies, Mapping) else {"default": policies}
    if not models:
        raise ValueError("policies is empty: expected at least one model")
    return models


def engine_specs(models: Mapping[str, Any], folder: Path) -> list[EngineSpec]:
    """Describe one engine for each base among ``models``, each with its own folder under ``folder``."""
    shared: dict[int, dict[str, Any]] = {}
    for number, (name, model) in enumerate(models.items()):
        key = id(model.shared) if isinstance(model, AdaptedModel) else -1 - number
        shared.setdefault(key, {})[name] = model
    return [_engine_spec(spec, folder / str(number)) for number, spec in enumerate(shared.values())]


def _engine_spec(models: dict[str, Any], place: Path) -> EngineSpec:
    adapters = {
        name: Adapter(name, number, place / f"adapter{number}", model.shared.configs[model.name])
        for number, (name, model) in enumerate(models.items(), start=1)
        if isinstance(model, AdaptedModel) and model.name is not None
    }
    return EngineSpec(models, *_describe(next(iter(models.values())), place), adapters)


def _describe(model: Any, place: Path) -> tuple[dict[str, Tensor], Any, Path, dict[str, Tensor] | None]:
    """The shapes of a model's weights, its config, a folder for vLLM, and its weights if the folder has none."""
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
