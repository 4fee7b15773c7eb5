"""Sections of self-play: the league of past policies, the check of the start, and the signals that are watched."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from turnwise.train.config.base import Section


class LeagueConfig(Section):
    """Games against snapshots of the policies, each question once from each seat."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Share of a step's games against snapshots of past policies; 0 plays none."""
    matchmaker: str = "prioritized"
    """Rule that chooses opponents: a name in ``turnwise.train.league.MATCHMAKERS``, or ``module:Class``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the matchmaker's class."""
    every: int = Field(default=10, ge=1)
    """Steps between two snapshots; one more is taken before the first step."""
    size: int = Field(default=32, ge=1)
    """Newest snapshots that stay."""
    opponents_per_step: int = Field(default=4, ge=1)
    """Different opponents in one step: copies, or adapters, that the client holds."""


class SignalConfig(Section):
    """One watched signal."""

    threshold: float | None = None
    """Value at which the signal becomes unhealthy; by default the signal's own."""
    actions: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Actions to take when it is unhealthy: names in ``turnwise.train.health.ACTIONS``, each with its options."""


class HealthConfig(Section):
    """Check of the starting policy, and signals that are watched during training, by default none."""

    start_questions: int = Field(default=64, ge=0)
    """Training questions of which the starting policy must solve one, or the run is refused; 0 starts all the same."""
    start_samples: int = Field(default=64, ge=1)
    """Most samples of each of these questions; the first success ends the check."""
    window: int = Field(default=10, ge=1)
    """Steps over which a signal is judged."""
    signals: dict[str, SignalConfig] = Field(default_factory=dict)
    """The watched signals, by their names in ``turnwise.train.health.SIGNALS``."""

    def actions(self) -> set[str]:
        """Return the names of all actions that a signal may ask for."""
        return {name for signal in self.signals.values() for name in signal.actions}
