"""The engines of a run: their description by the loop's process, and a worker's client, which only samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from turnwise.chat.tokenizers import own_copies
from turnwise.inference import PoolClient, RoutingClient, VLLMClient, VLLMServerClient, VLLMServerReader
from turnwise.inference.common.http import Endpoint
from turnwise.inference.server.reader import ServedWeights
from turnwise.types import InferenceClient, Tokenizers
from turnwise.workers.messages import EnginePool, Engines


def engines_of(client: InferenceClient) -> Engines:
    """Describe the engines behind ``client``, and the weights that each has now.

    Raises ``TypeError`` for a client whose engines other processes can't reach.
    """
    if isinstance(client, VLLMClient):
        raise TypeError("VLLMClient's servers end with this process: workers need engines that they reach over HTTP")
    if isinstance(client, RoutingClient):
        pools: dict[int, tuple[InferenceClient, list[str]]] = {}
        for policy, inner in client.clients.items():
            pools.setdefault(id(inner), (inner, []))[1].append(policy)
        return tuple(_pool(inner, tuple(policies)) for inner, policies in pools.values())
    return (_pool(client, ()),)


def _pool(client: InferenceClient, policies: tuple[str, ...]) -> EnginePool:
    if isinstance(client, PoolClient):
        engines = [engine.client for engine in list(client._engines.values())]
        limits = (client._limits.timeout, client._limits.dead_after)
    else:
        engines, limits = [client], (getattr(getattr(client, "_endpoint", None), "timeout", 600.0), 30.0)
    served: dict[str, ServedWeights] = {}
    for engine in engines:
        if not isinstance(engine, VLLMServerClient):
            raise TypeError(
                f"{type(engine).__name__} samples in this process: workers need engines that they reach over HTTP"
            )
        served[engine._endpoint.url] = ServedWeights.by(engine)
    names = policies or tuple(next(iter(served.values())).names)
    return EnginePool(names, served, *limits)


class WorkerClient:
    """Samples from the engines of ``engines``, and takes no weights. :meth:`follow` updates their labels.

    ``endpoint`` makes the endpoint of a URL, with its key. ``attempts`` is the most times that a request is sent.
    ``routed_experts`` is as in :class:`VLLMServerClient`.
    """

    def __init__(
        self,
        engines: Engines,
        tokenizer: Tokenizers,
        endpoint: Callable[[str], Endpoint],
        seed: int,
        attempts: int = 3,
        routed_experts: bool = False,
    ) -> None:
        self._tokenizers, self._endpoint, self._seed = own_copies(tokenizer), endpoint, seed
        self._routed_experts = routed_experts
        self._readers: list[dict[str, VLLMServerReader]] = []
        self._pools: list[PoolClient] = []
        self._leaving: set[Any] = set()
        clients: dict[str, InferenceClient] = {}
        for pool in engines:
            readers = {url: self._reader(url, served, pool) for url, served in pool.engines.items()}
            limits: dict[str, Any] = {"timeout": pool.timeout, "dead_after": pool.dead_after, "wait": pool.timeout}
            joined = PoolClient(dict(readers), **limits, attempts=attempts, seed=seed)
            self._readers.append(readers)
            self._pools.append(joined)
            clients |= dict.fromkeys(pool.policies, joined)
        self.client = RoutingClient(clients)

    def _reader(self, url: str, served: ServedWeights, pool: EnginePool) -> VLLMServerReader:
        options: dict[str, Any] = {"wait": pool.timeout, "seed": self._seed, "routed_experts": self._routed_experts}
        return VLLMServerReader(self._endpoint(url), self._tokenizers, served, **options)

    def follow(self, engines: Engines) -> None:
        """Take new labels, join new engines, and leave those that are gone."""
        for readers, pool, update in zip(self._readers, self._pools, engines, strict=True):
            for url, served in update.engines.items():
                if url in readers:
                    readers[url].follow(served)
                else:
                    readers[url] = self._reader(url, served, update)
                    pool.join(url, readers[url])
            for url in [url for url in readers if url not in update.engines]:
                del readers[url]
                self._leaving.add(task := asyncio.ensure_future(pool.leave(url)))
                task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        await self.client.close()
