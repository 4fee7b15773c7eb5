"""Runs the real loop on a virtual clock, to measure what staleness, concurrency and in-flight updates would gain.

The trainer, the rollout queue, the arena and its scheduler are the real ones. Only the durations of model calls,
updates and weight transfers are modelled. Nothing is learned: the weights are a version number.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

from virtual_clock import run_virtually

from turnwise.arena import Arena, Episode, Rubric
from turnwise.inference.scripted import ByteTokenizer
from turnwise.train.config.sampling import LoopConfig, RolloutConfig
from turnwise.train.config.schema import LogConfig, TrainConfig
from turnwise.train.loop import Trainer
from turnwise.train.model.policy import Policy
from turnwise.types import (
    Actor,
    EpisodeRequest,
    EpisodeState,
    ModelRequest,
    ModelResponse,
    Sampling,
    Tokenizer,
    TrainingBatch,
)
from turnwise.types.play import MAX_CONCURRENCY

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Latencies of the loop, in seconds.

    A model call of ``n`` tokens takes ``prefill + n * per_token`` once one of ``slots`` slots is free. ``n`` is
    log-normal around the median ``tokens`` with spread ``sigma`` (0: always ``tokens``), at most ``max_tokens``.
    An update takes ``update`` plus ``update_per_token`` for each sampled token. A transfer of weights takes
    ``publish``.

    Example: ``LatencyModel(tokens=512, sigma=0.8, slots=128, update=4.0)``
    """

    tokens: int = 256
    sigma: float = 0.0
    max_tokens: int = 4096
    prefill: float = 0.05
    per_token: float = 0.02
    slots: int = 256
    update: float = 1.0
    update_per_token: float = 0.0
    publish: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "max_tokens", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected at least 1")
        for name in ("sigma", "prefill", "per_token", "update", "update_per_token", "publish"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number >= 0")

    def draw_tokens(self, seed: int | None) -> int:
        drawn = self.tokens * random.Random(seed).lognormvariate(0.0, self.sigma)
        return max(1, min(round(drawn), self.max_tokens))


@dataclass(frozen=True, slots=True)
class Simulation:
    """Results of a simulated run.

    ``trainer_busy`` and ``slots_busy`` are shares of ``seconds``. Staleness counts weight versions, over all tokens.
    For each step, ``trained`` holds the ids of the rollouts that it trained on, in order, ``lengths`` their sampled
    tokens, and ``step_seconds`` the time since the update before it.
    """

    seconds: float
    tokens: int
    trainer_busy: float
    slots_busy: float
    staleness_mean: float
    staleness_max: int
    dropped_stale: int
    trained: list[list[str]] = field(repr=False)
    lengths: list[list[int]] = field(repr=False)
    step_seconds: list[float] = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def simulate(
    latency: LatencyModel,
    loop: LoopConfig,
    *,
    steps: int = 20,
    episodes: int = 64,
    turns: int = 1,
    copies: int = 1,
    oversample: float = 1.0,
    max_concurrency: int = MAX_CONCURRENCY,
    seed: int = 0,
) -> Simulation:
    """Simulate ``steps`` steps of ``episodes`` episodes, each with ``turns`` model calls one after the other.

    Each question has ``copies`` episodes, which are a group. ``oversample`` is ``rollout.oversample``. The same
    arguments give the same result. Raises ``ValueError`` for a count below 1.

    Example::

        for k in (0, 1, 2):
            print(k, simulate(LatencyModel(sigma=0.8), LoopConfig(max_staleness=k)).tokens_per_second)
    """
    for name, value in (("steps", steps), ("episodes", episodes), ("turns", turns)):
        if value < 1:
            raise ValueError(f"{name}={value!r}: expected at least 1")
    with tempfile.TemporaryDirectory() as folder:
        log = LogConfig(progress=False, rollouts_per_step=0)
        rollout = RolloutConfig(oversample=oversample)
        config = TrainConfig(run_dir=Path(folder), steps=steps, loop=loop, rollout=rollout, seed=seed, log=log)
        trainer = SimulatedTrainer(
            latency, config, episodes=episodes, turns=turns, copies=copies, max_concurrency=max_concurrency
        )
        return run_virtually(trainer.simulate())


class Turns(Episode):
    """An episode of ``turns`` model calls, one after the other."""

    episode_type = "turns"
    rubric = Rubric([lambda: {"player": 1.0}])

    def __init__(self, turns: int) -> None:
        self.turns = turns

    async def rollout(self, arena: Any, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        state = EpisodeState() if state is None else state
        for turn in range(self.turns):
            state.turn = turn
            await self.call_model("player", artifact, arena)
        return state


class SimulatedClient:
    """Answers after the time that ``latency`` gives, with the number of tokens that it draws.

    If weights are loaded during a call, each of its tokens has the version that was loaded when it was sampled.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self.latency = latency
        self.busy_seconds = 0.0
        self._free = asyncio.Semaphore(latency.slots)
        self._open = asyncio.Event()
        self._open.set()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._versions: list[tuple[float, int]] = [(0.0, 0)]

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        return list(await asyncio.gather(*(self._answer(request) for request in requests)))

    async def _answer(self, request: ModelRequest) -> ModelResponse:
        async with self._free:
            await self._open.wait()
            self._running += 1
            self._idle.clear()
            began = asyncio.get_running_loop().time()
            try:
                count = self.latency.draw_tokens(request.sampling.seed)
                await asyncio.sleep(self.latency.prefill + count * self.latency.per_token)
            finally:
                self.busy_seconds += asyncio.get_running_loop().time() - began
                self._running -= 1
                if not self._running:
                    self._idle.set()
        runs = self._runs(began + self.latency.prefill, count)
        return ModelResponse("a" * count, [97] * count, [-1.0] * count, "stop", runs)

    def _runs(self, began: float, count: int) -> list[tuple[int, int]]:
        """Return runs of tokens by version, for ``count`` tokens of which the first was sampled at ``began``."""
        later = [(since, version) for since, version in self._versions if since > began]
        runs, version = [], self._versions[len(self._versions) - len(later) - 1][1]
        sampled = 0
        for since, next_version in later:  # the token that is sampled at `since` is the first one of that version
            first = min(math.ceil((since - began) / self.latency.per_token - 1e-9), count)
            runs.append((first - sampled, version))
            sampled, version = first, next_version
        runs.append((count - sampled, version))
        return [(tokens, version) for tokens, version in runs if tokens]

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        if version != self._versions[-1][1]:
            self._versions.append((asyncio.get_running_loop().time(), version))

    def version(self, policy: str) -> int:
        return self._versions[-1][1]

    async def pause(self) -> None:
        """Hold back new calls, and return once no call runs."""
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._open.set()

    async def close(self) -> None: ...


class SimulatedPolicy:
    """A policy whose weights are only a version number."""

    name, trainable, version = "default", True, 0
    terms: Any = None

    def weights(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def check_finite(self, when: str) -> None:
        """Do nothing: there are no weights."""


class SimulatedTrainer(Trainer):
    """The trainer, with updates and weight transfers that only take time, and no files except metrics."""

    def __init__(
        self,
        latency: LatencyModel,
        config: TrainConfig,
        *,
        episodes: int,
        turns: int,
        max_concurrency: int,
        copies: int = 1,
        client: Any = None,
    ) -> None:
        self.latency = latency
        self.client = SimulatedClient(latency) if client is None else client
        self.policy = SimulatedPolicy()
        self.trained: list[list[str]] = []
        self.lengths: list[list[int]] = []
        self.ends = [0.0]
        self.lags: Counter[int] = Counter()
        self.stale = 0
        self.busy_seconds = 0.0
        arena = Arena(
            self.client,
            cast(Tokenizer, ByteTokenizer()),
            sampling=Sampling(max_tokens=latency.max_tokens),
            max_concurrency=max_concurrency,
            seed=config.seed,
            answer_timeout=0.0,
        )
        arena.add_actor(Actor("player"))
        arena.add_episode(Turns(turns))
        arena.source = lambda: [EpisodeRequest("turns", f"{number // copies}") for number in range(episodes)]
        super().__init__(arena, {"default": cast(Policy, self.policy)}, config)

    async def update(self, batch: TrainingBatch) -> dict[str, float]:
        results = self.arena.last_results
        steps = [step for result in results for step in result.rollout.steps]
        self.trained.append([result.rollout.id for result in results])
        self.lengths.append(
            [sum(len(step.completion_token_ids) for step in result.rollout.steps) for result in results]
        )
        self.stale += batch.dropped.get("stale", 0)
        for step in steps:
            for count, version in step.policy_versions:
                self.lags[self.policy.version - version] += count
        tokens = sum(len(step.completion_token_ids) for step in steps)
        seconds = self.latency.update + tokens * self.latency.update_per_token
        await asyncio.sleep(seconds)
        self.busy_seconds += seconds
        self.ends.append(asyncio.get_running_loop().time())
        self.policy.version += 1
        metrics: dict[str, float] = {}
        self.count_step(batch, metrics, self.policies)
        return metrics

    async def run_off_event_loop(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)  # in a thread it would take real time

    async def send_weights(self, policy: Policy) -> None:
        if not self.config.loop.in_flight_updates:
            await self.client.pause()
        await asyncio.sleep(self.latency.publish)
        self.client.load_weights(policy.name, (), policy.version)
        await self.client.resume()

    def save(self) -> Path:
        return self.checkpoints

    async def simulate(self) -> Simulation:
        """Run to the end and return the results."""
        await self.run()
        seconds = asyncio.get_running_loop().time()
        tokens = self.lags.total()
        return Simulation(
            seconds=seconds,
            tokens=tokens,
            trainer_busy=self.busy_seconds / seconds,
            slots_busy=self.client.busy_seconds / (seconds * self.latency.slots),
            staleness_mean=sum(lag * count for lag, count in self.lags.items()) / tokens,
            staleness_max=max(self.lags),
            dropped_stale=self.stale,
            trained=self.trained,
            lengths=self.lengths,
            step_seconds=[end - begin for begin, end in pairwise(self.ends)],
        )
