"""The vLLM client whose engines are child processes, which it replaces when they die."""

from __future__ import annotations

import asyncio
import tempfile
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from turnwise.inference.vllm.base import EngineSpec, VLLMClientBase, engine_specs, policies_by_name
from turnwise.inference.vllm.build import Setup, start_engine_process
from turnwise.inference.vllm.engine import PendingRequest
from turnwise.inference.vllm.process_host import EngineHost, HostLimits, WeightUpdate
from turnwise.inference.weights.sync import make_transfer
from turnwise.types import Tokenizer


class VLLMProcessClient(VLLMClientBase):
    """Completes prompts with vLLM in a child process per engine.

    Sampling and training don't share an interpreter. When an engine dies, a new one gets the last weights and
    recomputes lost requests from their seeds. Arguments and results are those of :class:`VLLMClient`, and:

    - ``timeout``: seconds for a request in the engine; a slower one raises ``ModelError``. If the engine then answers
      nothing for as long again, the client kills and replaces it. Each step of a weight update has the same time. A
      failed update is sent once more. If that fails too, the client serves nothing until a later one succeeds.
    - ``restarts``: the most starts in a row without an answer in between.
    - ``transfer``: the way weights travel: ``"shared_memory"``, ``"safetensors"`` (temporary files), or ``"auto"``,
      which takes shared memory if there is room. On GPUs also ``"ipc"``, if engine and trainer share one, and
      ``"nccl"``.

    The engines end with :meth:`close`, and on Linux with this process, however it ends. Ctrl-C doesn't reach them.

    Raises ``ImportError`` if vLLM is missing, ``ValueError`` for settings that it doesn't have, and ``RuntimeError`` if
    an engine doesn't start; standard error has the reason.

    Example::

        async with VLLMProcessClient(model, tokenizer, kv_cache_bytes=2**28, timeout=120) as client:
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
        timeout: float | None = 600.0,
        restarts: int = 3,
        transfer: str = "auto",
        engine_args: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, timeout, seed)
        if restarts < 0:
            raise ValueError(f"restarts={restarts!r}: expected at least 0")
        models = policies_by_name(policies)
        setup = Setup(max_num_seqs, kv_cache_bytes, engine_args or {})
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-vllm-")
        self._hosts: list[EngineHost] = []
        self._stop = weakref.finalize(self, _kill, self._hosts)
        limits = HostLimits(timeout, restarts)
        try:
            for spec in engine_specs(models, Path(self._folder.name)):
                settings = setup.settings(spec.folder, spec.dtype, spec.lora, spec.load_format)
                host = EngineHost(
                    partial(start_engine_process, settings),
                    spec.models,
                    tokenizer,
                    make_transfer(transfer),
                    limits,
                    in_flight,
                )
                self._hosts.append(host)
                self._begin(host, spec)
        except BaseException:
            self._end_all()
            raise

    def _begin(self, host: EngineHost, spec: EngineSpec) -> None:
        self._policies |= spec.policies(host, host.begin())
        if spec.weights is not None:
            self._put(next(iter(spec.models)), spec.weights, 0)
        for name in spec.adapters:
            self._put(name, spec.models[name].state_dict(), 0)

    def _start_timer(self, job: PendingRequest) -> None:
        """Start no timer. The host has one, which can tell a slow engine from a dead one."""

    def _add(self, engine: EngineHost, jobs: list[PendingRequest]) -> None:
        engine.add(jobs)

    def _abandon(self, engine: EngineHost, jobs: list[PendingRequest], timeouts: int) -> None:
        engine.abandon(jobs, timeouts)

    def _put(self, policy: str, sources: dict[str, Tensor], version: int) -> None:
        held = self._policies[policy]
        held.engine.put(
            WeightUpdate(
                policy,
                version,
                base={name: tensor for name, tensor in sources.items() if name in held.base},
                adapter=held.adapter if any(name in held.own for name in sources) else None,
                own={name: tensor for name, tensor in sources.items() if name in held.own},
            )
        )

    async def _end(self) -> None:
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
        if self._stop.detach() is not None:
            for host in self._hosts:
                host.close()
            self._folder.cleanup()


def _kill(hosts: list[EngineHost]) -> None:
    for host in hosts:
        host.kill()
