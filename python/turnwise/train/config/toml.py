"""Reads a training configuration from TOML and dotted overrides, and writes it back; each problem becomes one line."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from turnwise.train.config import nulls
from turnwise.train.config.policies import OptimizerConfig, PolicyConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.utils.files import expanded, parse_toml, read_regular
from turnwise.utils.registry import code_files, did_you_mean
from turnwise.utils.values import problem

EXTENDS = "extends"
"""Key of a config file that names another file, relative to this one, whose settings it overrides."""

CONFIG_FILE = "config.toml"
"""File in a run folder with the resolved configuration."""


class ConfigError(ValueError):
    """An invalid configuration: the message names the key, its value and what was expected."""


@contextmanager
def told_by_key(
    key: str, value: Any = ..., errors: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Turn an error of the block into a :class:`ConfigError` that names ``key``."""
    try:
        yield
    except errors as error:
        raise ConfigError(problem(key, error, value)) from error


class Problems:
    """Collects configuration errors from several places, so that a user sees all of them at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Collect the lines of a :class:`ConfigError` that the block raises, and continue after the block."""
        try:
            yield
        except ConfigError as error:
            self.lines += str(error).splitlines()

    def raise_any(self) -> None:
        """Raise one :class:`ConfigError` with all collected lines, if there are any."""
        if self.lines:
            raise ConfigError("\n".join(dict.fromkeys(self.lines)))


def raw_settings(
    path: str | Path | None, overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()
) -> dict[str, Any]:
    """Return the settings of a file and its overrides as plain data, values as written; imports nothing."""
    data = {} if path is None else _read(expanded(Path(path)), ())
    for key, value in dict(overrides).items():
        set_value(data, split_key(key), value)
    return data


def parse_settings(data: Mapping[str, Any]) -> TrainConfig:
    """Check plain data key by key; every problem becomes one line of a :class:`ConfigError`."""
    try:
        return TrainConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(explain_problem(problem) for problem in error.errors())) from None


def _read(file: Path, before: tuple[Path, ...]) -> dict[str, Any]:
    """Return the settings of ``file`` merged over those of the file that it extends.

    ``before`` are the files that extend this one, directly or through others.
    """
    if file.resolve() in before:
        raise ConfigError(f"config file {str(file)!r} extends itself: {' -> '.join(map(str, before))}")
    try:
        data = parse_toml(read_regular(file, follow=True).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"config file {str(file)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(file)!r} can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {str(file)!r} is not valid TOML: {error}") from None
    try:
        data = nulls.restore(data)
    except ValueError as error:
        raise ConfigError(f"config file {str(file)!r}: {error}") from None
    parent = data.pop(EXTENDS, None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise ConfigError(f"config file {str(file)!r}: {EXTENDS} = {parent!r}: expected the name of a file")
    return _merged(_read(file.parent / expanded(parent), (*before, file.resolve())), data)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge ``above`` over ``below``, table by table."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def split_key(dotted: str) -> list[str]:
    """Split a dotted key. ``warm-start.steps`` means ``warm_start.steps``; names of policies keep their dashes."""
    return dotted.split(".") if dotted.startswith("policies.") else dotted.replace("-", "_").split(".")


def set_value(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set ``data[keys[0]][keys[1]]...``, and create missing tables."""
    *parents, leaf = keys
    for name in parents:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {'.'.join(keys)!r}: {name!r} is not a section")
    data[leaf] = value


def explain_problem(found: Mapping[str, Any]) -> str:
    """Turn an entry of pydantic's ``ValidationError`` into one line."""
    path = [str(part) for part in found["loc"]]
    if found["type"] == "extra_forbidden":
        return f"unknown config key {'.'.join(path)!r}; {did_you_mean(path[-1], _known_keys(path[:-1]))}"
    return problem(".".join(path), found["msg"], found["input"])


def _known_keys(parents: list[str]) -> list[str]:
    """Return the keys of the table at ``parents``, which may contain names of policies and numbers of phases."""
    section: type[BaseModel] = TrainConfig
    for name in parents:
        if name not in section.model_fields:
            continue
        if (section, name) == (PolicyConfig, "optimizer"):
            return list(OptimizerConfig.model_fields)
        if (below := section_in(section.model_fields[name].annotation)) is not None:
            section = below
    return list(section.model_fields)


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in an annotation such as ``dict[str, PolicyConfig]`` or ``LoraConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = (section_in(argument) for argument in get_args(annotation))
    return next((section for section in sections if section is not None), None)


def to_toml(config: TrainConfig) -> str:
    """Return the resolved configuration as TOML; ``load_config`` reads it back to an equal one.

    Its section ``code`` has the files of the modules that the configuration names.
    """
    data = config.model_dump(mode="json", exclude_none=True)
    if code := {**data.pop("code"), **code_files(data)}:
        data["code"] = code
    return nulls.dumps(data)


def same(one: Any, other: Any) -> bool:
    """Return True for equal plain values. NaN equals itself here, as no setting changed, and so do two paths to one
    file or folder, such as ``models/a`` and ``/data/models/a``."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return bool(one == other) or (isinstance(one, str) and isinstance(other, str) and _is_same_path(one, other))


def _is_same_path(before: str, now: str) -> bool:
    try:
        return os.path.samefile(before, now)
    except (OSError, ValueError):  # no such file, or no path at all
        return False


def leaves(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values below ``data`` by their dotted keys, each behind ``above``."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= leaves(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found
