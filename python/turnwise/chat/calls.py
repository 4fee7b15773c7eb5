"""Calls of tools in a completion: what the model wrote, and why it can't be read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.messages import Tool, tool_names, well_formed_texts

OK = "ok"
MAX_DEPTH = 64
"""Levels of lists and objects in a call's arguments. Deeper ones would exceed Python's stack elsewhere."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a completion. ``status`` is ``"ok"``, or the reason why it can't be read as a call of a known tool.

    Example: ``ToolCall("add", {"a": 2, "b": 2}, raw='{"name": "add", "arguments": {"a": 2, "b": 2}}')``
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    """The text that the model sampled."""
    status: str = OK


_CALL = re.compile(r"\s*<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


def read_calls(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[ToolCall, ...]]:
    """Parse calls that are written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    Return the text without the good calls, and all calls in their order.
    """
    calls, kept = [], []
    end = 0
    for match in _CALL.finditer(text):
        kept.append(text[end : match.start()])
        end = match.end()
        call = read_call(match[1].strip(), tools, closed=bool(match[2]))
        calls.append(call)
        if call.status != OK:
            kept.append(match[0])
    return "".join([*kept, text[end:]]), tuple(calls)


def read_call(raw: str, tools: Sequence[Tool], *, closed: bool = True) -> ToolCall:
    """Parse the JSON of one call."""
    if not closed:
        return ToolCall("", {}, raw, "unclosed_block")
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        return ToolCall("", {}, raw, "invalid_json")
    if not isinstance(parsed, dict):
        return ToolCall("", {}, raw, "malformed_structure")
    return checked_call(parsed.get("name"), parsed.get("arguments", {}), raw, tools)


def checked_call(name: Any, arguments: Any, raw: str, tools: Sequence[Tool], status: str = OK) -> ToolCall:
    """Return a call whose name and arguments were read, with the first reason why it is no call of a known tool."""
    is_known = isinstance(name, str) and name in tool_names(tools)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            status = "invalid_json" if status == OK else status
    if name and not is_known:
        status = "unknown_tool"
    elif status == OK and not is_known:
        status = "missing_name"
    elif status == OK and not (isinstance(arguments, Mapping) and _is_plain(arguments, MAX_DEPTH)):
        status = "malformed_structure"
    arguments = well_formed_texts(arguments) if status == OK else arguments
    return ToolCall(str(name or ""), dict(arguments) if isinstance(arguments, Mapping) else {}, raw, status)


def _is_plain(value: Any, levels: int) -> bool:
    """Return True if a JSON value has at most ``levels`` levels, and all its numbers are finite."""
    if not isinstance(value, (Mapping, list)):
        return not isinstance(value, float) or math.isfinite(value)
    parts = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(_is_plain(part, levels - 1) for part in parts)
