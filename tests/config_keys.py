"""All keys of the config with their types, and other values of these types."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from turnwise.settings.section import Section
from turnwise.train.config.schema import TrainConfig


def keys_of(section: type[Section] = TrainConfig, above: str = "") -> dict[str, Any]:
    """Return the type of each key; tables of sections are those of the policy ``default``."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner = [each for each in (field.annotation, *get_args(field.annotation)) if isinstance(each, type)]
        sections = [each for each in inner if issubclass(each, Section)]
        if sections and name == "policies":
            found |= keys_of(sections[0], f"{above}policies.default.")
        elif sections and name not in ("tasks", "phases", "actors", "signals", "engines"):
            found |= keys_of(sections[0], f"{above}{name}.")
        else:
            found[above + name] = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return found


def choices_of(annotation: Any) -> Iterator[str]:
    """Yield the words that a key may have as its value, if it names them."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) in (Union, types.UnionType, Annotated):
        for each in get_args(annotation):
            yield from choices_of(each)


def another(annotation: Any, value: Any) -> Any:
    """Return a valid value of a key of type ``annotation`` that is not ``value``."""
    kind, bounds = annotation, ()
    if get_origin(annotation) is Annotated:
        kind, *bounds = get_args(annotation)
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        return another(Annotated[kinds[-1], *bounds] if bounds else kinds[-1], value)
    if get_origin(kind) is Literal:
        return next((each for each in get_args(kind) if each != value), value)
    if kind is bool:
        return not value
    if kind in (int, float):
        most = [each.le if isinstance(each, Le) else each.lt for each in bounds if isinstance(each, Le | Lt)]
        least = [each.ge if isinstance(each, Ge) else each.gt for each in bounds if isinstance(each, Ge | Gt)]
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else (least or [0])[0]
        tried = [number + 1, number + 0.25, number / 2, number - 0.25]
        return next(kind(each) for each in tried if each != number and (not most or each < most[0]))
    if get_origin(kind) in (list, tuple):
        return [another(each, 0) for each in get_args(kind)] if get_origin(kind) is tuple else ["other"]
    if get_origin(kind) is dict or kind is dict:
        return {"other": another(get_args(kind)[-1], None)}
    return "other"
