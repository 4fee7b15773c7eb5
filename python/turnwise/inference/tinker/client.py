"""The client that samples with a server of the Tinker API. The server has the weights; only their paths come here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.chat.tokenizers import own_copy
from turnwise.inference.common.base import (
    ClientBase,
    completion_limit,
    cut_at_stop,
    gather_all,
    policy_of,
    stop_token_ids,
)
from turnwise.inference.tinker.server import TinkerServer, TinkerServerError, tinker_or_raise, token_input
from turnwise.types import ModelError, ModelRequest, ModelResponse, Sampling, Tokenizer

SAMPLER, BASE = "sampler_path", "base_model"
"""Names of the one "weight" that :meth:`TinkerClient.load_weights` takes: a path on the server, or a base model."""

SEEDS = 2**31 - 1
"""Seeds that servers take: SkyRL reads them as 32-bit integers."""


@dataclass(slots=True)
class _Policy:
    sampler: Any = None  # None before the first weights
    version: int = 0


class TinkerClient(ClientBase):
    """Completes prompts with weights that a server of the Tinker API holds.

    ``policies`` are their names. ``load_weights`` takes the name of weights instead of the weights:
    ``[("sampler_path", "tinker://...")]``, saved with ``save_weights_for_sampler``, or ``[("base_model", name)]``. Each
    request samples wholly with the weights of the moment in which it is sent, and carries their version.

    The server reports log-probabilities at temperature 1 and before top-p and top-k, so other settings are refused;
    temperature 0 is greedy. Seeds are taken modulo ``2**31 - 1``. ``vocabulary`` and ``context_length`` are the base
    model's.

    Example::

        client = TinkerClient(TinkerServer(url, key), tokenizer, ["solver"], vocabulary=512, context_length=2048)
        client.load_weights("solver", [("base_model", "Qwen/Qwen3-0.6B")], version=0)
        [response] = await client.generate([ModelRequest([1, 17, 9], policy="solver")])
    """

    shares_weights = False

    def __init__(
        self,
        server: TinkerServer,
        tokenizer: Tokenizer,
        policies: Iterable[str],
        *,
        vocabulary: int,
        context_length: int | None,
        seed: int = 0,
    ) -> None:
        self.server, self.tokenizer, self._tokenizer = server, tokenizer, own_copy(tokenizer)
        self.vocabulary, self.context_length = vocabulary, context_length
        self._policies = {name: _Policy() for name in policies}
        self._seeds = np.random.default_rng(seed)
        self._closed = False
        self._gate: asyncio.Event | None = None  # while paused
        self._idle: asyncio.Event | None = None  # while someone waits for it
        self._running = 0
        self._busy_since = 0.0
        self._stats: dict[str, float] = dict.fromkeys(STATS, 0)

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return one response per request, in order.

        Raises ``ValueError`` for an unknown policy, an empty prompt or a sampling that the server can't report on,
        ``ContextLengthError`` for a prompt that leaves no room for a token, and ``ModelError`` if the server can't be
        reached, refuses, takes too long or sends an invalid answer, and if the client is closed.
        """
        self._reject_closed()
        limits = []
        for request in requests:
            policy_of(self._policies, request.policy)
            check_sampling(request.sampling)
            limits.append(completion_limit(request, self.vocabulary, self.context_length))
        while self._gate is not None:
            await self._gate.wait()
        self._count(len(requests))
        try:
            return await gather_all(map(self._one, requests, limits))
        finally:
            self._count(-len(requests))

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Let ``policy`` sample with the server's weights that ``weights`` names. See the class."""
        held = policy_of(self._policies, policy)
        self._reject_closed()
        named = list(weights)
        if len(named) != 1 or named[0][0] not in (SAMPLER, BASE):
            raise ValueError(f"weights={[name for name, _ in named]}: expected one of [{SAMPLER!r}], [{BASE!r}]")
        began, (kind, place) = time.perf_counter(), named[0]
        held.sampler = self.server.sampler(**{"path" if kind == SAMPLER else "base_model": place})
        held.version = version
        self._stats["syncs"] += 1
        self._stats["sync_seconds"] += time.perf_counter() - began

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return policy_of(self._policies, policy).version

    async def pause(self) -> None:
        """Hold back new requests, and return once none of this client runs. Requests wait until :meth:`resume`."""
        self._gate = self._gate or asyncio.Event()
        if self._running:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    async def resume(self) -> None:
        """Let waiting requests run."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.set()

    async def close(self) -> None:
        """Fail all waiting and later requests. The server keeps its weights. May be called again."""
        self._closed = True
        await self.resume()

    def stats(self) -> dict[str, float]:
        """Totals since the client was created; see :data:`STATS`."""
        busy = time.perf_counter() - self._busy_since if self._running else 0.0
        return self._stats | {"seconds": self._stats["seconds"] + busy}

    # -- one request ---------------------------------------------------------------------------------------------------
    async def _one(self, request: ModelRequest, limit: int) -> ModelResponse:
        self._reject_closed()
        held, sampling = self._policies[request.policy], request.sampling
        if held.sampler is None:
            raise ModelError(f"policy {request.policy!r} has no weights yet: call load_weights first")
        version, stops = held.version, stop_token_ids(request, self._tokenizer)
        seed = int(self._seeds.integers(SEEDS)) if sampling.seed is None else sampling.seed % SEEDS
        asked = tinker_or_raise().types.SamplingParams(
            temperature=sampling.temperature, max_tokens=limit, stop=list(stops), seed=seed
        )
        answer = await self.server.answer(held.sampler.sample(token_input(request.prompt_token_ids), 1, asked))
        self._reject_closed()
        tokens, logprobs, reason = self._checked(answer, limit, stops)
        self._stats["requests"] += 1
        self._stats["prompt_tokens"] += len(request.prompt_token_ids)
        self._stats["generated_tokens"] += len(tokens)
        response = ModelResponse(
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            completion_token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            policy_versions=[(len(tokens), version)],
            prompt_token_ids=list(request.prompt_token_ids),
        )
        return cut_at_stop(response, sampling, self._tokenizer)

    def _checked(self, answer: Any, limit: int, stops: Sequence[int]) -> tuple[list[int], list[float], Any]:
        """Return tokens, log-probs and finish reason of an answer. Raises :class:`TinkerServerError` for a bad one."""
        if len(answer.sequences) != 1:
            raise self._wrong(f"{len(answer.sequences)} sequences", "one")
        found = answer.sequences[0]
        tokens, logprobs = list(map(int, found.tokens)), found.logprobs
        if not 1 <= len(tokens) <= limit or not all(0 <= token < self.vocabulary for token in tokens):
            raise self._wrong(f"{len(tokens)} tokens {tokens[:8]}", f"1 to {limit} tokens in 0..{self.vocabulary - 1}")
        if logprobs is None or len(logprobs) != len(tokens) or not all(math.isfinite(x) and x <= 0 for x in logprobs):
            raise self._wrong(f"log-probs {str(logprobs)[:80]}", f"{len(tokens)} finite ones, none above 0")
        reason = str(getattr(found.stop_reason, "value", found.stop_reason))
        if reason not in ("stop", "length") or (reason == "stop") != (tokens[-1] in stops):
            expected = f"'stop' after a token of {tuple(stops)}, else 'length'"
            raise self._wrong(f"stop_reason {reason!r} after token {tokens[-1]}", expected)
        return tokens, list(map(float, logprobs)), reason

    def _wrong(self, got: str, expected: str) -> TinkerServerError:
        return TinkerServerError(f"{self.server.url} answered {got}: expected {expected}")

    def _reject_closed(self) -> None:
        if self._closed:
            raise ModelError("the client is closed")

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        if not self._running:
            self._busy_since = now
        self._running += change
        if self._running:
            return
        self._stats["seconds"] += now - self._busy_since
        if self._idle is not None:
            self._idle.set()
            self._idle = None


def check_sampling(sampling: Sampling) -> None:
    """Raise ``ValueError`` for sampling whose log-probabilities a Tinker server doesn't report."""
    if sampling.temperature not in (0.0, 1.0):
        raise ValueError(
            f"temperature={sampling.temperature}: expected 1, or 0 (greedy), as a Tinker server reports "
            "log-probabilities and trains at temperature 1"
        )
    if sampling.temperature and (sampling.top_p < 1 or sampling.top_k > 0):
        raise ValueError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k}: expected 1 and 0, as a Tinker server trains without "
            "such a cut"
        )


STATS = {
    "requests": "answered",
    "prompt_tokens": "in them",
    "generated_tokens": "in the answers",
    "seconds": "in which a request ran",
    "syncs": "changes of weights",
    "sync_seconds": "that they took",
}
"""The totals of :meth:`TinkerClient.stats`."""
