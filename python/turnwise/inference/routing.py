"""Combine several clients into one that sends each policy's requests to that policy's client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnwise.inference.common.base import ClientBase, gather_all, policy_of
from turnwise.types import InferenceClient, ModelRequest, ModelResponse


class RoutingClient(ClientBase):
    """Sends each request to the client of its policy.

    ``clients`` maps each policy to its client; one client may serve several. ``fixed_policies`` never train, such as a
    judge behind an API, so a trainer needs no weights for them.

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
    def fixed_policies(self) -> frozenset[str]:
        """The policies whose clients accept no weights."""
        return frozenset(name for name, client in self.clients.items() if name in getattr(client, "fixed_policies", ()))

    @property
    def shares_weights(self) -> bool:
        """True if a client samples with the trainer's own modules."""
        return any(getattr(client, "shares_weights", False) for client in self._distinct())

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return one response per request, in order. Raises clients' errors; ``ValueError`` for unknown policies."""
        places: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(id(policy_of(self.clients, request.policy)), []).append(place)
        shares = [[requests[place] for place in share] for share in places.values()]
        calls = [policy_of(self.clients, share[0].policy).generate(share) for share in shares]
        responses: dict[int, ModelResponse] = {}
        for share, result in zip(places.values(), await gather_all(calls), strict=True):
            responses |= zip(share, result, strict=True)
        return [responses[place] for place in range(len(requests))]

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Hand ``weights`` to the client of ``policy``."""
        policy_of(self.clients, policy).load_weights(policy, weights, version)

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return policy_of(self.clients, policy).version(policy)

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
        for client in self._distinct():
            totals.update(getattr(client, "stats", dict)())
        return dict(totals)

    def peaks(self) -> dict[str, float]:
        """The largest peak, by name, of all clients that have ``peaks``."""
        largest: dict[str, float] = {}
        for client in self._distinct():
            for name, value in getattr(client, "peaks", dict)().items():
                largest[name] = max(value, largest.get(name, value))
        return largest

    def _distinct(self) -> list[InferenceClient]:
        return list({id(client): client for client in self.clients.values()}.values())
