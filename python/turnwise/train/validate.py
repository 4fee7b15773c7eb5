"""Loads a configuration: parses overrides by the types of their keys. Checks that keys, and parts of a trainer, fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import ValidationError

from turnwise.credit import registry as credit_rules
from turnwise.settings.section import RunFacts, TaskFacts, conflicts_of
from turnwise.train.config.optimization import LossConfig
from turnwise.train.config.policies import OptimizerConfig
from turnwise.train.config.rewards import CreditConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import (
    ConfigError,
    explain_problem,
    parse_settings,
    raw_settings,
    section_in,
    set_value,
    split_key,
)
from turnwise.types import ClientCapabilities, TaskCapabilities, capabilities_of
from turnwise.utils.code_files import import_recorded
from turnwise.utils.literals import literal
from turnwise.utils.registry import import_by_name, option_types
from turnwise.utils.values import problem

if TYPE_CHECKING:
    from turnwise.arena import Arena
    from turnwise.train.eval.ablate import EvalSet

TaskTypes = Callable[[str], Any]
"""Maps the name of a task to its class, as ``turnwise.tasks.task_type`` does."""


def load_config(
    path: str | Path | None,
    overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    *,
    task_type: TaskTypes | None = None,
) -> TrainConfig:
    """Read a TOML file (``None``: defaults only) and apply dotted overrides such as ``("update.lr", "1e-4")``.

    A file with ``extends = "other.toml"`` starts from that file. Text values of overrides are parsed by the type of
    their key (:func:`turnwise.utils.literals.literal`). Options of a task, and of the credit rule that the task names,
    have types only if ``task_type`` finds the task's class. Raises :class:`ConfigError` naming the file, or every wrong
    key.
    """
    return check_contradictions(read_config(path, overrides, task_type=task_type))


def config_from_dict(data: Mapping[str, Any]) -> TrainConfig:
    """Validate plain data; each problem becomes one line of a :class:`ConfigError`."""
    return check_contradictions(parse_settings(data))


def check_contradictions(config: TrainConfig) -> TrainConfig:
    """Return ``config``. Raises :class:`ConfigError` with one line for each of its :func:`contradictions`."""
    if problems := contradictions(config):
        raise ConfigError("\n".join(problems))
    return config


def check_parts(
    arena: Arena, policies: Collection[str], config: TrainConfig, validation: EvalSet | None = None
) -> None:
    """Raise ``ValueError`` unless ``arena`` and ``validation`` are what a trainer of ``policies`` needs."""
    client = capabilities_of(arena.client, ClientCapabilities)
    for actor in arena.actors.values():
        if actor.policy not in {*policies, *client.fixed_policies}:
            raise ValueError(f"actor {actor.id!r} plays with policy {actor.policy!r}; policies: {', '.join(policies)}")
    if config.loop.max_staleness and client.shares_weights:
        raise ValueError(
            f"loop.max_staleness={config.loop.max_staleness}: expected a client with its own copy of the weights, "
            "as sampling goes on while the trainer updates its modules. Make the client with share=False"
        )
    if config.eval.ablate and validation is not None and not validation.ablations:
        why = "expected the validation set's ablations, as in EvalSet(requests, metric, ablations=...)"
        raise ConfigError(problem("eval.ablate", why, True))


def read_config(
    path: str | Path | None,
    overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    *,
    task_type: TaskTypes | None = None,
    import_code: bool = True,
) -> TrainConfig:
    """Load as :func:`load_config` does, without the check for :func:`contradictions`.

    It is for callers that report contradictions together with other errors. Without ``import_code`` nothing is
    imported; options of ``"module:Name"`` then have no types.
    """
    data = raw_settings(path, overrides)
    importable = data if import_code else _without_code(data)
    code = data.get("code", {})
    for module, file in code.items() if import_code and isinstance(code, dict) else ():
        import_recorded(module, str(file))
    for key, value in dict(overrides).items():  # types of options are known only after all keys are set
        if isinstance(value, str):
            keys = split_key(key)
            set_value(data, keys, literal(value, _expected_at(keys, importable, task_type)))
    return parse_settings(data)


def contradictions(
    config: TrainConfig, ranks: int = 1, task: TaskFacts | None = None, *, trains: bool = False
) -> list[str]:
    """Return one line for each problem of keys that are valid alone but don't fit together, or don't fit the ``task``.

    ``ranks`` processes train. With ``trains`` also return what would stop the first step.
    """
    # These rooms build what a key names, and one tries the loss with torch: reading a config needs none of them.
    from turnwise.arena.stages.registry import stage_problems
    from turnwise.train.health.guard import signal_problems
    from turnwise.train.league.build import matchmaker_problems
    from turnwise.train.learner.tinker.wire import unserved_loss
    from turnwise.train.terms.registry import loss_problems, terms_on

    asked: tuple[Callable[[RunFacts], Iterable[str]], ...] = (
        conflicts_of,
        loss_problems,
        stage_problems,
        unserved_loss,
        matchmaker_problems,
        signal_problems,
    )
    problems: list[str] = []
    for name in config.policies:
        try:
            config.optimizer_of(name)
        except ValidationError as error:
            at = ("policies", name, "optimizer")
            problems += [explain_problem({**problem, "loc": (*at, *problem["loc"])}) for problem in error.errors()]
    alone = any(term.trains_alone for term in terms_on(config.loss)) or bool(config.teachers())
    run = RunFacts(config=config, ranks=ranks, task=task, trains=trains, trains_alone=alone)
    return list(dict.fromkeys([*problems, *(line for ask in asked for line in ask(run))]))


# -- Expected values of keys -------------------------------------------------------------------------------------------
def _expected_at(keys: Sequence[str], data: Mapping[str, Any], task_type: TaskTypes | None) -> Any:
    """Return the type of the value at ``keys``, a section's field or an option of a class that the config names.

    Returns ``Any`` if neither declares a type.
    """
    expected: Any = TrainConfig
    for depth, key in enumerate(keys):
        options = _options_at(tuple(keys[:depth]), data, task_type)
        if options is not None:
            expected = options.get(key, Any)
        elif (section := section_in(expected)) is not None and get_origin(expected) is not dict:
            expected = option_types(section).get(key, Any)
        else:
            expected = get_args(expected)[-1] if get_origin(expected) is dict else Any
        if get_origin(expected) is Annotated:
            expected = get_args(expected)[0]
    return expected


def _options_at(keys: tuple[str, ...], data: Mapping[str, Any], task_type: TaskTypes | None) -> dict[str, Any] | None:
    """Return the types of the options in the table at ``keys``, by name; ``None`` for a section."""
    # Each table of options belongs to a class: optimizer, task, credit rule or loss.
    task = str(data.get("task", TrainConfig().task))
    try:
        match keys:
            case ("policies", _, "optimizer"):
                return option_types(OptimizerConfig)
            case ("task_options",) if task_type is not None:
                return option_types(task_type(task).options_type)
            case ("tasks", name, *inner, "options") if inner in ([], ["credit"]):  # of one task among several
                one = data["tasks"].get(name) or {}
                own = ("credit", "options") if inner else ("task_options",)
                return _options_at(own, {**one, "task": one.get("task", name)}, task_type)
            case ("credit", "options"):
                rule = str(data["credit"].get("rule", CreditConfig().rule))
                if rule == "task":
                    rule = capabilities_of(task_type and task_type(task), TaskCapabilities).credit_rule
                return option_types(import_by_name(credit_rules, rule, "credit.rule"))
            case ("loss", "options"):
                from turnwise.train.terms.loss_types import find_loss

                return option_types(find_loss(str(data["loss"].get("type", LossConfig().type))))
    except ValueError:  # unknown task, rule or loss: its builder reports it
        return {}
    return None


def _without_code(settings: Any) -> Any:
    """Return ``settings`` with an empty string for each ``module:Name`` that would have to be imported."""
    match settings:
        case dict():
            return {key: _without_code(value) for key, value in settings.items()}
        case str() if ":" in settings:
            return ""
    return settings
