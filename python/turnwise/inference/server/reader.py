"""A client that only samples: another process sends weights to the server, and reports their versions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from turnwise.inference.common.http import Endpoint, reading
from turnwise.inference.server.client import VLLMServerClient
from turnwise.types import ModelError, Tokenizers

LABELS = 2
"""Labels that a reader accepts: the latest one, and the one before, whose tokens may still be under way."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that a client has sent to a server; pickles and fits into JSON.

    ``names`` are the server's names of the policies. ``labels`` maps its last labels to the version of each policy.

    Example: ``ServedWeights({"default": None}, {"9f3c-6": {"default": 5}, "9f3c-7": {"default": 6}})``
    """

    names: Mapping[str, str | None]
    labels: Mapping[str, Mapping[str, int]]

    @classmethod
    def by(cls, client: VLLMServerClient) -> ServedWeights:
        """Describe what ``client`` has sent. Call it after each ``load_weights``."""
        sent = dict(client._server.sent)
        names = {name: state.served for name, state in client._policies.items()}
        return cls(names, {label: sent[label] for label in list(sent)[-LABELS:]})


class VLLMServerReader(VLLMServerClient):
    """Completes prompts with a vLLM server to which another client sends weights, such as one in the trainer's process.

    - ``served``: what that client has sent; :meth:`follow` takes the latest after each update.
    - ``wait``: seconds to wait for :meth:`follow` if the server has weights that the reader doesn't know.
    - ``routed_experts``: as in :class:`VLLMServerClient`.

    The reader returns only tokens of weights that it knows. If an answer has others, it waits for :meth:`follow`, and
    raises ``ModelError`` if that takes too long. It takes no weights.

    Example::

        reader = VLLMServerReader(server.endpoint(), tokenizer, ServedWeights.by(client))  # in any process
    """

    def __init__(
        self,
        server: str | Endpoint,
        tokenizer: Tokenizers,
        served: ServedWeights,
        *,
        wait: float = 60.0,
        routed_experts: bool = False,
        seed: int = 0,
    ) -> None:
        if not wait >= 0:
            raise ValueError(f"wait={wait!r}: expected seconds >= 0")
        super().__init__(server, tokenizer, served.names, routed_experts=routed_experts, seed=seed)
        self._wait, self._update = wait, asyncio.Event()
        self._sends = self._synced = True  # labels count, and there is nothing to send at the start
        self.follow(served)

    def follow(self, served: ServedWeights) -> None:
        """Accept the tokens of ``served`` from now on, and no others. Raises ``ValueError`` for other policies."""
        if served.names != (names := {name: state.served for name, state in self._policies.items()}):
            raise ValueError(f"served.names={dict(served.names)}: expected {names}, as at the start")
        self._server.sent = {label: dict(versions) for label, versions in served.labels.items()}
        for versions in served.labels.values():
            for name, version in versions.items():
                self._policies[name].version = version
        self._thread.call(self._update.set)

    async def _recover(self) -> None:
        await self._connect()
        await self._wait_for_update()

    async def _wait_for_update(self) -> None:
        """Return once the server has weights that the reader knows."""
        label = None
        try:
            async with asyncio.timeout(self._wait):
                while True:
                    self._update.clear()
                    answer = await self._endpoint.ask("GET", "/weight_info")
                    with reading(f"GET {self._endpoint.url}/weight_info", "weight_version"):
                        label = str(answer["weight_version"])
                    if label in self._server.sent:
                        return
                    await self._update.wait()
        except TimeoutError:
            raise ModelError(
                f"{self._endpoint.url} has weights of label {label!r}, which the reader did not learn "
                f"within {self._wait:g} seconds: call follow() after each update"
            ) from None
