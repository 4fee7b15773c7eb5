"""Episodes as JSON lines, as a run's ``rollouts.jsonl`` holds them."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from turnwise.arena.split import content_digest
from turnwise.types import GenerateResult


def plain_result(result: GenerateResult) -> dict[str, Any]:
    """A top result and all below it, with the tape that a replay plays where one was kept."""
    tape = {} if result.tape is None else {"replay": result.tape.to_json(result)}
    return {**_plain(result), **tape}


def _plain(result: GenerateResult) -> dict[str, Any]:
    children = [_plain(child) for child in result.children]
    return {
        **jsonable(result.rollout),
        "parent_id": result.parent_id,
        "uid": uid_text(result.uid),
        "is_trainable": result.is_trainable,
        "children": children,
    }


def uid_text(uid: Hashable) -> str:
    """The question as a text, the same where questions are: a text as it is, of anything else a digest of its content,
    or its ``repr`` where the content is unknown."""
    if isinstance(uid, str):
        return uid
    try:
        return f"#{content_digest(uid).hex()}"
    except TypeError:
        return repr(uid)


def jsonable(value: Any) -> Any:
    """What JSON can hold of ``value``. An episode's extras may be anything, and must not end a run by being logged."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    return value


def json_line(row: Mapping[str, Any]) -> str:
    """``row`` in one line. What JSON has no word for becomes a number or a text."""
    return json.dumps(row, default=_json_default)


def _json_default(value: Any) -> Any:
    """A number of numpy or torch as Python's; anything else as its text."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return str(value)
