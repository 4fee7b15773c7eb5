"""Several clients as one: each policy is served by the client that is named for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from turnwise.types import InferenceClient, ModelRequest, ModelResponse


class RoutingClient:
    """Sends each request to the client of its policy.

    ``clients`` names them by policy; one client may serve several. ``fixed_policies`` are those that nobody trains, as
    a judge behind an API is; a trainer needs no weights for them.

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
        """The policies whose clients say that they take no weights."""
        return frozenset(name for name, client in self.clients.items() if name in getattr(client, "fixed_policies", ()))

    @property
    def shares_weights(self) -> bool:
        """Whether one of the clients samples with the trainer's own modules."""
        return any(getattr(client, "shares_weights", False) for client in self._distinct())

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """One response per request, in order. Raises what the clients raise, and ``ValueError`` for other policies."""
        places: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(id(self._client(request.policy)), []).append(place)
        shares = [[requests[place] for place in share] for share in places.values()]
        calls = [self._client(share[0].policy).generate(share) for share in shares]
        responses: dict[int, ModelResponse] = {}
        for share, result in zip(places.values(), await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, BaseException):
                raise result
            responses |= zip(share, result, strict=True)
        return [responses[place] for place in range(len(requests))]

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Hand ``weights`` to the client of ``policy``."""
        self._client(policy).load_weights(policy, weights, version)

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return self._client(policy).version(policy)

    async def pause(self) -> None:
        """Pause all clients; returns once all are."""
        await asyncio.gather(*(client.pause() for client in self._distinct()))

    async def resume(self) -> None:
        """Let all clients go on."""
        await asyncio.gather(*(client.resume() for client in self._distinct()))

    async def close(self) -> None:
        """Close all clients, the others also where one fails."""
        results = await asyncio.gather(*(client.close() for client in self._distinct()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def stats(self) -> dict[str, float]:
        """The sums over all clients that count."""
        totals: Counter[str] = Counter()
        for client in self._distinct():
            totals.update(getattr(client, "stats", dict)())
        return dict(totals)

    def peaks(self) -> dict[str, float]:
        """The largest of all clients that tell peaks."""
        largest: dict[str, float] = {}
        for client in self._distinct():
            for name, value in getattr(client, "peaks", dict)().items():
                largest[name] = max(value, largest.get(name, value))
        return largest

    def _client(self, policy: str) -> InferenceClient:
        if policy not in self.clients:
            raise ValueError(f"policy={policy!r}: expected one of {sorted(self.clients)}")
        return self.clients[policy]

    def _distinct(self) -> list[InferenceClient]:
        return list({id(client): client for client in self.clients.values()}.values())
