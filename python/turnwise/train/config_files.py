"""A training configuration from TOML and dotted overrides, and back; every problem of it becomes one line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from turnwise.command_words import literal
from turnwise.credit import registry as credit_rules
from turnwise.naming import find, nearest, option_types
from turnwise.train.config import DEFAULT_CREDIT, CreditConfig, LossConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise.train.loss import check_loss
from turnwise.train.losses import find_loss

EXTENDS = "extends"
"""The key of a config file that names another one, relative to it, whose settings it takes and overrides."""


CONFIG_FILE = "config.toml"
"""What a run folder keeps of its configuration, resolved."""


class ConfigError(ValueError):
    """A configuration that can't be used: the message names the key, its value and what was expected."""


class Problems:
    """Gathers what is wrong in several places, so that a user hears all of it at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the lines of a :class:`ConfigError` that is raised within, and go on after the block."""
        try:
            yield
        except ConfigError as error:
            self.lines += str(error).splitlines()

    def raise_any(self) -> None:
        """Raise one :class:`ConfigError` with all lines, if there are any."""
        if self.lines:
            raise ConfigError("\n".join(self.lines))


TaskTypes = Callable[[str], Any]
"""From the name of a task to its class, as :func:`turnwise.tasks.task_type` finds it: tasks are a room beside this."""


def load_config(
    path: str | Path | None,
    overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    *,
    task_type: TaskTypes | None = None,
) -> TrainConfig:
    """Read a TOML file (``None``: defaults only) and apply dotted overrides such as ``("update.lr", "1e-4")``.

    A file with ``extends = "other.toml"`` starts from that one. Override values given as text are read as the key
    expects them (:func:`turnwise.command_words.literal`): ``none`` is the word where it is a choice, else ``None``.
    Options of a task, and of the credit rule that it names, have types only where ``task_type`` finds its class.
    Raises :class:`ConfigError` naming the file, or every key that is wrong.
    """
    return _consistent(read_config(path, overrides, task_type=task_type))


def read_config(
    path: str | Path | None,
    overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    *,
    task_type: TaskTypes | None = None,
    import_code: bool = True,
) -> TrainConfig:
    """:func:`load_config` without :func:`contradictions`, for a caller that asks for them with all else.

    Without ``import_code`` options of what is named by ``"module:Name"`` have no types, and nothing is imported.
    """
    data = raw_settings(path, overrides)
    named = data if import_code else _without_code(data)
    for key, value in dict(overrides).items():  # only now is it known which rule or task an option is for
        if isinstance(value, str):
            keys = _keys(key)
            _put(data, keys, literal(value, _expected_at(keys, named, task_type)))
    return _valid(data)


def raw_settings(
    path: str | Path | None, overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()
) -> dict[str, Any]:
    """What :func:`read_config` reads, before texts have types: nothing is imported."""
    data = {} if path is None else _read(Path(path), ())
    for key, value in dict(overrides).items():
        _put(data, _keys(key), value)
    return data


def config_from_dict(data: Mapping[str, Any]) -> TrainConfig:
    """Validate plain data; every problem becomes one line of a :class:`ConfigError`."""
    return _consistent(_valid(data))


