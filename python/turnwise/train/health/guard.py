"""The health guard: judges signals over a window of steps, and warns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from functools import reduce
from pathlib import Path
from typing import Any

from turnwise.settings.section import RunFacts
from turnwise.train.callbacks import Callback, TrainerView
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.health.signals import SIGNALS, Signal, Sums
from turnwise.types import GenerateResult
from turnwise.utils.registry import import_class

Series = dict[str, list[Sums]]
"""Sums of one signal in the latest steps, by actor."""


class Guard(Callback):
    """Watches ``signals`` over the last ``window`` steps in which an actor was measured, and warns once about each.

    The metric ``health/<signal>/<actor>`` is the window's mean, ``health/unhealthy`` the number of unhealthy ones. The
    checkpoint of ``healthy_step``, the last healthy one, stays, so that a user can go back to it.
    """

    name = "health"

    def __init__(self, signals: Mapping[str, Signal], *, window: int) -> None:
        self.signals, self.window = dict(signals), window
        self.healthy_step: int | None = None
        self._recent: dict[str, Series] = {name: {} for name in signals}
        self._first: dict[str, dict[str, Sums]] = {name: {} for name in signals}
        self._warned: set[tuple[str, str]] = set()

    async def after_step(self, trainer: TrainerView, results: Sequence[GenerateResult]) -> dict[str, float]:
        # Add this step's observations to the windows.
        for name, signal in self.signals.items():
            measured = signal.measure(results)
            if not measured and trainer.progress.step == 1:
                trainer.log.note(f"health: signal {name!r} finds nothing to measure in this task")
            for actor, sums in measured.items():
                self._recent[name].setdefault(actor, []).append(sums)
                del self._recent[name][actor][: -self.window]
        # Judge the windows, and warn about each newly unhealthy actor.
        metrics, unhealthy = self._judge()
        metrics["health/unhealthy"] = len(unhealthy)
        for (name, actor), reason in unhealthy.items():
            if (name, actor) not in self._warned:
                trainer.log.warn(
                    trainer.progress.step, f"unhealthy {name} of {actor}: {reason}. {self._advice(trainer)}"
                )
        self._warned = set(unhealthy)
        # A step is healthy if some window is full and none is unhealthy; the trainer saves its checkpoint after this.
        every = trainer.config.checkpoint.every
        if not unhealthy and len(metrics) > 1 and every and trainer.progress.step % every == 0:
            self.healthy_step = trainer.progress.step
        return metrics

    def _judge(self) -> tuple[dict[str, float], dict[tuple[str, str], str]]:
        """Return the means of all full windows, and the problem of each unhealthy signal and actor."""
        metrics: dict[str, float] = {}
        unhealthy: dict[tuple[str, str], str] = {}
        for name, series in self._recent.items():
            for actor, steps in series.items():
                if len(steps) < self.window:
                    continue
                sums = reduce(Sums.plus, steps)
                metrics[f"health/{name}/{actor}"] = sums.mean
                first = self._first[name].setdefault(actor, sums)
                if (reason := self.signals[name].judge(sums, first)) is not None:
                    unhealthy[name, actor] = reason
        return metrics, unhealthy

    def _advice(self, trainer: TrainerView) -> str:
        """Return what a user can do: resume from the last healthy checkpoint, with other settings."""
        rates = {p.learning_rate for p in trainer.policies.values() if p.trainable}
        settings = f"a lower update.lr (now {', '.join(f'{rate:g}' for rate in sorted(rates))})"
        if share := trainer.config.league.share:
            settings += f" or a larger league.share (now {share:g})"
        if self.healthy_step is None:
            return f"If it stays so, begin again with {settings}"
        return (
            f"If it stays so, stop the run, delete the checkpoints under {trainer.checkpoints} after step "
            f"{self.healthy_step}, the last healthy one, and resume with {settings}"
        )

    # -- state ---------------------------------------------------------------------------------------------------------
    def protected_steps(self) -> Collection[int]:
        return () if self.healthy_step is None else (self.healthy_step,)

    def state_dict(self) -> dict[str, Any]:
        return {
            "healthy_step": self.healthy_step,
            "warned": sorted(self._warned),
            "recent": {
                name: {actor: [astuple(sums) for sums in steps] for actor, steps in series.items()}
                for name, series in self._recent.items()
            },
            "first": {name: {actor: astuple(s) for actor, s in first.items()} for name, first in self._first.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore the windows; signals that are new in the configuration start empty."""
        self.healthy_step, self._warned = state["healthy_step"], {(name, actor) for name, actor in state["warned"]}
        for name in self.signals:
            recent, first = state["recent"].get(name, {}), state["first"].get(name, {})
            self._recent[name] = {actor: [Sums(*sums) for sums in steps] for actor, steps in recent.items()}
            self._first[name] = {actor: Sums(*sums) for actor, sums in first.items()}


def signal_problems(run: RunFacts) -> list[str]:
    """List the problems of the signals that the run watches, one line each."""
    problems = Problems()
    seats = () if run.task is None else run.task.seats
    for name in run.config.health.signals if run.task is not None else ():
        with problems.gathered():
            _build_signal(run.config, name, seats)
    return problems.lines


def build_guard(config: TrainConfig, seats: Sequence[str]) -> Guard | None:
    """Return the guard of ``config``, or ``None`` if no signal is watched. Raises :class:`ConfigError`."""
    signals = {name: _build_signal(config, name, seats) for name in config.health.signals}
    return Guard(signals, window=config.health.window) if signals else None


def _build_signal(config: TrainConfig, name: str, seats: Sequence[str]) -> Signal:
    try:
        like = "turnwise.train.health.signals.Signal"
        kind = import_class(SIGNALS, name, f"health.signals.{name}", methods=["measure", "judge"], like=like)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    signal: Signal = kind(config.health.signals[name].threshold, seats)
    return signal
