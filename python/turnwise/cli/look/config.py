"""``turnwise config``: the reference of the config, generated from its models.

Types, ranges and defaults come from the fields of :class:`turnwise.train.TrainConfig`, descriptions from the string
below each field. ``scripts/docs_pages.py`` writes the same reference as docs/configuration.md.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from turnwise.cli.options import EXIT_OK
from turnwise.train import TrainConfig
from turnwise.utils.output import say

TOP = "top"
"""Name of the section for keys outside of any section."""

NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "any value"}
BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"), ("min_length", "at least"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Example: ``Key("update.lr", "number", "> 0", "1e-06", "Peak learning rate.")``"""

    name: str
    """Dotted name; ``NAME`` is a placeholder for a name that the user chooses, as in ``policies.NAME.path``."""
    type: str
    """Expected type, in words."""
    range: str
    """Bounds of the value, or empty."""
    default: str
    """Default as TOML writes it; ``unset`` for no value, ``required`` for none at all."""
    description: str
    """One line."""


@dataclass(frozen=True, slots=True)
class SectionEntry:
    """One section: its dotted name, one line, and its keys without those of the sections below."""

    name: str
    summary: str
    keys: tuple[Key, ...]


def run(options: argparse.Namespace) -> int:
    say(explain(options.key))
    return EXIT_OK


def explain(name: str | None = None) -> str:
    """Describe all sections, or one section, or one key. Raises ``ValueError`` that suggests the nearest name."""
    sections = {section.name: section for section in list_sections()}
    if name is None:
        return (
            f"Sections of a config file:\n{section_table(indent=2)}\n\n"
            "`turnwise config SECTION` lists the keys of a section, `turnwise config KEY` explains one."
        )
    # A section, else a key.
    wanted = name if name.startswith("policies.") else name.replace("-", "_")
    if section := next((entry for entry in sections.values() if _matches(entry.name, wanted)), None):
        inside = f"{section.name}."
        below = [(entry.name, entry.summary) for entry in sections.values() if entry.name.startswith(inside)]
        lines = [f"{section.name}: {section.summary}", "", *map(_key_lines, section.keys)]
        lines += ["", "sections below:", _table(below, indent=2)] if below else []
        return "\n".join(lines)
    keys = {key.name: key for section in sections.values() for key in section.keys}
    if key := next((key for key in keys.values() if _matches(key.name, wanted)), None):
        return _key_lines(key)

    # Compare a mistyped dotted name with whole names, and a bare one such as `lr` with their last parts.
    names = [*sections, *keys]
    last = {each.rpartition(".")[2] for each in names}
    leaves = difflib.get_close_matches(wanted.rpartition(".")[2], last, n=1)
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.8)
    near = near or [each for each in names if leaves and each.rpartition(".")[2] == leaves[0]]
    hint = f"did you mean {' or '.join(near)}?" if near else "`turnwise config` lists the sections"
    raise ValueError(f"KEY={name!r}: no such section or key; {hint}")


def section_table(indent: int) -> str:
    """Return a line for each section. It reads no source, as a command's help ends with it."""
    return _table([(name or TOP, _summary(model)) for model, name in _walk(TrainConfig)], indent)


def list_sections(model: type[BaseModel] = TrainConfig) -> Iterator[SectionEntry]:
    """Yield the section of ``model`` and every section below it."""
    for section, name in _walk(model):
        yield SectionEntry(name or TOP, _summary(section), tuple(_keys(section, name)))


def _walk(model: type[BaseModel], name: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yield ``model`` with its dotted ``name``, and then every section below it."""
    yield model, name
    dotted = f"{name}." if name else ""
    for field_name, field in model.model_fields.items():
        if (section := _section_in(field.annotation)) is not None:
            named = get_origin(field.annotation) is dict
            yield from _walk(section, f"{dotted}{field_name}{'.NAME' if named else ''}")


def _summary(model: type[BaseModel]) -> str:
    return _plain((model.__doc__ or "").strip().splitlines()[0])


def _keys(model: type[BaseModel], name: str) -> Iterator[Key]:
    """Yield the keys of a section, without those of the sections below."""
    dotted, descriptions = f"{name}." if name else "", _descriptions(model)
    for field_name, field in model.model_fields.items():
        if _section_in(field.annotation) is not None:
            continue
        bounds = [f"{sign} {_number(value)}" for sign, value in _bounds(field.metadata)]
        description = _plain(descriptions.get(field_name, ""))
        type_ = _type_name(field.annotation)
        yield Key(f"{dotted}{field_name}", type_, ", ".join(bounds), _default_text(field), description)


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------
def _matches(pattern: str, name: str) -> bool:
    """Return whether ``name`` is ``pattern``, in which ``NAME`` is any word; ``policies`` matches ``policies.NAME``."""
    parts, words = pattern.split("."), name.split(".")
    parts = parts[:-1] if parts[-1] == "NAME" and len(words) == len(parts) - 1 else parts
    return len(parts) == len(words) and all(a in ("NAME", b) for a, b in zip(parts, words, strict=True))


def _key_lines(key: Key) -> str:
    shape = ", ".join(filter(None, (key.type, key.range)))
    return f"{key.name} = {key.default}    ({shape})\n    {key.description}"


def _table(rows: list[tuple[str, str]], indent: int) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{'':{indent}}{name:<{width}}  {summary}" for name, summary in rows)


@cache
def _descriptions(model: type) -> dict[str, str]:
    """Return the string below each field of ``model`` and of its bases, by the field's name."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        body = _classes_of(base.__module__).get(base.__name__, [])
        for field, below in itertools.pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = text
    return found


@cache
def _classes_of(module: str) -> dict[str, list[ast.stmt]]:
    """Return the body of each class of ``module``, by its name. Its source is read only here, as that takes long."""
    if not module.startswith("turnwise."):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def _plain(text: str) -> str:
    """Turn a docstring's markup into plain Markdown, on one line."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")


def _type_name(annotation: Any) -> str:
    """Describe an annotation in words: ``list[str] | None`` is ``list of text``."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = ", ".join(f"{sign} {_number(value)}" for sign, value in _bounds(annotation.__metadata__))
        return _type_name(inner[0]) + (f" {bounds}" if bounds else "")
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(each) for each in inner if each is not types.NoneType)
    if origin is Literal:
        return ", ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in inner)
    if origin is tuple:
        return f"list of {len(inner)}, each {_type_name(inner[0])}"
    if origin is list:
        return f"list of {_type_name(inner[0])}"
    if origin is dict:
        return f"table of {_type_name(inner[1])}"
    return "path" if isinstance(annotation, type) and issubclass(annotation, PurePath) else NAMES[annotation]


def _default_text(field: FieldInfo) -> str:
    """Write the default as TOML does."""
    return "required" if field.is_required() else _toml(field.get_default(call_default_factory=True))


def _toml(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str | PurePath)
        else str(value)
    )


def _bounds(metadata: Any) -> Iterator[tuple[str, Any]]:
    """Yield each bound of a field: ``(">", 0)``."""
    for constraint in metadata:
        if isinstance(constraint, FieldInfo):
            yield from _bounds(constraint.metadata)
            continue
        for attribute, sign in BOUNDS:
            if (value := getattr(constraint, attribute, None)) is not None:
                yield sign, value


def _number(value: float) -> str:
    """Format a number; large powers of two as ``2**63``."""
    power = int(value).bit_length() - 1
    return f"2**{power}" if power > 52 and value == 2**power else f"{value:g}"


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Find the section class in an annotation such as ``dict[str, PolicyConfig]`` or ``LoraConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)
