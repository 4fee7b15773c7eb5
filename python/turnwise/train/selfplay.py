"""What self-play adds to the loop, from a configuration: a league, a health guard, and exact exploitability."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from turnwise.arena import Arena
from turnwise.train.callbacks import Callback
from turnwise.train.config import TrainConfig
from turnwise.train.health import build_guard, check_health
from turnwise.train.league import build_league, check_league
from turnwise.train.loop import Trainer
from turnwise.types import Actor, GenerateResult

Measure = Callable[[Arena], Awaitable[Mapping[str, float]]]
"""What is measured of the policies behind an arena's actors, by the names of metrics."""


class Probe(Callback):
    """Measures before the first step and after every ``every`` steps, and says what it found."""

    name = "probe"

    def __init__(self, measure: Measure, every: int) -> None:
        self.measure, self.every = measure, every

    async def on_start(self, trainer: Trainer) -> None:
        if trainer.progress.step == 0:
            await self._measured(trainer)

    async def after_step(self, trainer: Trainer, results: Sequence[GenerateResult]) -> Mapping[str, float]:
        return {} if trainer.progress.step % self.every else await self._measured(trainer)

    async def _measured(self, trainer: Trainer) -> Mapping[str, float]:
        found = await self.measure(trainer.arena)
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        trainer.log.note(f"step {trainer.progress.step}: {said}")
        trainer.client_metrics.take()  # no part of what a step sampled
        return found


def build_callbacks(
    config: TrainConfig, actors: Sequence[Actor], seats: Sequence[str], arena: Arena, measure: Measure | None
) -> list[Callback]:
    """The callbacks of ``config``; a league also takes its place in ``arena``."""
    league = build_league(config, actors, seats, arena.client)
    arena.seating = None if league is None else league.seating
    every = config.eval.exploitability
    probe = Probe(measure, every) if every and measure is not None else None
    return [callback for callback in (league, build_guard(config, seats), probe) if callback is not None]


def check_selfplay(
    config: TrainConfig, actors: Sequence[Actor], seats: Sequence[str], task: str, measure: Measure | None
) -> list[str]:
    """What keeps ``config`` (its policies resolved) from having the callbacks that it asks for, a line each."""
    problems = [*check_league(config, actors, seats, task), *check_health(config, seats)]
    key = f"config key 'eval.exploitability' = {config.eval.exploitability}"
    if config.eval.exploitability and measure is None:
        problems.append(f"{key}: task {task!r} is not solved exactly; expected kuhn_poker or tic_tac_toe")
    elif config.eval.exploitability and config.rollout.client != "transformers":
        problems.append(f"{key}: needs rollout.client = 'transformers', which can score")
    return problems
