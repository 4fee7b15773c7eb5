"""The vLLM client that starts ``turnwise serve`` for each base itself, and ends it."""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from turnwise.inference.common.experts import find_experts
from turnwise.inference.common.http import EndpointError
from turnwise.inference.pool.client import PoolClient
from turnwise.inference.routing import RoutingClient
from turnwise.inference.server.client import VLLMServerClient
from turnwise.inference.server.server import ModelServer
from turnwise.inference.server.settings import RETURN_EXPERTS, ServeSettings
from turnwise.inference.vllm.worker import vllm_or_raise
from turnwise.inference.weights.lora import AdaptedModel
from turnwise.types import ByPolicy, Tokenizers
from turnwise.utils.files import open_to_append
from turnwise.utils.threads import to_thread

DEAD_AFTER = 30.0
"""Seconds without an answer after which a server must prove its health, or its requests are sent again."""


class VLLMClient(RoutingClient):
    """Completes prompts with vLLM, with one server for each base model.

    - ``policies``: one policy, named ``"default"``, or policies by name. A policy is a Hugging Face model, whose
      weights the client sends to a server, or an :class:`AdaptedModel`. Every full policy has its own server. Adapters
      over one base share a server, which batches their requests.
    - ``tokenizer``: that of all policies, or each policy's by name.
    - ``max_num_seqs``: the most requests that one server runs at once. They join at any time (continuous batching).
    - ``kv_cache_gb``: memory per server for keys and values, in GiB. Prompts with equal beginnings share them.
    - ``in_flight``: loads new weights between two tokens. Running requests recompute their keys and values, and
      ``policy_versions`` has the version of each token. Else weights wait until nothing runs.
    - ``timeout``, ``attempts``: seconds for an answer and for a restart of a server, and the most times that a request
      is sent, as in :class:`PoolClient`.
    - ``transfer``: how weights travel: ``"shared_memory"``, ``"safetensors"`` (temporary files), or ``"auto"``,
      which takes shared memory if there is room. On GPUs also ``"ipc"``, if server and trainer share one, and
      ``"nccl"``.
    - ``engine_args``: further options of vLLM's server.
    - ``grammars``: starts the servers with the tokenizer, so that they sample under :class:`~turnwise.types.Grammar`.
    - ``routed_experts``: responses of mixtures of experts have the experts that they chose. vLLM's CPU build can't
      return them, which raises ``ValueError``.
    - ``logs``: a folder for the servers' logs, ``vllm-0.log`` and so on.
    - ``seed``: source of the seeds for requests without one. A request's draws depend only on its own seed. The last
      bits of its logits depend on the rest of the batch.

    A server listens at a free port of this host's loopback, with its own key. If it dies or hangs, a new one gets
    the last weights, and lost requests are sent again with the same seeds. The servers end with :meth:`close`, and with
    this process, however it ends. Ctrl-C doesn't reach them.

    Log-probabilities are those of ``log_softmax(logits / temperature)``. vLLM can't report these for sampling with
    top-p or top-k, so the client refuses such requests.

    Raises ``ImportError`` if vLLM is missing, ``ValueError`` for settings that the client sets itself, and
    :class:`~turnwise.inference.server.server.ServerFailed`, with the end of its log, if a server doesn't start.

    Example::

        client = VLLMClient(model, tokenizer, kv_cache_gb=0.25)
        [response] = await client.generate([ModelRequest([1, 17, 9], Sampling(max_tokens=8, seed=3))])
    """

    def __init__(
        self,
        policies: Mapping[str, nn.Module] | nn.Module,
        tokenizer: Tokenizers,
        *,
        max_num_seqs: int = 256,
        kv_cache_gb: float = 1.0,
        in_flight: bool = False,
        timeout: float = 600.0,
        dead_after: float = DEAD_AFTER,
        attempts: int = 6,
        transfer: str = "auto",
        engine_args: Mapping[str, Any] | None = None,
        grammars: bool = False,
        routed_experts: bool = False,
        logs: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        vllm_or_raise()
        models = dict(policies) if isinstance(policies, Mapping) else {"default": policies}
        if not models:
            raise ValueError("policies is empty: expected at least one model")
        tokenizers: ByPolicy[Any] = ByPolicy.of(tokenizer, "tokenizer")
        for each in (tokenizers[name] for name in models):
            if grammars and not hasattr(each, "save_pretrained"):
                raise ValueError(f"grammars=True: expected a Hugging Face tokenizer, got {type(each).__name__}")
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-vllm-")
        args: dict[str, Any] = {"skip_tokenizer_init": not grammars}
        if grammars:
            args["structured_outputs_config"] = {"backend": "guidance"}  # llguidance, which the trainer uses too
        args |= engine_args or {}
        shared = {"max_batch_size": max_num_seqs, "kv_cache_gb": kv_cache_gb, "engine_args": args}
        groups = _by_base(models)
        configs = [next(iter(group.values())).config.get_text_config() for group in groups]
        routed = [routed_experts and find_experts(config) is not None for config in configs]
        self.servers = [
            _server(group, Path(self._folder.name) / str(number), shared, None if logs is None else Path(logs), returns)
            for number, (group, returns) in enumerate(zip(groups, routed, strict=True))
        ]
        if grammars:
            for number, group in enumerate(groups):
                tokenizers.common(group).save_pretrained(Path(self._folder.name) / str(number))
        self._end = weakref.finalize(self, _end, self.servers)
        try:
            with ThreadPoolExecutor(len(self.servers)) as starting:
                list(starting.map(lambda server: server.start(), self.servers))
            clients: dict[str, Any] = {}
            for server, group, returns in zip(self.servers, groups, routed, strict=True):
                options = {"in_flight": in_flight, "transfer": transfer, "seed": seed, "grammars": grammars}
                options["routed_experts"] = returns
                pool = PoolClient(
                    {server.url: _OwnServerClient(server, timeout, tokenizers, group, **options)},
                    timeout=timeout,
                    dead_after=dead_after,
                    wait=timeout,
                    attempts=attempts,
                    keeps_weights=False,
                    seed=seed,
                )
                clients |= dict.fromkeys(group, pool)
        except BaseException:
            self._stop_servers()
            raise
        super().__init__({name: clients[name] for name in models})
        if len(groups) == 1:
            self.generate = pool.generate  # type: ignore[method-assign]  # there is nothing to route

    async def close(self) -> None:
        """Fail all waiting and running requests, and end the servers. May be called again."""
        try:
            await super().close()
        finally:
            await to_thread(self._stop_servers)

    def _stop_servers(self) -> None:
        self._end.detach()
        with ThreadPoolExecutor(len(self.servers)) as stopping:
            list(stopping.map(lambda server: server.stop(), self.servers))
        self._folder.cleanup()


class _OwnServerClient(VLLMServerClient):
    """The client of one server. Its health check fails once the server has failed for good."""

    def __init__(self, server: ModelServer, timeout: float, *arguments: Any, **settings: Any) -> None:
        super().__init__(server.endpoint(timeout=timeout), *arguments, **settings)
        self._launched = server

    async def check_health(self) -> None:
        if self._launched.failure:
            raise EndpointError(self._launched.failure)
        await super().check_health()


def _by_base(models: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """Group models by their base: each group is one server's."""
    groups: dict[int, dict[str, Any]] = {}
    for name, model in models.items():
        base = model.shared if isinstance(model, AdaptedModel) else model
        groups.setdefault(id(base), {})[name] = model
    return list(groups.values())


def _server(
    models: Mapping[str, Any], folder: Path, shared: Mapping[str, Any], logs: Path | None, routed_experts: bool
) -> ModelServer:
    """A server for models over one base, which starts without weights. ``folder`` holds the base's configuration."""
    adapted = [model for model in models.values() if isinstance(model, AdaptedModel)]
    plain: Any = adapted[0].shared.model if adapted else next(iter(models.values()))
    config = copy.deepcopy(plain.config)
    config.architectures = [type(plain).__name__]  # vLLM chooses its own class by this name
    config.save_pretrained(folder)
    dtype = next(parameter.dtype for parameter in plain.parameters() if parameter.is_floating_point())
    engine_args: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if routed_experts:
        engine_args[RETURN_EXPERTS] = True
    ranks = [model.shared.configs[model.name].r for model in adapted if model.name is not None]
    settings = ServeSettings(
        str(folder),
        port=0,
        dummy_weights=True,
        adapter_slots=len(ranks),
        adapter_rank=max(ranks, default=1),
        **{**shared, "engine_args": {**engine_args, **shared["engine_args"]}},
    )
    if logs is None:
        return ModelServer(settings)
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"vllm-{folder.name}.log"

    def append(line: str) -> None:
        with open_to_append(path) as file:
            file.write(f"{line}\n".encode(errors="backslashreplace"))

    return ModelServer(settings, log=append)


def _end(servers: Sequence[ModelServer]) -> None:
    for server in servers:
        server.stop(wait=False)