def _valid(data: Mapping[str, Any]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def _consistent(config: TrainConfig) -> TrainConfig:
    if problems := contradictions(config):
        raise ConfigError("\n".join(problems))
    return config


def contradictions(config: TrainConfig) -> list[str]:
    """What can't hold together of a configuration whose keys are fine one by one; a line each."""
    problems = []
    for name in config.policies:
        try:
            config.optimizer_of(name)
        except ValidationError as error:
            at = ("policies", name, "optimizer")
            problems += [_explain({**problem, "loc": (*at, *problem["loc"])}) for problem in error.errors()]
    problems += [
        f"config key 'policies.{name}': the name becomes that of files: expected letters, digits, '_', '-' and '.'"
        for name in config.policies
        if not re.fullmatch(r"\w[\w.-]*", name)
    ]
    correction, update = config.loss.correction, config.update
    if correction is not None and update.old_logprobs != "recompute":
        problems.append(
            "config key 'loss.correction': the weights compare the trainer's log-probs with the sampler's, so it needs "
            "update.old_logprobs = 'recompute'"
        )
    if config.warm_start.min_reward is not None and config.warm_start.data is None:
        problems.append("config key 'warm_start.min_reward': needs warm_start.data, recorded episodes to choose from")
    if config.loss.kl.target is not None and not config.loss.kl.coef:
        problems.append("config key 'loss.kl.target': needs loss.kl.coef > 0, the coefficient that it starts from")
    problems += check_loss(config.loss)
    if config.checkpoint.best and not config.eval.every:
        problems.append("config key 'checkpoint.best' = True: needs eval.every > 0, as validation tells the best")
    if config.checkpoint.episodes and config.loop.max_staleness:
        problems.append("config key 'checkpoint.episodes' = True: needs loop.max_staleness = 0")
    if config.loop.deterministic and config.rollout.client != "transformers":
        problems.append(
            "config key 'loop.deterministic' = True: vLLM takes requests in by the clock, so log-probs differ in their "
            "last bits; use rollout.client = 'transformers'"
        )
    return problems


def _read(file: Path, before: tuple[Path, ...]) -> dict[str, Any]:
    """The settings of ``file`` over those of the one that it extends; ``before`` are the files that led here."""
    if file.resolve() in before:
        raise ConfigError(f"config file {str(file)!r} extends itself: {' -> '.join(map(str, before))}")
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {str(file)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(file)!r} can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {str(file)!r} is not valid TOML: {error}") from None
    parent = data.pop(EXTENDS, None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise ConfigError(f"config file {str(file)!r}: {EXTENDS} = {parent!r}: expected the name of a file")
    return _merged(_read(file.parent / parent, (*before, file.resolve())), data)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``, table by table."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _without_code(settings: Any) -> Any:
    """``settings`` in which nothing is named that would have to be imported."""
    if isinstance(settings, dict):
        return {key: _without_code(value) for key, value in settings.items()}
    return "" if isinstance(settings, str) and ":" in settings else settings


def _keys(dotted: str) -> list[str]:
    """``warm-start.steps`` is ``warm_start.steps``, but a policy's name is the user's own."""
    return dotted.split(".") if dotted.startswith("policies.") else dotted.replace("-", "_").split(".")


def _put(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set ``data[...][leaf]``."""
    *parents, leaf = keys
    for name in parents:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {'.'.join(keys)!r}: {name!r} is not a section")
    data[leaf] = value


# ---------------------------------------------------------------------------------------------------------------------
# What a key expects
# ---------------------------------------------------------------------------------------------------------------------
def _expected_at(keys: Sequence[str], data: Mapping[str, Any], task_type: TaskTypes | None) -> Any:
    """The type of the value at ``keys`` of the configuration ``data``: a section's field, an option of what the section
    names. ``Any`` where nothing says it."""
    found: Any = TrainConfig
    for place, key in enumerate(keys):
        options = _options_at(tuple(keys[:place]), data, task_type)
        if options is not None:
            found = options.get(key, Any)
        elif (section := _section_in(found)) is not None and get_origin(found) is not dict:
            found = option_types(section).get(key, Any)
        else:
            found = get_args(found)[-1] if get_origin(found) is dict else Any
        if get_origin(found) is Annotated:
            found = get_args(found)[0]
    return found


def _options_at(keys: tuple[str, ...], data: Mapping[str, Any], task_type: TaskTypes | None) -> dict[str, Any] | None:
    """The types of the options in the table at ``keys``, by name; ``None`` for a table of another kind."""
    task = str(data.get("task", TrainConfig().task))
    if keys[:1] == ("policies",) and keys[2:] == ("optimizer",):
        return option_types(OptimizerConfig)
    try:
        if keys == ("task_options",) and task_type is not None:
            return option_types(task_type(task).options_type)
        if keys == ("credit", "options"):
            rule = str(data["credit"].get("rule", CreditConfig().rule))
            if rule == "task":
                rule = getattr(task_type and task_type(task), "credit_rule", DEFAULT_CREDIT)
            return option_types(find(credit_rules, rule, "credit.rule"))
        if keys == ("loss", "options"):
            return option_types(find_loss(str(data["loss"].get("kind", LossConfig().kind))))
    except ValueError:  # no such task, rule or loss: what builds it says so
        return {}
    return None


def _explain(problem: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return f"unknown config key {'.'.join(path)!r}; {nearest(path[-1], _known_keys(path[:-1]))}"
    return f"config key {'.'.join(path)!r} = {problem['input']!r}: {problem['msg']}"


def _known_keys(parents: list[str]) -> list[str]:
    """The keys of the table at ``parents``: policies and phases have names or numbers of the user's choice between."""
    section: type[BaseModel] = TrainConfig
    for name in parents:
        if name not in section.model_fields:
            continue
        if (section, name) == (PolicyConfig, "optimizer"):
            return list(OptimizerConfig.model_fields)
        if (below := _section_in(section.model_fields[name].annotation)) is not None:
            section = below
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class in an annotation such as ``dict[str, PolicyConfig]`` or ``LoraConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)


def to_toml(config: TrainConfig) -> str:
    """The resolved configuration as TOML, which :func:`load_config` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def differences(file: Path, config: TrainConfig) -> list[str]:
    """Where ``config`` is not what :func:`to_toml` once wrote to ``file``, as ``"update.lr 0.001 -> 0.01"``.

    Nothing where the file is not there, or not TOML: then it tells nothing.
    """
    try:
        before = _leaves(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    now = _leaves(tomllib.loads(to_toml(config)))
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    return [f"{key} {before.get(key, 'unset')} -> {now.get(key, 'unset')}" for key in keys]


def _leaves(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in data.items():
        leaves |= _leaves(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return leaves
