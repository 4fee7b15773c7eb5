"""A pool whose requests go through a router that others run: it chooses the engines, which get weights directly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from turnwise.inference.common.http import Endpoint, EndpointError
from turnwise.inference.pool.client import PoolClient
from turnwise.inference.pool.engine import REFUSED, PoolEngine
from turnwise.inference.server.answer import read_answer
from turnwise.inference.server.client import VLLMServerClient
from turnwise.inference.server.remote import RemoteServer
from turnwise.types import ContextLengthError, InferenceClient, ModelError, ModelRequest, ModelResponse

PAUSES = (0.05, 1.0)
"""Seconds until a request is asked again the first time, and the most; they double."""


class RoutedPool(PoolClient):
    """Completes prompts through a router such as vLLM's, which shares the requests out over ``engines``.

    - ``through``: the router. It passes on ``POST /inference/v1/generate``, with the key of this endpoint.
    - ``engines``: clients of the same servers by name, for weights alone. Adapters have the same names on all of them:
      see ``suffix`` of :class:`VLLMServerClient`.
    - ``settings``: further arguments of :class:`PoolClient`, but no ``router``.

    An answer counts only if all its labels are those of one serving engine, which acknowledged their weights while the
    request was under way. Any other answer is dropped, and the request is sent again with the same seed, for up to
    ``timeout`` seconds. The pool then looks at all engines, and sends weights to those that have lost them.

    Example: ``RoutedPool(Endpoint("http://router:30000", api_key_env="KEY"), engines)``
    """

    def __init__(self, through: Endpoint, engines: Mapping[str, VLLMServerClient], **settings: Any) -> None:
        self._through, self._remote = through, RemoteServer(through, "", in_flight=False)
        self._names: dict[str, str | None] = {}
        for client in engines.values():
            self._check_names(client)
        super().__init__(engines, **settings)
        self._asked_again = 0
        self._looking: asyncio.Task[None] | None = None

    def join(self, name: str, client: InferenceClient) -> None:
        """Add an engine, which the router may know already: no answer of it counts before it has all weights."""
        self._check_names(client)
        super().join(name, client)

    def _check_names(self, client: Any) -> None:
        names = {policy: held.served for policy, held in client._policies.items()}
        self._names = self._names or names
        if names != self._names:
            raise ValueError(f"an engine has the adapters {names}: expected {self._names}, the same suffix for all")

    def stats(self) -> dict[str, float]:
        """Totals as those of :class:`PoolClient`. Requests count for the engine whose answer counted."""
        totals = super().stats()
        return {**totals, "retries": totals["retries"] + self._asked_again + self._through.retried}

    async def close(self) -> None:
        """Fail all requests, and close the engines' clients and the connections to the router."""
        await super().close()
        await asyncio.to_thread(self._through.close)

    # -- requests, in the pool's thread --------------------------------------------------------------------------------
    async def _one(self, request: ModelRequest) -> ModelResponse:
        """Ask the router until an answer counts."""
        request, pause, failures, reason = self._seeded(request), PAUSES[0], 0, ""
        try:
            async with asyncio.timeout(self._limits.timeout):
                while True:
                    try:
                        response = await self._ask(request)
                    except (ModelError, OSError) as error:
                        own = isinstance(error, EndpointError) and error.status in REFUSED
                        failures += 1
                        if own or isinstance(error, ContextLengthError) or failures == self._attempts or self._closed:
                            raise
                        response, reason = None, str(error)
                    else:
                        reason = "its answers have weights that no engine has acknowledged"
                    if response is not None:
                        return response
                    self._asked_again += 1
                    self._look_at_engines()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, PAUSES[1])
        except TimeoutError:
            raise ModelError(
                f"{self._through.url} gave no answer that counts within timeout={self._limits.timeout:g} seconds: "
                f"{reason or 'it is slow'}"
            ) from None

    async def _ask(self, request: ModelRequest) -> ModelResponse | None:
        """Return the router's answer; ``None`` if it doesn't count."""
        await self._wait_for_engines()
        serving = [engine for engine in self._engines.values() if engine.serving]
        for engine in serving:
            await self._make_ready(engine)
        firsts = {engine.name: engine.first_version(request.policy) for engine in serving}
        client: Any = serving[0].client
        if not client.ready:
            return None
        body, vocabulary = client._body(request), client._server.info.vocabulary
        found = await self._through.thread.result_of(self._remote.generate(body), lambda: self._closed)
        if found is None:
            return None
        answer = read_answer(found, self._remote.where, body["sampling_params"]["max_tokens"], vocabulary)
        for engine in [engine for engine in self._engines.values() if engine.serving]:
            client = engine.client
            if (versions := client._versions_of(request.policy, answer)) is None:
                continue
            response = client._response(request, answer, versions)
            if await engine.vouches(request.policy, response, firsts.get(engine.name, 0)):
                engine.counts["requests"] += 1
                return response
        return None

    async def _make_ready(self, engine: PoolEngine) -> None:
        """Let the engine's client send its first weights, if it has sent none."""
        client: Any = engine.client
        if not client.ready:
            try:
                await client._endpoint.thread.result_of(client._ready(), lambda: self._closed)
            except (ModelError, OSError) as error:
                self._exclude(engine, str(error))

    # -- engines, in the pool's thread ---------------------------------------------------------------------------------
    def _look_at_engines(self) -> None:
        """Look, once for all requests, which engines have lost their weights, and let those get them again."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._find_lost())

    async def _find_lost(self) -> None:
        await asyncio.gather(*(self._check(engine) for engine in list(self._engines.values()) if engine.serving))

    async def _check(self, engine: PoolEngine) -> None:
        client: Any = engine.client
        try:
            async with engine.loaded(), asyncio.timeout(self._limits.dead_after):
                kept = await client._endpoint.thread.result_of(client._server.has_our_weights(), lambda: self._closed)
                error = "" if kept or not client._sends else "it has lost its weights"
        except TimeoutError:
            error = f"it did not answer for {self._limits.dead_after:g} seconds"
        except (ModelError, OSError) as failure:
            error = str(failure)
        if error and not self._closed:
            self._exclude(engine, error)
