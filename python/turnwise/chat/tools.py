"""Tools as Python functions: their schema for the model."""

from __future__ import annotations

import functools
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from turnwise.chat.messages import Tool
from turnwise.utils.registry import name_of, unique_names, unwrapped


def tool_of(tool: Callable[..., Any] | Mapping[str, Any], name: str | None = None) -> Tool:
    """Return the schema of a tool: from a function's signature, type hints and docstring, or the given schema.

    The function may be a method, a partial or a callable object; ``name`` replaces its own.

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
    name = name_of(tool) if name is None else name
    try:
        hash(tool)
    except TypeError:
        return _schema_of.__wrapped__(tool, name)
    return _schema_of(tool, name)


@lru_cache(maxsize=256)
def _schema_of(tool: Callable[..., Any], name: str) -> Tool:
    """Read the signature and the docstring once, as an actor's tools are looked at in every turn."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(_plain_function(tool, name))
    except Exception as error:  # the library raises several types of its own
        raise ValueError(
            f"tools: {name} has no schema: {error} Expected a type hint for each parameter, and a docstring that "
            "describes the function and, under 'Args:', each parameter"
        ) from error


def _plain_function(tool: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function with the name, docstring and parameters of a tool, which may be a partial or an object.

    What a partial binds is no parameter. An object has the docstring of its ``__call__``, or of its class.
    """
    made = unwrapped(tool)
    called = made if inspect.isroutine(made) else type(made).__call__
    bound = tool.keywords if isinstance(tool, functools.partial) else {}
    hints = typing.get_type_hints(inspect.unwrap(getattr(called, "__func__", called)))
    signature = inspect.signature(tool)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in bound]

    def plain() -> None: ...

    plain.__name__, plain.__doc__ = name, inspect.cleandoc(called.__doc__ or type(made).__doc__ or "")
    plain.__annotations__ = {p.name: hints[p.name] for p in parameters if p.name in hints}
    plain.__annotations__ |= {"return": hints["return"]} if "return" in hints else {}
    plain.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return plain


def by_name(tools: Sequence[Callable[..., Any] | Mapping[str, Any]]) -> dict[str, Callable[..., Any] | None]:
    """Return the functions by the names in their schemas; ``None`` for a tool that is only a schema."""
    functions = [None if isinstance(tool, Mapping) else tool for tool in tools]
    return dict(zip((tool["function"]["name"] for tool in schemas(tools)), functions, strict=True))


def schemas(tools: Sequence[Callable[..., Any] | Mapping[str, Any]]) -> list[Tool]:
    """Return the schemas of ``tools``, in order. Functions of one name are numbered: ``search``, ``search_2``.

    Raises ``ValueError`` for two schemas of one name, and for one function that is given twice.
    """
    given = [str(tool_of(tool)["function"]["name"]) for tool in tools if isinstance(tool, Mapping)]
    functions = [tool for tool in tools if not isinstance(tool, Mapping)]
    twice = [name for name, count in Counter(given).items() if count > 1]
    twice += [name_of(tool) for tool in functions if sum(tool is other for other in functions) > 1]
    if twice:
        raise ValueError(f"tools: two are called {twice[0]!r}: expected different names")
    names = iter(unique_names(functions, given))
    return [tool_of(tool) if isinstance(tool, Mapping) else tool_of(tool, next(names)) for tool in tools]
