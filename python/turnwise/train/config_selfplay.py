"""What self-play can be told: who plays past policies, and what is watched over."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from turnwise.train.config_base import Section


class LeagueConfig(Section):
    """Games against past policies; ``share = 0`` plays none.

    Of the questions of a step, ``share`` are played against snapshots of the policies, each question once from each
    seat. A snapshot is taken before the first step and after every ``every`` steps; the newest ``size`` stay.
    ``opponents`` is how they are chosen: its name in ``turnwise.train.league.MATCHMAKERS``, or ``"module:Class"``, with
    the arguments of its class in ``options``. ``at_once`` of them play in one step at most: so many frozen copies the
    client holds, or adapters.
    """

    share: float = Field(default=0.0, ge=0, le=1)
    opponents: str = "prioritised"
    options: dict[str, Any] = Field(default_factory=dict)
    every: int = Field(default=10, ge=1)
    size: int = Field(default=32, ge=1)
    at_once: int = Field(default=4, ge=1)


class SignalConfig(Section):
    """One thing that is watched over: from which value on it is unhealthy (by default the signal's own), and the
    actions that are then taken, each by its name in ``turnwise.train.health.ACTIONS`` with its options."""

    threshold: float | None = None
    actions: dict[str, dict[str, Any]] = Field(default_factory=dict)


class HealthConfig(Section):
    """Watches training for what goes wrong in self-play; without ``signals`` nothing is watched.

    ``signals`` by their names in ``turnwise.train.health.SIGNALS``. Each is judged over the last ``window`` steps, once
    there are so many.
    """

    window: int = Field(default=10, ge=1)
    signals: dict[str, SignalConfig] = Field(default_factory=dict)

    def actions(self) -> set[str]:
        """The names of all actions that a signal may ask for."""
        return {name for signal in self.signals.values() for name in signal.actions}
