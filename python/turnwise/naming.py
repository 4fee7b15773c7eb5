"""How a name in a configuration finds what it names, and how a mistyped one is answered, the same everywhere.

``"module:Name"`` is code: to import the module runs it. What it names is held against its role before it is called.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_CODE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""A name that :func:`find` would import."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'steps'?`` where a known name is close, else all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def find(registry: Mapping[str, Any], name: str, key: str) -> Any:
    """What ``name`` stands for: an entry of ``registry``, or ``"module:Name"``, imported.

    Modules are looked for where Python looks, and last in the working folder. Raises ``ValueError`` that names
    ``key``, the configuration key that ``name`` stood in.

    Example: ``find({"grpo": GRPOCredit}, "my_rules:Mine", "credit.rule")`` is the ``Mine`` of ``my_rules.py``.
    """
    if ":" not in name:
        if name not in registry:
            raise ValueError(
                f"config key {key!r} = {name!r}: unknown; {nearest(name, registry)} (or 'module:Name' for your own)"
            )
        return registry[name]
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ValueError(f"config key {key!r} = {name!r}: expected 'module:Name', for example 'my_rules:MyRule'")
    # An installed script starts without the working folder on its path; last, so that nothing of it hides a package.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"config key {key!r} = {name!r}: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [known for known in dir(found) if not known.startswith("_")]
            raise ValueError(f"config key {key!r} = {name!r}: no {part!r} in it; {nearest(part, names)}")
        found = getattr(found, part)
    return found


def find_class(registry: Mapping[str, Any], name: str, key: str, *, methods: Iterable[str], like: str) -> Any:
    """:func:`find` for what is to be constructed: a class that is none of ``registry`` must have all ``methods``.

    ``like`` is a class that does. Raises ``ValueError`` that names ``key``; nothing was constructed then.
    """
    found = find(registry, name, key)
    if ":" not in name:
        return found
    needed = list(methods)
    missing = needed if not isinstance(found, type) else [each for each in needed if not defines(found, each)]
    if missing:
        lacks = f"{missing[0]!r} is missing" if isinstance(found, type) else f"it is a {type(found).__name__}"
        raise ValueError(
            f"config key {key!r} = {name!r}: expected a class with {', '.join(needed)}, such as a subclass of {like}; "
            f"{lacks}"
        )
    return found


def defines(kind: type, method: str) -> bool:
    """Whether objects of class ``kind`` have ``method``; all classes can be called, not all of their objects."""
    return any(callable(vars(base).get(method)) for base in kind.__mro__)


def code_in(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """``(key, "module:Name")`` of each text in ``settings``, the plain data of a configuration, that can name code."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            below = f"{key}.{name}" if key else str(name)
            if isinstance(name, str) and _CODE.fullmatch(name):
                yield key, name
            yield from code_in(value, below)
    elif isinstance(settings, list | tuple):
        for item in settings:
            yield from code_in(item, key)
    elif isinstance(settings, str) and _CODE.fullmatch(settings):
        yield key, settings


def tell_code(settings: Any, what: str = "is imported") -> None:
    """Say on stderr which code the plain data of a configuration can name, before any of it is imported."""
    if named := [f"{key} = {name!r}" for key, name in code_in(settings)]:
        print(f"turnwise: the config can name code, which {what} here: {', '.join(named)}", file=sys.stderr)


def tell_code_of(run_dir: Path, what: str = "is imported") -> None:
    """:func:`tell_code` of the config in a run folder; one that is not there or no TOML is told by who reads it."""
    with suppress(OSError, ValueError):
        tell_code(tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8")), what)


def construct(factory: Any, options: Mapping[str, Any], key: str) -> Any:
    """``factory(**options)``, with option names checked against its signature; private ones (``_x``) are not offered.

    ``key`` is the configuration key of ``options``. Raises ``ValueError`` that names it.
    """
    if not callable(factory):
        raise ValueError(f"config key {key!r}: they are for {factory!r}, which is neither a class nor a function")
    parameters = inspect.signature(factory).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name[0] != "_"]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_any and (unknown := [name for name in options if name not in known]):
        raise ValueError(f"unknown config key '{key}.{unknown[0]}'; {nearest(unknown[0], known)}")
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config key {key!r} = {dict(options)!r}: {error}") from error


def option_types(factory: Any) -> dict[str, Any]:
    """What ``factory`` expects of each of its options, by name: its annotations, ``Any`` where it says nothing.

    An annotation that only a type checker can read counts as nothing said.
    """
    made = factory
    while isinstance(made, functools.partial):
        made = made.func
    modules = [sys.modules.get(kind.__module__) for kind in getattr(made, "__mro__", (made,))]

    def read(annotation: Any) -> Any:
        if annotation is inspect.Parameter.empty:
            return Any
        for module in modules if isinstance(annotation, str) else ():
            with suppress(Exception):  # what an annotation names may not be there at run time
                return eval(annotation, dict(vars(module)))
        return Any if isinstance(annotation, str) else annotation

    return {name: read(parameter.annotation) for name, parameter in inspect.signature(factory).parameters.items()}
