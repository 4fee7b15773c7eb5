"""Combine several clients into one that sends each policy's requests to that policy's client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from turnwise.inference.common.base import ClientBase, find_policy, gather_all, loads_of
from turnwise.types import (
    ClientCapabilities,
    EngineReport,
    InferenceClient,
    MeasuredClient,
    ModelRequest,
    ModelResponse,
    ScoringClient,
    capabilities_of,
)

T = TypeVar("T")


class RoutingClient(ClientBase):
    """Sends each request to the client of its policy.

    ``clients`` maps each policy to its client; one client may serve several. ``fixed_policies``, such as a judge behind
    an API, never train, so a trainer needs no weights for them.

    Example::

        client = RoutingClient({"solver": VLLMClient({"solver": model}, tokenizer), "judge": OpenAIClient(url, ...)})
    """

    def __init__(self, clients: Mapping[str, InferenceClient]) -> None:
        if not clients:
            raise ValueError("clients is empty: expected at least one policy with its client")
        self.clients = dict(clients)
        for name, client in self.clients.items():
            client.version(name)  # raises for a policy that its client doesn't have

    @property
    def capabilities(self) -> ClientCapabilities:
        """The weights are shared if one client shares them; each policy is fixed if its own client fixes it; grammars
        work if all clients take them."""
        declared = {name: capabilities_of(client, ClientCapabilities) for name, client in self.clients.items()}
        return ClientCapabilities(
            shares_weights=any(each.shares_weights for each in declared.values()),
            fixed_policies=frozenset(name for name, each in declared.items() if name in each.fixed_policies),
            grammars=all(each.grammars for each in declared.values()),
        )

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return one response per request, in order. Raises clients' errors; ``ValueError`` for unknown policies."""
        chosen = [find_policy(self.clients, request.policy) for request in requests]
        if len({*map(id, chosen)}) == 1:  # the usual case, which needs no further task
            return await chosen[0].generate(requests)
        return await self._shared_out(
            requests, lambda client, share: client.generate([requests[index] for index in share])
        )

    async def score(self, requests: Sequence[ModelRequest], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities by the client of each request's policy; see ``ScoringClient``.

        Raises ``TypeError`` for a client that can't score.
        """

        def score(client: Any, share: Sequence[int]) -> Awaitable[list[list[float]]]:
            if not isinstance(client, ScoringClient):
                raise TypeError(f"policy {requests[share[0]].policy!r}: {type(client).__name__} can't score tokens")
            return client.score([requests[index] for index in share], [completions[index] for index in share])

        return await self._shared_out(requests, score)

    async def _shared_out(
        self, requests: Sequence[ModelRequest], call: Callable[[InferenceClient, list[int]], Awaitable[list[T]]]
    ) -> list[T]:
        """Return the results of ``call``, which gets each client with the indices of its requests, in their order."""
        shares: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            shares.setdefault(id(find_policy(self.clients, request.policy)), []).append(index)
        calls = [call(self.clients[requests[share[0]].policy], share) for share in shares.values()]
        results: dict[int, T] = {}
        for share, result in zip(shares.values(), await gather_all(calls), strict=True):
            results |= zip(share, result, strict=True)
        return [results[index] for index in range(len(requests))]

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Hand ``weights`` to the client of ``policy``."""
        find_policy(self.clients, policy).load_weights(policy, weights, version)

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return find_policy(self.clients, policy).version(policy)

    async def pause(self) -> None:
        """Pause all clients, and return once all are paused."""
        await asyncio.gather(*(client.pause() for client in self._distinct()))

    async def resume(self) -> None:
        """Resume all clients."""
        await asyncio.gather(*(client.resume() for client in self._distinct()))

    async def close(self) -> None:
        """Close all clients. If one fails, the others are still closed."""
        await gather_all(client.close() for client in self._distinct())

    def stats(self) -> dict[str, float]:
        """Sum the totals of all clients that have ``stats``."""
        totals: Counter[str] = Counter()
        for client in self._measured():
            totals.update(client.stats())
        return dict(totals)

    def peaks(self) -> dict[str, float]:
        """The largest peak, by name, of all clients that have ``peaks``."""
        largest: dict[str, float] = {}
        for client in self._measured():
            for name, value in client.peaks().items():
                largest[name] = max(value, largest.get(name, value))
        return largest

    async def load(self) -> dict[str, EngineReport | None]:
        """Join the reports of all clients' engines."""
        return await loads_of(self._distinct())

    def _measured(self) -> list[MeasuredClient]:
        return [client for client in self._distinct() if isinstance(client, MeasuredClient)]

    def _distinct(self) -> list[InferenceClient]:
        return list({id(client): client for client in self.clients.values()}.values())
