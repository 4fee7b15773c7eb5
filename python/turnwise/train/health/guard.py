"""The health guard: judges signals over a window of steps, warns, and takes actions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from functools import reduce
from pathlib import Path
from typing import Any

from turnwise.train.callbacks import Callback, TrainerView
from turnwise.train.health.actions import Action, RestoreCheckpoint
from turnwise.train.health.signals import Signal, Sums
from turnwise.types import GenerateResult

Series = dict[str, list[Sums]]
"""Sums of one signal in the latest steps, by actor."""


class Guard(Callback):
    """Watches ``signals`` over the last ``window`` steps in which an actor was measured, and takes their ``actions``.

    After an action all windows start empty, so that the action has ``window`` steps to take effect. The metric
    ``health/<signal>/<actor>`` is the window's mean, ``health/unhealthy`` the number of unhealthy ones.
    """

    name = "health"

    def __init__(
        self, signals: Mapping[str, Signal], actions: Mapping[str, Mapping[str, Action]], *, window: int
    ) -> None:
        self.signals, self.actions, self.window = dict(signals), actions, window
        self.healthy_step: int | None = None
        self._recent: dict[str, Series] = {name: {} for name in signals}
        self._first: dict[str, dict[str, Sums]] = {name: {} for name in signals}
        self._warned: set[str] = set()

    async def on_start(self, trainer: TrainerView) -> None:
        """Save a first checkpoint if an action rolls back, so that one exists from the start."""
        rolls_back = any(
            isinstance(action, RestoreCheckpoint) for chosen in self.actions.values() for action in chosen.values()
        )
        if rolls_back and self.healthy_step is None:
            self.healthy_step = trainer.progress.step
            trainer.save()

    async def after_step(self, trainer: TrainerView, results: Sequence[GenerateResult]) -> dict[str, float]:
        # Add this step's observations to the windows.
        for name, signal in self.signals.items():
            measured = signal.measure(results)
            if not measured and trainer.progress.step == 1:
                trainer.log.note(f"health: signal {name!r} finds nothing to measure in this task")
            for actor, sums in measured.items():
                self._recent[name].setdefault(actor, []).append(sums)
                del self._recent[name][actor][: -self.window]
        # Judge the windows, warn about each newly unhealthy actor, and act.
        metrics, ill = self._judged()
        metrics["health/unhealthy"] = len(ill)
        for (name, actor), reason in ill.items():
            if f"{name}/{actor}" not in self._warned:
                trainer.log.warn(trainer.progress.step, f"unhealthy {name} of {actor}: {reason}")
        self._warned = {f"{name}/{actor}" for name, actor in ill}
        await self._act({name for name, _ in ill}, trainer)
        # A step is healthy if some window is full and none is unhealthy; the trainer saves its checkpoint after this.
        every = trainer.config.checkpoint.every
        if not ill and len(metrics) > 1 and every and trainer.progress.step % every == 0:
            self.healthy_step = trainer.progress.step
        return metrics

    def _judged(self) -> tuple[dict[str, float], dict[tuple[str, str], str]]:
        """Return the means of all full windows, and the problem of each unhealthy actor."""
        metrics: dict[str, float] = {}
        ill: dict[tuple[str, str], str] = {}
        for name, series in self._recent.items():
            for actor, steps in series.items():
                if len(steps) < self.window:
                    continue
                sums = reduce(Sums.plus, steps)
                metrics[f"health/{name}/{actor}"] = sums.mean
                first = self._first[name].setdefault(actor, sums)
                if (reason := self.signals[name].judge(sums, first)) is not None:
                    ill[name, actor] = reason
        return metrics, ill

    async def _act(self, ill: Collection[str], trainer: TrainerView) -> None:
        """Take each action of the unhealthy signals once, in the order of the configuration."""
        wanted = {kind: action for name in self.signals if name in ill for kind, action in self.actions[name].items()}
        for kind, action in wanted.items():
            done = await action.apply(trainer, self.healthy_step)
            trainer.log.warn(trainer.progress.step, f"{kind}: {done}")
        if wanted:
            self._recent = {name: {} for name in self.signals}

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
            "first": {
                name: {actor: astuple(sums) for actor, sums in found.items()} for name, found in self._first.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore the windows; signals that are new in the configuration start empty."""
        self.healthy_step, self._warned = state["healthy_step"], set(state["warned"])
        for name in self.signals:
            recent, first = state["recent"].get(name, {}), state["first"].get(name, {})
            self._recent[name] = {actor: [Sums(*sums) for sums in steps] for actor, steps in recent.items()}
            self._first[name] = {actor: Sums(*sums) for actor, sums in first.items()}
