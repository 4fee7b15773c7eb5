"""The vLLM client: runs engines in this process, steps them in one thread, and loads new weights in place."""

from __future__ import annotations

import asyncio
import tempfile
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from turnwise.inference.vllm.base import EngineSpec, ServedPolicy, VLLMClientBase, engine_specs, policies_by_name
from turnwise.inference.vllm.build import Setup, start_engine
from turnwise.inference.vllm.engine import Engine, EngineThread, PendingRequest, WeightChange
from turnwise.inference.vllm.reload import reload
from turnwise.types import Tokenizer


class VLLMClient(VLLMClientBase):
    """Completes prompts with vLLM, in this process and on this machine's device.

    - ``policies``: one policy, named ``"default"``, or policies by name. A policy is a Hugging Face model, whose
      weights the client copies into an engine; a folder or hub name, which vLLM loads; or an :class:`AdaptedModel`.
      Every full policy has its own engine. Adapters over one base share an engine, which batches their requests.
    - ``max_num_seqs``: the most requests that one engine runs at once. They join at any time (continuous batching).
    - ``kv_cache_bytes``: memory per engine for keys and values. Prompts with equal beginnings share them.
    - ``in_flight``: loads new weights between two tokens. Running requests recompute their keys and values, and
      ``policy_versions`` tells which weights sampled which tokens. Else weights wait until nothing runs.
    - ``timeout``: seconds, including waiting, after which a request is cancelled and raises ``ModelError``.
    - ``engine_args``: further fields of vLLM's ``EngineArgs``.
    - ``seed``: source of the seeds for requests without one. A request's draws depend only on its own seed. The last
      bits of its logits depend on the rest of the batch.

    Log-probabilities are those of ``log_softmax(logits / temperature)``. vLLM can't report these for sampling with
    top-p or top-k, so the client refuses such requests.

    Raises ``ImportError`` if vLLM is missing, and ``ValueError`` for models and settings that it can't serve. On a CPU
    it turns ``torch.compile`` off for the whole process, because vLLM would compile its sampler for 10 seconds.

    Example::

        client = VLLMClient(model, tokenizer, kv_cache_bytes=2**28)
        [response] = await client.generate([ModelRequest([1, 17, 9], Sampling(max_tokens=8, seed=3))])
    """

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
        super().__init__(tokenizer, timeout, seed)
        models = policies_by_name(policies)
        setup = Setup(max_num_seqs, kv_cache_bytes, engine_args or {})
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-vllm-")
        self._thread = EngineThread()
        self._stop = weakref.finalize(self, self._thread.stop, wait=False)
        self._stop.atexit = False  # at exit, vLLM ends its engines itself
        try:
            for spec in engine_specs(models, Path(self._folder.name)):
                # Built in the thread that will step it, because vLLM and OpenMP keep state per thread.
                build = partial(self._build, spec, setup, in_flight)
                self._policies |= self._thread.call(build).result()
        except BaseException:
            self._thread.stop()
            raise

    # -- engines, in their thread --------------------------------------------------------------------------------------
    def _add(self, engine: Engine, jobs: list[PendingRequest]) -> None:
        self._thread.call(partial(engine.add, jobs))

    def _abandon(self, engine: Engine, jobs: list[PendingRequest], timeouts: int) -> None:
        self._thread.call(partial(engine.abandon, jobs, timeouts))

    def _put(self, policy: str, sources: dict[str, Tensor], version: int) -> None:
        held = self._policies[policy]
        change = WeightChange(policy, version, partial(_put, held, sources))
        self._thread.call(partial(held.engine.change, change)).result()
        change.done.result()

    async def _end(self) -> None:
        if self._stop.detach() is not None:
            await asyncio.to_thread(self._thread.stop)
            self._folder.cleanup()

    def _build(self, spec: EngineSpec, setup: Setup, in_flight: bool) -> dict[str, ServedPolicy]:
        """Start the engine of ``spec`` with its weights and adapters, and return its policies by name."""
        llm = start_engine(setup.settings(spec.folder, spec.dtype, spec.lora, spec.load_format))
        engine = Engine(llm, list(spec.models), self.tokenizer, in_flight)
        self._thread.engines.append(engine)
        if spec.weights is not None:
            reload(llm, spec.weights)
        policies = spec.policies(engine, llm.model_config.max_model_len)
        for name in spec.adapters:
            _put(policies[name], spec.models[name].state_dict())
        return policies


def _put(held: ServedPolicy, sources: Mapping[str, Tensor]) -> None:
    """Load checked weights into the engine: the base if it is among them, then the adapter."""
    if base := {name: tensor for name, tensor in sources.items() if name in held.base}:
        reload(held.engine.llm, base)
    if held.adapter is not None:
        held.adapter.write({name: tensor for name, tensor in sources.items() if name in held.own})
        held.engine.llm.add_lora(held.adapter.request(in_place=True))
