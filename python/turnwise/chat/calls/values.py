"""The types that a tool's schema allows, and the value that the text of an argument means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.calls.reading import json_at
from turnwise.chat.messages import Tool, tool_names

KINDS = ("string", "integer", "number", "boolean", "array", "object", "null")
ALL_BUT_TEXT = set(KINDS[1:])
_WORDS = {"True": True, "False": False, "None": None}


def parameters_of(name: str, tools: Sequence[Tool]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the schemas of a tool's parameters by name, and the definitions that they refer to."""
    for tool, other in zip(tools, tool_names(tools), strict=True):
        if other == name:
            whole = tool.get("function", tool).get("parameters") or {}
            return whole.get("properties") or {}, {**(whole.get("definitions") or {}), **(whole.get("$defs") or {})}
    return {}, {}


def kinds_of(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> set[str]:
    """Return the JSON types that a schema allows; the empty set if it allows all of them."""
    if not isinstance(schema, Mapping):
        return set()
    given, parts = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    kinds: set[str] = set()
    if isinstance(schema.get("$ref"), str):
        name = schema["$ref"].rpartition("/")[2]
        kinds = set() if name in within else kinds_of(definitions.get(name), definitions, (*within, name))
    elif given:
        kinds = set(given if isinstance(given, list) else [given])
        kinds = kinds if kinds <= set(KINDS) else set()
    elif "const" in schema or isinstance(schema.get("enum"), list):
        kinds = {kind_of(value) for value in schema.get("enum", [schema.get("const")])}
    elif isinstance(parts, list):
        found = [kinds_of(part, definitions, within) for part in parts]
        kinds = set().union(*found) if all(found) else set()
    elif isinstance(schema.get("allOf"), list):
        kinds = next(filter(None, (kinds_of(part, definitions, within) for part in schema["allOf"])), set())
    elif "properties" in schema or "items" in schema:
        kinds = {"object" if "properties" in schema else "array"}
    return kinds | {"null"} if kinds and schema.get("nullable") is True else kinds


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", type(None): "null"}
    return kinds.get(type(value), "object")


def typed(text: str, kinds: set[str], words: bool = False) -> tuple[Any, bool]:
    """Return the value that the ``text`` of an argument means, and True if it may mean one of ``kinds``.

    No text has quotes, so 7 is a number where the schema allows a number or a text, and a text where it allows a text
    or a boolean. ``words`` means that True, False and None are no texts.

    Examples: ``("7", {"string"})`` gives ``"7"``; ``("7", {"integer", "string"})`` gives ``7``; ``("07",
    {"integer", "string"})`` gives ``"07"``.
    """
    if kinds == {"string"}:
        return text, True
    is_text = not kinds or "string" in kinds
    value, _, problem = json_at(text, 0, whole=True)
    if problem and (words or not is_text) and text.strip() in _WORDS:
        value, problem = _WORDS[text.strip()], ""
    if not is_text:
        return (text, False) if problem else (value, True)
    found = "number" if kind_of(value) == "integer" and "integer" not in kinds else kind_of(value)
    misread = (
        found == "string" or (kinds and found not in kinds) or (isinstance(value, float) and not math.isfinite(value))
    )
    return (text, True) if problem or misread or text != text.strip() else (value, True)
