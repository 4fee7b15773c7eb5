"""Tools as Python functions: their schema for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from turnwise.chat.messages import Tool


def tool_of(tool: Callable[..., Any] | Mapping[str, Any]) -> Tool:
    """Return the schema of a tool: from a function's signature, type hints and docstring, or the given schema.

    The docstring is in Google's style, with every parameter in its ``Args:`` section. Raises ``TypeError`` or
    ``ValueError`` that names the tool and what it lacks.

    Example::

        def add(a: int, b: int) -> int:
            '''Add two numbers.

            Args:
                a: The first number.
                b: The second number.
            '''
            return a + b

        assert tool_of(add)["function"]["name"] == "add"
    """
    if isinstance(tool, Mapping):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TypeError(f"tools: got {dict(tool)!r}, expected {{'type': 'function', 'function': {{'name': ...}}}}")
        return dict(tool)
    if not callable(tool):
        raise TypeError(f"tools: got {tool!r}, expected a function or a JSON schema")
    return _schema_of(tool)


@lru_cache(maxsize=256)
def _schema_of(tool: Callable[..., Any]) -> Tool:
    """Read the signature and the docstring once, as an actor's tools are looked at in every turn."""
    from transformers.utils import get_json_schema

    name = getattr(tool, "__name__", repr(tool))
    try:
        return get_json_schema(tool)
    except Exception as error:  # the library raises several types of its own
        raise ValueError(
            f"tools: {name} has no schema: {error} Expected a type hint for each parameter, and a docstring that "
            "describes the function and, under 'Args:', each parameter"
        ) from error


def by_name(tools: Sequence[Callable[..., Any] | Mapping[str, Any]]) -> dict[str, Callable[..., Any] | None]:
    """Return the functions by the names in their schemas; ``None`` for a tool that is only a schema."""
    found: dict[str, Callable[..., Any] | None] = {}
    for tool in tools:
        name = tool_of(tool)["function"]["name"]
        if name in found:
            raise ValueError(f"tools: two are called {name!r}: expected different names")
        found[name] = None if isinstance(tool, Mapping) else tool
    return found
