"""One engine of a pool (its requests, acknowledged weights and health), and the router, which chooses an engine."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from turnwise.inference.common.http import EndpointError
from turnwise.inference.weights.weight_block import check_memory, storage_key
from turnwise.types import (
    CheckedClient,
    ContextLengthError,
    DeadEndError,
    InferenceClient,
    MeasuredClient,
    ModelError,
    ModelRequest,
    ModelResponse,
    RecoverableClient,
)

REFUSED = (400, 413, 422)
"""Statuses that any engine would answer to the same request."""

BLOCK = 16
"""Prompts are compared in blocks of this many tokens, as in vLLM's prefix cache on a GPU."""

REMEMBERED = 2**17
"""Prefixes that a router remembers: 2 million tokens of prompts."""


class EngineFailed(Exception):
    """Raised if an engine failed, so that another may succeed. A ``lost`` engine no longer answers.

    ``retryable`` is true if the same engine may succeed later, after at least ``seconds`` if it named a time.
    """

    def __init__(self, message: str, *, lost: bool = False, retryable: bool = True, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.lost, self.retryable, self.seconds = lost, retryable, seconds

    @classmethod
    def by(cls, error: Exception, lost: bool = False) -> EngineFailed:
        """Return the failure for ``error``. An error that the client doesn't call final may pass."""
        retryable, seconds = (error.retryable, error.seconds) if isinstance(error, ModelError) else (True, 0.0)
        return cls(str(error) or type(error).__name__, lost=lost, retryable=retryable, seconds=seconds)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Seconds: ``timeout`` for a request or an update, and ``dead_after`` without an answer until a health check."""

    timeout: float
    dead_after: float


@dataclass(frozen=True, slots=True, eq=False)
class WeightSnapshot:
    """Weights of a policy, on the CPU, and their version."""

    policy: str
    version: int
    weights: Mapping[str, Tensor]

    @classmethod
    def copy(
        cls, policy: str, version: int, sources: Mapping[str, Tensor], earlier: Iterable[WeightSnapshot]
    ) -> WeightSnapshot:
        """Copy ``sources``; tied ones stay tied. Tensors that are equal in ``earlier`` weights are not copied again."""
        check_memory(sources)
        copies: dict[Any, Tensor] = {}
        for name, source in sources.items():
            if (key := storage_key(source)) in copies:
                continue
            for other in earlier:
                tensor = other.weights.get(name)
                if tensor is not None and tensor.dtype == source.dtype and torch.equal(tensor, source.detach().cpu()):
                    copies[key] = tensor
                    break
            else:
                copies[key] = source.detach().to("cpu", copy=True)
        return cls(policy, version, {name: copies[storage_key(source)] for name, source in sources.items()})

    def over(self, before: WeightSnapshot | None) -> WeightSnapshot:
        """Return these weights with those of ``before`` that they don't replace: the base of an adapter."""
        if before is None:
            return self
        replaced = {storage_key(before.weights[name]) for name in self.weights if name in before.weights}
        kept = {name: tensor for name, tensor in before.weights.items() if storage_key(tensor) not in replaced}
        return WeightSnapshot(self.policy, self.version, {**kept, **self.weights})


class PoolEngine:
    """The engine ``name`` behind ``client``. It gets requests while it is ``serving``.

    ``error`` is its last failure. ``versions`` has the acknowledged versions of each policy, in order, and ``held`` the
    weights that it acknowledged last. ``refusals`` counts how often in a row it was healthy and did not get ready.
    """

    def __init__(self, name: str, client: InferenceClient, limits: EngineLimits) -> None:
        self.name, self.client = name, client
        self.serving = False
        self.error = "it has not answered yet"
        self.outstanding = self.most_outstanding = 0
        self.counts = dict.fromkeys(("requests", "retries", "deaths"), 0)
        self.versions: dict[str, list[int]] = {}
        self.held: dict[str, WeightSnapshot] = {}
        self.refusals = 0
        self._limits = limits
        self._lost = asyncio.Event()
        self._loading = asyncio.Lock()
        self._health: asyncio.Task[None] | None = None
        self._loader = ThreadPoolExecutor(1, f"turnwise-weights-{name}")  # a client takes one update at a time

    # -- requests ------------------------------------------------------------------------------------------------------
    async def wait_for(self, answer: asyncio.Future[list[ModelResponse]], request: ModelRequest) -> ModelResponse:
        """Return the client's ``answer`` to ``request``, which is cancelled in any other case.

        Raises :class:`EngineFailed`, and the client's errors that the request caused.
        """
        # The place in `versions` of the first one that the answer may have.
        first = max(len(self.versions.get(request.policy, ())) - 1, 0)
        self.counts["requests"] += 1
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        try:
            [response] = await self._watched(answer)
            if not await self._vouches(request.policy, response, first):
                raise EngineFailed(
                    f"it answered with versions {response.policy_versions} of {request.policy!r}: expected "
                    f"{self.versions[request.policy][first:]}, which it acknowledged"
                )
            return response
        except (ModelError, OSError) as error:
            final = isinstance(error, EndpointError) and error.status in REFUSED
            if final or isinstance(error, (ContextLengthError, DeadEndError)):
                raise
            raise EngineFailed.by(error) from error
        finally:
            answer.cancel()
            self.outstanding -= 1

    async def _vouches(self, policy: str, response: ModelResponse, first: int) -> bool:
        """True if the engine acknowledged all versions of ``response``, from the ``first`` one on, or was sent none."""
        sampled = {version for count, version in response.policy_versions if count}
        if policy in self.versions and not sampled <= set(self.versions[policy][first:]):
            async with self._loading:  # these may be weights that the engine is about to acknowledge
                pass
        return policy not in self.versions or sampled <= set(self.versions[policy][first:])

    async def _watched(self, answer: asyncio.Future[list[ModelResponse]]) -> list[ModelResponse]:
        """Return the result of ``answer``, unless it takes too long or the engine is lost."""
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            async with asyncio.timeout(self._limits.timeout):
                while not answer.done():
                    either: set[asyncio.Future[Any]] = {answer, lost}
                    await asyncio.wait(either, timeout=self._limits.dead_after, return_when=asyncio.FIRST_COMPLETED)
                    if self._lost.is_set():
                        raise EngineFailed(self.error, lost=True)
                    if not answer.done():
                        await self.check_health()
                return answer.result()
        except TimeoutError:
            message = f"it gave no answer within timeout={self._limits.timeout:g} seconds"
            raise EngineFailed(message, retryable=False) from None
        finally:
            lost.cancel()

    async def check_health(self) -> None:
        """Raise :class:`EngineFailed` if the client has ``check_health`` and that fails. Callers share one check."""
        if self._health is None or self._health.done():
            self._health = asyncio.ensure_future(self._check_health())
            self._health.add_done_callback(lambda task: task.cancelled() or task.exception())  # also if all have left
        await asyncio.shield(self._health)

    async def _check_health(self) -> None:
        if not isinstance(self.client, CheckedClient):
            return
        try:
            async with asyncio.timeout(self._limits.dead_after):
                await self.client.check_health()
        except TimeoutError:
            raise EngineFailed(f"it did not answer for {self._limits.dead_after:g} seconds", lost=True) from None
        except (ModelError, OSError) as error:
            raise EngineFailed.by(error, lost=True) from error

    def stats(self) -> dict[str, float]:
        """Return the client's totals; empty for a client that counts nothing."""
        return self.client.stats() if isinstance(self.client, MeasuredClient) else {}

    def peaks(self) -> dict[str, float]:
        """Return the client's peaks; empty for a client that measures none."""
        return self.client.peaks() if isinstance(self.client, MeasuredClient) else {}

    # -- weights and service -------------------------------------------------------------------------------------------
    async def load(self, new: WeightSnapshot) -> None:
        """Load ``new``, and return once the engine has acknowledged them. Raises its errors, or ``TimeoutError``."""
        loop = asyncio.get_running_loop()
        async with self._loading:
            acknowledged = self.versions.setdefault(new.policy, [self.client.version(new.policy)])
            call = loop.run_in_executor(
                self._loader, self.client.load_weights, new.policy, new.weights.items(), new.version
            )
            try:
                await asyncio.wait_for(call, self._limits.timeout)
            except TimeoutError:
                raise TimeoutError(
                    f"it did not acknowledge new weights within timeout={self._limits.timeout:g} seconds"
                ) from None
            acknowledged.append(new.version)

    async def recover(self) -> bool:
        """Let the client send the weights again that it sent last, if the engine lost them. False if it can't."""
        if not isinstance(self.client, RecoverableClient):
            return False
        async with self._loading, asyncio.timeout(self._limits.timeout):
            await self.client.recover()
        return True

    def begin(self) -> None:
        """Serve from now on."""
        self.serving, self.refusals = True, 0
        self._lost.clear()

    def end(self, error: str, lost: bool) -> None:
        """Serve no new requests. Those that run are given up too if the engine is ``lost``."""
        self.serving, self.error = False, error
        if lost:
            self._lost.set()

    async def close(self) -> None:
        """Close the client."""
        self.end("it is closed", lost=True)
        self._loader.shutdown(wait=False, cancel_futures=True)
        await self.client.close()


# -- routing -----------------------------------------------------------------------------------------------------------
class Router(Protocol):
    """Chooses engines. A pool calls it from one thread."""

    def choose(self, request: ModelRequest, outstanding: Mapping[str, int]) -> str:
        """Return one of the engines in ``outstanding``, which has each engine's number of unanswered requests."""
        ...


class PrefixRouter:
    """Sends a request to the engine that was last sent the longest known prefix of its prompt, in whole blocks.

    The prefix must be at least half of the prompt, and the engine at most ``imbalance`` requests ahead of the least
    busy one. Else the least busy engine gets the request; among equally busy ones, the one that has received the
    fewest. So the siblings of a group, the branches of a tree and the turns of an episode meet in one engine's prefix
    cache.

    Example: ``PrefixRouter().choose(ModelRequest([1, 17, 9]), {"a": 3, "b": 2}) == "b"``
    """

    def __init__(self, imbalance: int = 16) -> None:
        if imbalance < 0:
            raise ValueError(f"imbalance={imbalance!r}: expected a count >= 0")
        self._imbalance = imbalance
        self._engine_of: OrderedDict[int, str] = OrderedDict()
        self._sent: Counter[str] = Counter()

    def choose(self, request: ModelRequest, outstanding: Mapping[str, int]) -> str:
        """Return the engine for ``request``. ``outstanding`` has the unanswered requests of at least one engine."""
        prompt = request.prompt_token_ids
        # The hash of each prefix, from the shortest; the last one is that of the whole prompt.
        prefixes, prefix = [], hash(request.policy)
        for start in range(0, len(prompt), BLOCK):
            prefix = hash((prefix, *prompt[start : start + BLOCK]))
            prefixes.append(prefix)
        half = max(len(prefixes) - 1, 0) // 2
        last = next((self._engine_of[p] for p in reversed(prefixes[half:]) if p in self._engine_of), "")
        if outstanding.get(last, float("inf")) <= min(outstanding.values()) + self._imbalance:
            chosen = last
        else:
            chosen = min(outstanding, key=lambda name: (outstanding[name], self._sent[name]))
        self._sent[chosen] += 1
        for prefix in prefixes:
            self._engine_of[prefix] = chosen
            self._engine_of.move_to_end(prefix)
        while len(self._engine_of) > REMEMBERED:
            self._engine_of.popitem(last=False)
        return chosen
