"""Runs the real loop on a virtual cluster: engines that share their speed, a router, ranks, syncs, and deaths.

The trainer, the rollout queue, the arena and the pool's router are the real ones. Durations come from the throughput
model (:mod:`scale.formula`), of which this is a check: here batches start and end, engines get uneven
numbers of rows, calls have different lengths, and GPUs die.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from scale.constants import GPU, Constants
from scale.formula import EngineSpeed, Prediction, Split, engine_speed, predict
from scale.simulate import LatencyModel, SimulatedTrainer
from scale.virtual_clock import run_virtually
from scale.workload import Workload

from turnwise.inference.pool.engine import PrefixRouter, Router
from turnwise.train.config.sampling import LoopConfig
from turnwise.train.config.schema import LogConfig, TrainConfig
from turnwise.train.model.policy import Policy
from turnwise.types import EpisodeRequest, ModelRequest, ModelResponse, TrainingBatch

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Perturbations:
    """Effects that the formula leaves out: calls of different lengths, and GPUs that die.

    Example: ``Perturbations(length_sigma=0.5, mtbf_hours=50_000)``
    """

    length_sigma: float = 0.0
    """Spread of the log-normal lengths of completions, which keep their mean; 0: all are equally long."""
    longest: float = 4.0
    """Longest completion, in mean lengths."""
    mtbf_hours: float = math.inf
    """Mean hours of a GPU between two deaths, which are a Poisson process."""
    engine_restart: float = 120.0
    """Seconds from the death of an engine until it serves again, with the weights of the others."""
    training_restart: float = 300.0
    """Seconds from the death of a rank until all ranks have loaded the last checkpoint."""
    checkpoint_every: int = 10
    """Steps between two checkpoints; ranks repeat the updates since the last one."""

    def __post_init__(self) -> None:
        for name in ("length_sigma", "engine_restart", "training_restart"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number >= 0")
        for name in ("longest", "mtbf_hours", "checkpoint_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number > 0")


@dataclass(frozen=True, slots=True)
class ClusterSimulation:
    """Results of a simulated run, over the steps after the first ones. Shares and rates are of those seconds."""

    step: float
    """Seconds of a step."""
    tokens_per_second: float
    """Sampled tokens that trained, per second."""
    training_busy: float
    """Share of the time in which the ranks trained."""
    rows_per_engine: float
    """Mean rows that an engine sampled at the same time."""
    staleness_max: int
    deaths: dict[str, int]
    """Deaths of engines and of ranks, over the whole run."""
    repeated_rows: int
    """Model calls that began again on another engine, over the whole run."""
    ends: list[float] = field(repr=False)
    """Seconds from the start to the end of each step."""


def simulate_cluster(
    workload: Workload,
    split: Split,
    gpu: GPU,
    constants: Constants,
    perturbations: Perturbations | None = None,
    *,
    rounds: int = 3,
    skipped_rounds: int = 3,
    router: Router | None = None,
    seed: int = 0,
) -> ClusterSimulation:
    """Simulate ``rounds`` times ``max_staleness + 1`` steps, after ``skipped_rounds`` times as many that don't count.

    Equal arguments give equal results. The ``group_size`` calls of a prompt are one request of the arena, whose rows
    the router places one by one. ``constants.tail`` is not used: the tail follows from the lengths. Raises
    ``ValueError`` for ``max_staleness=None`` and for counts below 1.
    """
    if split.max_staleness is None:
        raise ValueError("max_staleness=None: expected a count, as the loop has a bound")
    for name, value in (("rounds", rounds), ("skipped_rounds", skipped_rounds)):
        if value < 1:
            raise ValueError(f"{name}={value!r}: expected at least 1")
    constants = replace(constants, tail=constants.tail.measured(1.0, "lengths of the simulation"))
    ahead = split.max_staleness
    cycle = ahead + 1
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            run_dir=Path(folder),
            steps=(skipped_rounds + rounds) * cycle,
            loop=LoopConfig(max_staleness=ahead, in_flight_updates=ahead > 0),
            seed=seed,
            log=LogConfig(progress=False, rollouts_per_step=0, record_for_replay=False),
        )
        trainer = _ClusterTrainer(
            workload,
            split,
            predict(workload, split, gpu, constants),
            engine_speed(workload, split.tensor_parallel, gpu, constants),
            perturbations or Perturbations(),
            config,
            PrefixRouter() if router is None else router,
        )
        return run_virtually(trainer.simulate_steps(skipped_rounds * cycle))


class _Row:
    """One model call inside of a request: its tokens, and the version that its first token has."""

    __slots__ = ("end", "request", "tokens", "version")

    def __init__(self, request: _Request, tokens: int) -> None:
        self.request, self.tokens = request, tokens
        self.end, self.version = 0.0, 0


class _Request:
    """The calls of one prompt."""

    def __init__(self, request: ModelRequest, tokens: Iterable[int]) -> None:
        self.request = request
        self.rows = [_Row(self, count) for count in tokens]
        self.left = len(self.rows)
        self.done = asyncio.get_running_loop().create_future()


class _Engine:
    """An engine whose rows all advance at one speed, that depends on their number.

    ``progress`` counts the tokens that a row would have which runs since the start. A row ends once the progress has
    grown by its tokens, so an event costs no more than one heap operation.
    """

    def __init__(self, name: str, speed: EngineSpeed, slots: int, client: _ClusterClient) -> None:
        self.name, self.speed, self.slots, self.client = name, speed, slots, client
        self.running: list[tuple[float, int, _Row]] = []
        self.waiting: deque[_Row] = deque()
        self.progress = self.since = self.row_seconds = 0.0
        self.alive, self.stopped = True, False
        self._loop = asyncio.get_running_loop()
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = False

    @property
    def outstanding(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, row: _Row) -> None:
        self.waiting.append(row)
        if not self._changed:  # rows that come at one moment start together
            self._changed = True
            self._loop.call_soon(self._start_added)

    def _start_added(self) -> None:
        self._changed = False
        if len(self.running) < self.slots:
            self._advance()
            self._go_on()

    def set_stopped(self, stopped: bool) -> None:
        """Stop all rows where they are, or let them run."""
        self._advance()
        self.stopped = stopped
        self._go_on()

    def die(self) -> list[_Row]:
        """Forget all rows and return them."""
        self._advance()
        lost = [row for _, _, row in self.running] + list(self.waiting)
        self.running, self.alive = [], False
        self.waiting.clear()
        self._go_on()
        return lost

    def _advance(self) -> None:
        now = self._loop.time()
        if self.running and not self.stopped:
            self.progress += (now - self.since) / self.speed.seconds(len(self.running))
        self.row_seconds += (now - self.since) * len(self.running)
        self.since = now

    def _go_on(self) -> None:
        """Start waiting rows in free slots, and set the timer for the next row that ends."""
        while self.waiting and len(self.running) < self.slots:
            row = self.waiting.popleft()
            row.end, row.version = self.progress + row.tokens, self.client.newest
            heappush(self.running, (row.end, next(self._order), row))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.running and not self.stopped:
            left = (self.running[0][0] - self.progress) * self.speed.seconds(len(self.running))
            self._timer = self._loop.call_later(max(left, 0.0), self._end_rows)

    def _end_rows(self) -> None:
        self._timer = None
        self._advance()
        while self.running and self.running[0][0] <= self.progress + 1e-6:
            self.client.finish(heappop(self.running)[2], self)
        self._go_on()


class _ClusterClient:
    """The pool of engines: each request's rows go to the engines that the router chooses."""

    def __init__(
        self, split: Split, speed: EngineSpeed, workload: Workload, perturbations: Perturbations, router: Router
    ) -> None:
        self.split, self.speed, self.workload, self.perturbations = split, speed, workload, perturbations
        self.router = router
        self.newest = 0
        self.engines: dict[str, _Engine] = {}
        self.outstanding: dict[str, int] = {}
        self.homeless: list[_Row] = []
        self.repeated = 0

    def start(self) -> None:
        """Make the engines, in the running event loop."""
        for number in range(self.split.engines):
            engine = _Engine(f"engine-{number}", self.speed, self.split.slots, self)
            self.engines[engine.name] = engine
            self.outstanding[engine.name] = 0

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        return list(await asyncio.gather(*(self._answer(request) for request in requests)))

    async def _answer(self, request: ModelRequest) -> ModelResponse:
        """Answer with one token per row, which has the row's oldest version; the text is their number of tokens."""
        pending = _Request(request, self._lengths(request.sampling.seed))
        for row in pending.rows:
            self._place(row)
        await pending.done
        versions = Counter(row.version for row in pending.rows)
        count = len(pending.rows)
        runs = [(versions[version], version) for version in sorted(versions)]
        return ModelResponse(str(sum(row.tokens for row in pending.rows)), [97] * count, [-1.0] * count, "stop", runs)

    def _lengths(self, seed: int | None) -> list[int]:
        mean, sigma = self.workload.response, self.perturbations.length_sigma
        if not sigma:
            return [max(1, round(mean))] * self.workload.group_size
        draw = random.Random(seed)
        drawn = (mean * draw.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(self.workload.group_size))
        return [max(1, round(min(length, mean * self.perturbations.longest))) for length in drawn]

    def _place(self, row: _Row) -> None:
        if not self.outstanding:
            self.homeless.append(row)
            return
        name = self.router.choose(row.request.request, self.outstanding)
        self.outstanding[name] += 1
        self.engines[name].add(row)

    def finish(self, row: _Row, engine: _Engine) -> None:
        self.outstanding[engine.name] -= 1
        row.request.left -= 1
        if not row.request.left and not row.request.done.done():
            row.request.done.set_result(None)

    async def restart(self, engine: _Engine) -> None:
        """Let ``engine`` die, give its rows to others, and bring it back."""
        lost = engine.die()
        del self.outstanding[engine.name]
        self.repeated += len(lost)
        for row in lost:
            self._place(row)
        await asyncio.sleep(self.perturbations.engine_restart)
        engine.alive, self.outstanding[engine.name] = True, 0
        homeless, self.homeless = self.homeless, []
        for row in homeless:
            self._place(row)

    def set_stopped(self, stopped: bool) -> None:
        for engine in self.engines.values():
            engine.set_stopped(stopped)

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.newest = version

    def version(self, policy: str) -> int:
        return self.newest

    async def close(self) -> None: ...


