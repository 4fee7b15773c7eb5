"""Builds the self-play callbacks of a configuration: a league, a health guard, and exact exploitability."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from turnwise.arena import Arena
from turnwise.train.callbacks import Callback, TrainerView
from turnwise.train.config.schema import TrainConfig
from turnwise.train.health.guard import build_guard, check_health
from turnwise.train.league.build import build_league, check_league
from turnwise.types import Actor, GenerateResult

Measure = Callable[[Arena], Awaitable[Mapping[str, float]]]
"""Measurement of the policies behind an arena's actors: values by metric name."""


class ExploitabilityProbe(Callback):
    """Measures before the first step and after every ``every`` steps, and logs the result."""

    name = "probe"

    def __init__(self, measure: Measure, every: int) -> None:
        self.measure, self.every = measure, every

    async def on_start(self, trainer: TrainerView) -> None:
        if trainer.progress.step == 0:
            await self._measured(trainer)

    async def after_step(self, trainer: TrainerView, results: Sequence[GenerateResult]) -> Mapping[str, float]:
        return {} if trainer.progress.step % self.every else await self._measured(trainer)

    async def _measured(self, trainer: TrainerView) -> Mapping[str, float]:
        found = await self.measure(trainer.arena)
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        trainer.log.note(f"step {trainer.progress.step}: {said}")
        trainer.client_metrics.take()  # the measurement doesn't count as the step's sampling
        return found


def build_callbacks(
    config: TrainConfig, actors: Sequence[Actor], seats: Sequence[str], arena: Arena, measure: Measure | None
) -> list[Callback]:
    """Build the callbacks of ``config``; a league also becomes the ``opponent_assignment`` of ``arena``."""
    league = build_league(config, actors, seats, arena.client)
    arena.opponent_assignment = None if league is None else league.seating
    every = config.eval.exploitability_every
    probe = ExploitabilityProbe(measure, every) if every and measure is not None else None
    return [callback for callback in (league, build_guard(config, seats), probe) if callback is not None]


def check_selfplay(
    config: TrainConfig, actors: Sequence[Actor], seats: Sequence[str], task: str, measure: Measure | None
) -> list[str]:
    """List the problems with the callbacks of ``config`` (with resolved policies), one line each."""
    problems = [*check_league(config, actors, seats, task), *check_health(config, seats)]
    key = f"config key 'eval.exploitability_every' = {config.eval.exploitability_every}"
    if config.eval.exploitability_every and measure is None:
        problems.append(f"{key}: task {task!r} is not solved exactly; expected kuhn_poker or tic_tac_toe")
    elif config.eval.exploitability_every and (config.rollout.client != "transformers" or config.cluster.has_engines):
        problems.append(f"{key}: needs rollout.client = 'transformers', which can score, and no cluster.engines")
    return problems
