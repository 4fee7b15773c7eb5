"""The terms that bring settings of their own. Each is one file, which a line here adds to the package; stages are in
:data:`turnwise.arena.stages.registry.STAGES`.

The config's classes are built with the settings of the features, so this module imports these by their names, and a
feature's file imports no other section of the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, TypeVar, cast

from turnwise.arena.stages.registry import STAGES
from turnwise.arena.stages.registry import classes as stage_classes
from turnwise.settings.section import RunFacts, Section
from turnwise.utils.registry import classes_in

S = TypeVar("S", bound=Section)

FEATURES = (
    "columns.observations:Observations",
    "baseline:OptimalTokenBaseline",
    "columns.routing_replay:RoutingReplay",
    "columns.sampling_mask:SamplingMasks",
)
"""Modules of ``turnwise.train.terms`` and their classes, in the order of their terms. A line is all that adds one."""


def term_classes(terms: tuple[str, ...]) -> tuple[type[Any], ...]:
    """Import the classes of a list of terms."""
    return classes_in("turnwise.train.terms", terms)


def settings_of(section: str) -> list[type[Section]]:
    """Return the classes with the fields that terms and stages add to ``section`` of the config."""
    owners = (*term_classes(FEATURES), *stage_classes(STAGES))
    return [owner.settings[section] for owner in owners if section in owner.settings]


_open: set[str] = set()


def check_sections() -> None:
    """Raise ``ValueError`` for a term or a stage with fields for a section that takes none."""
    for owner in (*term_classes(FEATURES), *stage_classes(STAGES)):
        if unknown := owner.settings.keys() - _open:
            raise ValueError(f"{owner.__name__}.settings: {sorted(unknown)}: expected sections among {sorted(_open)}")


def with_features(section: str) -> Callable[[type[S]], type[S]]:
    """Decorate the class of ``section``: the fields of features follow its own, with their rules and conflicts."""
    parts = settings_of(section)
    _open.add(section)

    def decorate(own: type[S]) -> type[S]:
        classes: list[type[Section]] = [own, *parts]
        counts = Counter(name for one in classes for name in one.model_fields)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            owners = [one.__name__ for one in classes if one.model_fields.keys() & set(twice)]
            raise ValueError(f"config section {section!r}: {owners} have the fields {twice}: expected one each")

        def conflicts(self: Any, run: RunFacts, key: str) -> Iterator[str]:
            for one in classes:
                yield from one.conflicts(self, run, key)

        rules = {key: effect for one in classes for key, effect in one.at_resume.items()}
        body = {"__module__": own.__module__, "__doc__": own.__doc__, "conflicts": conflicts, "at_resume": rules}
        kind: Any = type(own)
        return cast("type[S]", kind(own.__name__, (*reversed(parts), own), body))

    return decorate


def required(config: Any) -> dict[str, str]:
    """Return the columns that the run's client must return, each with the config key that asks for it.

    Each is also the name of an option of the client.
    """
    asked = {name: key for term in term_classes(FEATURES) for name, key in term.requires.items()}
    return {name: key for name, key in asked.items() if reduce(getattr, key.split("."), config)}


def required_options(config: Any) -> dict[str, Any]:
    """Return the options of these columns as arguments of a client."""
    return dict.fromkeys(required(config), True)
