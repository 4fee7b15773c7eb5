"""Changes of a run's settings at a resume: each one applies, is kept as the checkpoint has it, or is refused.

The section that owns a key decides (:attr:`~turnwise.settings.section.Section.at_resume`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.settings.section import APPLIES, Change, Effect, Section
from turnwise.train.config import nulls
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, leaves, parse_settings, same, to_toml
from turnwise.utils.files import parse_toml

_ANEW = "Choose another run_dir to start anew"
_UNSAID = ("run_dir",)
"""Keys that say where a run is, and not how it goes."""


@dataclass(slots=True)
class Resumed:
    """The settings with which a run goes on, and what to say about those that differ from the checkpoint's."""

    config: TrainConfig
    changed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def or_raise(self) -> TrainConfig:
        """Return the config. Raises :class:`~turnwise.train.config.toml.ConfigError` for changes that are refused."""
        if self.refused:
            raise ConfigError("\n".join(self.refused))
        return self.config


def resumed(config: TrainConfig, saved: str | None) -> Resumed:
    """Compare ``config`` with the settings ``saved`` in a checkpoint, the text of
    :func:`~turnwise.train.config.toml.to_toml`."""
    done = Resumed(config)
    if saved is None:
        return done
    try:
        before = parse_settings(nulls.restore(parse_toml(saved)))
    except (ValueError, ConfigError) as error:
        done.changed.append(f"the checkpoint's settings can't be read, so what has changed is not known: {error}")
        return done
    # Compare as they are written, so that a value and its spelling in TOML are equal.
    now = parse_settings(nulls.restore(parse_toml(to_toml(config))))
    applied: list[str] = []
    for change, effect in _effects(before, now):
        if effect.kind == "refused":
            was = f"it was {_shown(change.before)}: {effect.reason}. {_ANEW}"
            done.refused.append(f"config key {change.key!r} = {_shown(change.now)}: {was}")
        elif effect.kind == "kept":
            done.config = _with(done.config, change.key.split("."), change.before)
            why = f"{effect.reason}. {_ANEW}"
            done.kept.append(f"kept from the checkpoint: {change.key} = {_shown(change.before)}, {why}")
        else:
            applied += [f"{key} {one} -> {other}" for key, one, other in _leaves_of(change)]
    if applied:
        done.changed = [f"settings changed since then: {', '.join(applied)}", *_falling_rates(before, config)]
    return done


def _effects(saved: TrainConfig, run: TrainConfig) -> Iterator[tuple[Change, Effect]]:
    def within(before: Section, now: Section, above: str) -> Iterator[tuple[Change, Effect]]:
        for name in type(now).model_fields:
            yield from pair(type(now), name, above + name, getattr(before, name), getattr(now, name))

    def pair(owner: type[Section], name: str, key: str, before: Any, now: Any) -> Iterator[tuple[Change, Effect]]:
        if isinstance(before, Section) and isinstance(now, Section) and type(before) is type(now):
            yield from within(before, now, f"{key}.")
        elif isinstance(before, dict) and isinstance(now, dict) and _has_sections(before, now):
            for each in dict.fromkeys([*before, *now]):
                yield from pair(owner, name, f"{key}.{each}", before.get(each), now.get(each))
        elif not same(_plain(before), _plain(now)) and name not in _UNSAID:
            change = Change(key, before, now, saved, run)
            rule = owner.at_resume.get(name, owner.at_resume.get("*", APPLIES))
            yield change, rule if isinstance(rule, Effect) else rule(change)

    yield from within(saved, run, "")


def _has_sections(*tables: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Section) for table in tables for value in table.values())


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _leaves_of(change: Change) -> list[tuple[str, Any, Any]]:
    """Return ``(key, before, now)`` of each value below a changed key."""
    before, now = _plain(change.before), _plain(change.now)
    if not isinstance(before, dict) and not isinstance(now, dict):
        return [(change.key, _shown(before), _shown(now))]
    one, other = (leaves(each, f"{change.key}.") if isinstance(each, dict) else {} for each in (before, now))
    keys = [key for key in dict.fromkeys([*one, *other]) if not same(one.get(key), other.get(key))]
    return [(key, _shown(one.get(key)), _shown(other.get(key))) for key in keys]


def _shown(value: Any) -> str:
    return "unset" if value is None else "set" if isinstance(value, Section) else str(_plain(value))


def _with(config: Any, keys: list[str], value: Any) -> Any:
    """Return ``config`` with ``value`` at ``keys``; the names of tables may hold dots."""
    if isinstance(config, dict):
        name = next(name for name in config if ".".join(keys) == name or ".".join(keys).startswith(f"{name}."))
        rest = ".".join(keys)[len(name) + 1 :]
        return {**config, name: _with(config[name], rest.split("."), value) if rest else value}
    first, *rest_keys = keys
    return config.model_copy(update={first: _with(getattr(config, first), rest_keys, value) if rest_keys else value})


def _falling_rates(saved: TrainConfig, config: TrainConfig) -> list[str]:
    """Note rates that fall over all steps, if the number of steps has changed."""
    if saved.steps == config.steps:
        return []
    falling = [
        name
        for name, policy in config.policies.items()
        if policy.trainable and config.optimizer_of(name).min_lr_ratio < 1
    ]
    if not falling:
        return []
    return [
        f"the learning rate of {', '.join(map(repr, falling))} falls over all steps (min_lr_ratio < 1): the steps so "
        "far had other rates than in a run with the new number of steps from its start"
    ]
