"""Tools as Python functions: their schema for the model, and the arguments of a call."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from turnwise.chat.messages import Tool
from turnwise.utils.registry import name_of, unique_names, unwrapped

T = TypeVar("T")
PLAIN = (int, float, str, bool, type(None), list, tuple, dict)
"""Types whose schemas ``transformers`` writes; pydantic writes those of all others."""


def tool_of(tool: Callable[..., Any] | Mapping[str, Any], name: str | None = None) -> Tool:
    """Return the schema of a tool: from a function's signature, type hints and docstring, or the given schema.

    The function may be a method, a partial or a callable object; ``name`` replaces its own.

    The docstring is in Google's style, with every parameter in its ``Args:`` section. A hint is any type that pydantic
    validates, such as a model, a dataclass or an Enum. Raises ``TypeError`` or ``ValueError`` that names the tool and
    what it lacks.

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
    return _of_tool(_schema_of, tool, name_of(tool) if name is None else name)


def build_arguments(tool: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with the types of the tool's hints: pydantic converts what a model wrote.

    Arguments that the tool doesn't name stay as they are. Raises ``TypeError`` that names each wrong argument.

    Example: for the function in :func:`tool_of`, ``{"a": "2", "b": 3}`` becomes ``{"a": 2, "b": 3}``.
    """
    adapters = _of_tool(_adapters_of, tool, name_of(tool))
    built, problems = dict(given), []
    for name in adapters.keys() & given.keys():
        try:
            built[name] = adapters[name].validate_python(given[name])
        except ValidationError as error:
            problems += [
                f"{'.'.join(map(str, (name, *one['loc'])))}: {one['msg']}, got {one['input']!r:.80}"
                for one in error.errors(include_url=False, include_context=False)
            ]
    if problems:
        raise TypeError("; ".join(sorted(problems)))
    return built


def _of_tool(read: Callable[[Any, str], T], tool: Callable[..., Any], name: str) -> T:
    """Return ``read(tool, name)``, which keeps its results, also for a tool that can't be hashed."""
    try:
        hash(tool)
    except TypeError:
        return typing.cast(Any, read).__wrapped__(tool, name)
    return read(tool, name)


@lru_cache(maxsize=256)
def _schema_of(tool: Callable[..., Any], name: str) -> Tool:
    """Read the signature and the docstring once, as an actor's tools are looked at in every turn."""
    from transformers.utils import get_json_schema

    try:
        plain = _plain_function(tool, name)
        others = {key: hint for key, hint in plain.__annotations__.items() if key != "return" and not _is_plain(hint)}
        plain.__annotations__ |= dict.fromkeys(others, Any)
        schema = get_json_schema(plain)
        properties = schema["function"]["parameters"]["properties"]
        for key, hint in others.items():
            found = TypeAdapter(hint).json_schema()
            properties[key] = {**inlined(found, found.get("$defs", {})), **properties[key]}
        return schema
    except Exception as error:  # the libraries raise several types of their own
        raise ValueError(
            f"tools: {name} has no schema: {error} Expected a type hint for each parameter, and a docstring that "
            "describes the function and, under 'Args:', each parameter"
        ) from error


@lru_cache(maxsize=256)
def _adapters_of(tool: Callable[..., Any], name: str) -> dict[str, TypeAdapter[Any]]:
    hints = _plain_function(tool, name).__annotations__
    return {key: TypeAdapter(hint) for key, hint in hints.items() if key != "return"}


def _is_plain(hint: Any) -> bool:
    """True for a hint that ``transformers`` reads: a plain type, and a list, dict, union or literal of these."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return hint is Any or any(hint is plain for plain in PLAIN)
    if origin is Literal:
        return all(type(part) in PLAIN for part in parts)
    if origin is Annotated:  # a text in it is a comment
        return _is_plain(parts[0]) and all(isinstance(part, str) for part in parts[1:])
    return origin in (list, tuple, dict, typing.Union, types.UnionType) and all(map(_is_plain, parts))


def inlined(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return a JSON schema without references and titles. Raises ``ValueError`` for a type that contains itself."""
    if isinstance(schema, list):
        return [inlined(part, definitions, within) for part in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str):
        name = reference.rpartition("/")[2]
        if name in within:
            raise ValueError(f"{name} contains itself.")
        schema = {**definitions[name], **{key: part for key, part in schema.items() if key != "$ref"}}
        return inlined(schema, definitions, (*within, name))
    kept = {key: part for key, part in schema.items() if key != "$defs" and not _is_note(key, part)}
    data = ("default", "const", "enum", "examples")
    return {key: part if key in data else inlined(part, definitions, within) for key, part in kept.items()}


def _is_note(key: str, part: Any) -> bool:
    """True for a schema's own title and the references of its discriminator, not for properties of these names."""
    return (key == "title" and isinstance(part, str)) or (key == "discriminator" and "propertyName" in part)


def _plain_function(tool: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function with the name, docstring and parameters of a tool, which may be a partial or an object.

    What a partial binds is no parameter. An object has the docstring of its ``__call__``, or of its class.
    """
    made = unwrapped(tool)
    called = made if inspect.isroutine(made) else type(made).__call__
    bound = tool.keywords if isinstance(tool, functools.partial) else {}
    hints = typing.get_type_hints(inspect.unwrap(getattr(called, "__func__", called)), include_extras=True)
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
