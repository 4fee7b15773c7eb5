"""Builds a health guard from a configuration, and lists the configuration's problems."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.health.actions import ACTIONS, Action
from turnwise.train.health.guard import Guard
from turnwise.train.health.signals import SIGNALS, Signal
from turnwise.utils.registry import build_with_options, import_class


def check_health(config: TrainConfig, seats: Sequence[str]) -> list[str]:
    """List the problems that keep the guard of ``config`` from watching, one line each."""
    problems = []
    for name in config.health.signals:
        try:
            _signal(config, name, seats)
            _actions(config, name)
        except ConfigError as error:
            problems.append(str(error))
    if "restore_checkpoint" in config.health.actions() and not config.checkpoint.every:
        problems.append("config key 'health.signals': the action restore_checkpoint needs checkpoint.every > 0")
    return problems


def build_guard(config: TrainConfig, seats: Sequence[str]) -> Guard | None:
    """Return the guard of ``config``, or ``None`` if no signal is watched. Raises :class:`ConfigError`."""
    if not config.health.signals:
        return None
    signals = {name: _signal(config, name, seats) for name in config.health.signals}
    actions = {name: _actions(config, name) for name in config.health.signals}
    return Guard(signals, actions, window=config.health.window)


def _signal(config: TrainConfig, name: str, seats: Sequence[str]) -> Signal:
    try:
        like = "turnwise.train.health.signals.Signal"
        kind = import_class(SIGNALS, name, f"health.signals.{name}", methods=["measure", "judge"], like=like)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    signal: Signal = kind(config.health.signals[name].threshold, seats)
    return signal


def _actions(config: TrainConfig, name: str) -> dict[str, Action]:
    key = f"health.signals.{name}.actions"
    try:
        return {
            kind: build_with_options(
                import_class(ACTIONS, kind, key, methods=["apply"], like="turnwise.train.health.actions.Action"),
                options,
                f"{key}.{kind}",
            )
            for kind, options in config.health.signals[name].actions.items()
        }
    except ValueError as error:
        raise ConfigError(str(error)) from error