class _Ranks:
    """The ranks: they train together, and if one dies, all load the last checkpoint and repeat the updates since."""

    def __init__(self, seconds_per_token: float, perturbations: Perturbations) -> None:
        self.seconds_per_token, self.perturbations = seconds_per_token, perturbations
        self.ready = self.busy_seconds = 0.0
        self.since_checkpoint: list[float] = []
        self.died = asyncio.Event()

    def die(self) -> None:
        """Lose everything since the last checkpoint."""
        now = asyncio.get_running_loop().time()
        self.ready = now + self.perturbations.training_restart + sum(self.since_checkpoint)
        self.died.set()

    async def train(self, tokens: float, step: int) -> None:
        clock = asyncio.get_running_loop()
        seconds = tokens * self.seconds_per_token
        while True:
            await asyncio.sleep(max(0.0, self.ready - clock.time()))
            if self.ready > clock.time():
                continue  # a rank died again
            self.died.clear()
            try:
                await asyncio.wait_for(self.died.wait(), seconds)
            except TimeoutError:
                break
        self.busy_seconds += seconds
        self.since_checkpoint = (
            [] if step % self.perturbations.checkpoint_every == 0 else [*self.since_checkpoint, seconds]
        )


class _ClusterTrainer(SimulatedTrainer):
    """The trainer, whose updates and syncs take the seconds of the throughput model."""

    def __init__(
        self,
        workload: Workload,
        split: Split,
        predicted: Prediction,
        speed: EngineSpeed,
        perturbations: Perturbations,
        config: TrainConfig,
        router: Router,
    ) -> None:
        self.workload, self.split, self.predicted, self.perturbations = workload, split, predicted, perturbations
        calls = round(workload.calls)
        if calls != workload.calls:
            raise ValueError(f"calls={workload.calls!r}: expected a whole number, as each episode makes as many")
        self.cluster = _ClusterClient(split, speed, workload, perturbations, router)
        latency = LatencyModel(max_tokens=workload.group_size)
        super().__init__(
            latency,
            config,
            episodes=workload.groups,
            turns=calls,
            max_concurrency=(config.loop.max_staleness + 1) * workload.groups,
            client=self.cluster,
        )
        numbers = itertools.count()  # the questions of each step are new to the router
        self.arena.source = lambda: [EpisodeRequest("turns", f"{next(numbers)}") for _ in range(workload.groups)]
        self.ends: list[float] = []
        self.trained_tokens: list[int] = []

    async def update(self, batch: TrainingBatch) -> dict[str, float]:
        steps = [step for result in self.arena.last_results for step in result.rollout.steps]
        for step in steps:
            for count, version in step.policy_versions:
                self.lags[self.policy.version - version] += count
        sampled = sum(int(step.completion) for step in steps)
        prompts = len(steps) * self.workload.group_size * self.workload.prompt
        await self.ranks.train(sampled + prompts, self.progress.step + 1)
        self.trained_tokens.append(sampled)
        self.policy.version += 1
        metrics: dict[str, float] = {}
        self.count_step(batch, metrics)
        return metrics

    async def send_weights(self, policy: Policy) -> None:
        self.cluster.set_stopped(True)
        await asyncio.sleep(self.predicted.stop)
        self.cluster.load_weights(policy.name, (), policy.version)
        self.cluster.set_stopped(False)

    async def record(self, batch: TrainingBatch, metrics: dict[str, float]) -> None:
        await super().record(batch, metrics)
        self.ends.append(asyncio.get_running_loop().time())
        self.row_seconds.append(sum(engine.row_seconds for engine in self.cluster.engines.values()))
        self.busy.append(self.ranks.busy_seconds)

    async def simulate_steps(self, skipped: int) -> ClusterSimulation:
        """Run to the end and return the results after ``skipped`` steps."""
        self.cluster.start()
        self.row_seconds: list[float] = []
        self.busy: list[float] = []
        self.ranks = _Ranks(self.predicted.training / self.workload.trained_tokens, self.perturbations)
        self.deaths = Counter({"engine": 0, "rank": 0})
        killer = asyncio.create_task(self._kill())
        try:
            await self.run()
        finally:
            killer.cancel()
        seconds = self.ends[-1] - self.ends[skipped - 1]

        def grown(totals: Sequence[float]) -> float:
            return totals[-1] - totals[skipped - 1]

        return ClusterSimulation(
            step=seconds / (len(self.ends) - skipped),
            tokens_per_second=sum(self.trained_tokens[skipped:]) / seconds,
            training_busy=grown(self.busy) / seconds,
            rows_per_engine=grown(self.row_seconds) / (seconds * self.split.engines),
            staleness_max=max(self.lags),
            deaths=dict(self.deaths),
            repeated_rows=self.cluster.repeated,
            ends=self.ends,
        )

    async def _kill(self) -> None:
        """Let one GPU after the other die; the GPUs of a process that is down can't."""
        if math.isinf(self.perturbations.mtbf_hours):
            return
        draw = random.Random(f"{self.config.seed} deaths")
        sampling, restarts = self.split.engines * self.split.tensor_parallel, set()
        while True:
            await asyncio.sleep(draw.expovariate(self.split.gpus / (self.perturbations.mtbf_hours * HOUR)))
            gpu = draw.randrange(self.split.gpus)
            if gpu >= sampling:
                if self.ranks.ready <= asyncio.get_running_loop().time():
                    self.deaths["rank"] += 1
                    self.ranks.die()
                continue
            engine = self.cluster.engines[f"engine-{gpu // self.split.tensor_parallel}"]
            if engine.alive:
                self.deaths["engine"] += 1
                restarts.add(asyncio.create_task(self.cluster.restart(engine)))
