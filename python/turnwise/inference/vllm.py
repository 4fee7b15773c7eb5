"""The vLLM client: engines in this process, stepped in a thread of their own, that take new weights in place."""

from __future__ import annotations

import asyncio
import tempfile
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from turnwise.inference.vllm_build import Setup, start_engine
from turnwise.inference.vllm_client import EngineClient, Group, Policy, groups_of, named
from turnwise.inference.vllm_engine import Change, Engine, EngineThread, Job
from turnwise.inference.vllm_reload import reload
from turnwise.types import Tokenizer


class VLLMClient(EngineClient):
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
        models = named(policies)
        setup = Setup(max_num_seqs, kv_cache_bytes, engine_args or {})
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-vllm-")
        self._thread = EngineThread()
        self._stop = weakref.finalize(self, self._thread.stop, wait=False)
        self._stop.atexit = False  # then vLLM ends its engines itself
        try:
            for group in groups_of(models, Path(self._folder.name)):
                # in the thread that will step it: vLLM and OpenMP keep state by thread
                build = partial(self._build, group, setup, in_flight)
                self._policies |= self._thread.call(build).result()
        except BaseException:
            self._thread.stop()
            raise

    # -- engines, in their thread --------------------------------------------------------------------------------------
    def _add(self, engine: Engine, jobs: list[Job]) -> None:
        self._thread.call(partial(engine.add, jobs))

    def _abandon(self, engine: Engine, jobs: list[Job], timeouts: int) -> None:
        self._thread.call(partial(engine.abandon, jobs, timeouts))

    def _put(self, policy: str, sources: dict[str, Tensor], version: int) -> None:
        held = self._policies[policy]
        change = Change(policy, version, partial(_put, held, sources))
        self._thread.call(partial(held.engine.change, change)).result()
        change.done.result()

    async def _end(self) -> None:
        if self._stop.detach() is not None:
            await asyncio.to_thread(self._thread.stop)
            self._folder.cleanup()

    def _build(self, group: Group, setup: Setup, in_flight: bool) -> dict[str, Policy]:
        """One engine for ``group``."""
        llm = start_engine(setup.settings(group.folder, group.dtype, group.lora, group.load_format))
        engine = Engine(llm, list(group.models), self.tokenizer, in_flight)
        self._thread.engines.append(engine)
        if group.weights is not None:
            reload(llm, group.weights)
        policies = group.policies(engine, llm.model_config.max_model_len)
        for name in group.adapters:
            _put(policies[name], group.models[name].state_dict())
        return policies


def _put(held: Policy, sources: Mapping[str, Tensor]) -> None:
    """Checked weights into the engine: the base if it is among them, then the adapter."""
    if base := {name: tensor for name, tensor in sources.items() if name in held.base}:
        reload(held.engine.llm, base)
    if held.adapter is not None:
        held.adapter.write({name: tensor for name, tensor in sources.items() if name in held.own})
        held.engine.llm.add_lora(held.adapter.request(in_place=True))
