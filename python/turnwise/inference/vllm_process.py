"""The vLLM client whose engines are processes of their own, which may die."""

from __future__ import annotations

import asyncio
import tempfile
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from turnwise.inference.transfer import make_transfer
from turnwise.inference.vllm_build import Setup, start_process
from turnwise.inference.vllm_client import EngineClient, Group, groups_of, named
from turnwise.inference.vllm_engine import Job
from turnwise.inference.vllm_host import EngineHost, Limits, Update
from turnwise.types import Tokenizer


class VLLMProcessClient(EngineClient):
    """Completes prompts with vLLM in a process per engine, beside the trainer's.

    ``policies``, ``max_num_seqs``, ``kv_cache_bytes``, ``in_flight``, ``engine_args``, ``seed`` and what it gives are
    those of :class:`~turnwise.inference.vllm.VLLMClient`. Sampling and training don't take turns in one interpreter
    here, and an engine that dies takes nothing with it: a new one is started, gets the last weights again, and what
    was lost is computed anew from its seeds, at most ``restarts`` times in a row without an answer in between.

    A request that takes longer than ``timeout`` seconds in the engine raises ``ModelError``, unless the engine then
    answers nothing at all for as long again: that one is killed and started again. A change of weights has as long;
    what fails of it is sent once more, and if that fails too the client serves nothing until a later call succeeds.

    ``transfer`` is the way that weights take: ``"shared_memory"``, ``"safetensors"`` (temporary files), or ``"auto"``,
    the first where there is room; on GPUs also ``"ipc"``, where engine and trainer share one, and ``"nccl"``.

    The engines end with :meth:`close`, with this process however it ends (on Linux), and not by Ctrl-C, which is the
    trainer's.

    Raises ``ImportError`` where vLLM is missing, ``ValueError`` for settings that it doesn't have, and ``RuntimeError``
    where an engine doesn't start, which says why on standard error.

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
        models = named(policies)
        setup = Setup(max_num_seqs, kv_cache_bytes, engine_args or {})
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-vllm-")
        self._hosts: list[EngineHost] = []
        self._stop = weakref.finalize(self, _kill, self._hosts)
        limits = Limits(timeout, restarts)
        try:
            for group in groups_of(models, Path(self._folder.name)):
                settings = setup.settings(group.folder, group.dtype, group.lora, group.load_format)
                host = EngineHost(
                    partial(start_process, settings),
                    group.models,
                    tokenizer,
                    make_transfer(transfer),
                    limits,
                    in_flight,
                )
                self._hosts.append(host)
                self._begin(host, group)
        except BaseException:
            self._end_all()
            raise

    def _begin(self, host: EngineHost, group: Group) -> None:
        self._policies |= group.policies(host, host.begin())
        if group.weights is not None:
            self._put(next(iter(group.models)), group.weights, 0)
        for name in group.adapters:
            self._put(name, group.models[name].state_dict(), 0)

    def _start_timer(self, job: Job) -> None:
        """The host has an eye on the time: it can tell what is slow from what is dead."""

    def _add(self, engine: EngineHost, jobs: list[Job]) -> None:
        engine.add(jobs)

    def _abandon(self, engine: EngineHost, jobs: list[Job], timeouts: int) -> None:
        engine.abandon(jobs, timeouts)

    def _put(self, policy: str, sources: dict[str, Tensor], version: int) -> None:
        held = self._policies[policy]
        held.engine.put(
            Update(
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
