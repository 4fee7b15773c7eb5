"""Looks up the names in a configuration, and suggests the nearest known name for a mistyped one.

``"module:Name"`` is code: importing the module runs it. A class is checked for its role before it is constructed.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwise.utils.code_files import file_of, search_working_folder
from turnwise.utils.files import parse_toml, read_regular
from turnwise.utils.output import tell
from turnwise.utils.values import problem


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest a known name: ``did you mean 'steps'?`` if one is close, else a list of all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


@functools.cache
def classes_in(room: str, entries: tuple[str, ...]) -> tuple[type[Any], ...]:
    """Import the classes of a list of ``"module:Class"``, whose modules are in ``room``."""
    named = [entry.partition(":") for entry in entries]
    return tuple(getattr(importlib.import_module(f"{room}.{module}"), name) for module, _, name in named)


def import_by_name(registry: Mapping[str, Any], name: str, key: str) -> Any:
    """Look ``name`` up in ``registry``, or import it if it is a ``"module:Name"``.

    Python's path is searched first, the working folder last. Raises ``ValueError`` that names ``key``, the
    configuration key whose value is ``name``.

    Example: ``import_by_name({"grpo": GRPOCredit}, "my_rules:Mine", "credit.rule")`` is ``Mine`` in ``my_rules.py``.
    """
    if ":" not in name:
        if name not in registry:
            near = did_you_mean(name, registry)
            raise ValueError(problem(key, f"unknown; {near} (or 'module:Name' for your own)", name))
        return registry[name]
    module_name, _, attribute = name.partition(":")
    if not (_is_dotted(module_name) and _is_dotted(attribute)):
        raise ValueError(problem(key, "expected 'module:Name', for example 'my_rules:MyRule'", name))
    # Import the module, then look up the attribute part by part.
    search_working_folder()
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(problem(key, f"{type(error).__name__}: {error}", name)) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [known for known in dir(found) if not known.startswith("_")]
            raise ValueError(problem(key, f"no {part!r} in it; {did_you_mean(part, names)}", name))
        found = getattr(found, part)
    return found


def import_class(registry: Mapping[str, Any], name: str, key: str, *, methods: Iterable[str], like: str) -> Any:
    """Look up a class with :func:`import_by_name`; a class that is not in ``registry`` must have all ``methods``.

    ``like`` names a class that has them. Raises ``ValueError`` that names ``key``, before anything is constructed.
    """
    found = import_by_name(registry, name, key)
    if ":" not in name:
        return found
    needed = list(methods)
    missing = needed if not isinstance(found, type) else [each for each in needed if not defines(found, each)]
    if missing:
        lacks = f"{missing[0]!r} is missing" if isinstance(found, type) else f"it is a {type(found).__name__}"
        why = f"expected a class with {', '.join(needed)}, such as a subclass of {like}; {lacks}"
        raise ValueError(problem(key, why, name))
    return found


def defines(kind: type, method: str) -> bool:
    """Return True if objects of class ``kind`` have ``method``. (``hasattr`` finds ``__call__`` on every class.)"""
    return any(callable(vars(base).get(method)) for base in kind.__mro__)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def names_code(text: str) -> bool:
    """Return True for a text that :func:`import_by_name` would import, also with the prefix of another package's tasks.

    After a prefix, the name in the module is any text, as in ``gymnasium:my_games:Maze-v0``; all tasks of ``verifiers``
    are packages.
    """
    first, *rest = text.split(":")
    if len(rest) == 2:
        return first.isidentifier() and _is_dotted(rest[0]) and bool(rest[1])
    return len(rest) == 1 and _is_dotted(first) and (first == "verifiers" or _is_dotted(rest[0]))


def code_in(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield ``(key, "module:Name")`` for each text in ``settings``, the data of a config, that can name code."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            below = f"{key}.{name}" if key else str(name)
            if isinstance(name, str) and names_code(name):
                yield key, name
            yield from code_in(value, below)
    elif isinstance(settings, list | tuple):
        for item in settings:
            yield from code_in(item, key)
    elif isinstance(settings, str) and names_code(settings):
        yield key, settings


def announce_code(settings: Any, what: str = "is imported") -> None:
    """Print to stderr which code a configuration's plain data can name, and its files, before any is imported."""
    files = {**code_files(settings), **(settings.get("code") or {})}
    named = []
    for key, name in code_in(settings):
        file = files.get(name.split(":")[-2])
        named.append(f"{key} = {name!r}" + (f" ({file})" if file else ""))
    if named:
        tell(f"the config may name code, which {what} by this command: {', '.join(named)}")


def code_files(settings: Any) -> dict[str, str]:
    """Return the file of each user's module that ``settings``, the data of a config, name; imports nothing.

    Python's path is as before: in the folder of a run that someone sent, no later import may find a module.
    """
    before = list(sys.path)
    search_working_folder()
    try:
        modules = dict.fromkeys(name.split(":")[-2] for _, name in code_in(settings))
        return {module: str(file) for module in modules if (file := file_of(module)) is not None}
    finally:
        sys.path[:] = before


def announce_code_of_run(run_dir: Path, what: str = "is imported") -> None:
    """Call :func:`announce_code` on a run folder's config. A missing or broken one is ignored here."""
    with suppress(OSError, ValueError):
        announce_code(parse_toml(read_regular(run_dir / "config.toml", follow=True).decode("utf-8")), what)


def build_with_options(factory: Any, options: Mapping[str, Any], key: str) -> Any:
    """Return ``factory(**options)``. Private names (``_x``) and names that its signature lacks are rejected.

    ``key`` is the configuration key of ``options``. Raises ``ValueError`` that names it.
    """
    if not callable(factory):
        raise ValueError(problem(key, f"{factory!r} is neither a class nor a function"))
    parameters = inspect.signature(factory).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name[0] != "_"]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_any and (unknown := [name for name in options if name not in known]):
        raise ValueError(f"unknown config key {f'{key}.{unknown[0]}'!r}; {did_you_mean(unknown[0], known)}")
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(problem(key, error, dict(options))) from error


def unwrapped(function: Any) -> Any:
    """Return the function that ``functools.partial`` objects wrap."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """Return the name of a function, of the function that a partial wraps, or of a callable object's class.

    Example: ``name_of(partial(contains, word="tea"))`` is ``"contains"``.
    """
    function = unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def unique_names(functions: Iterable[Any], taken: Iterable[str] = ()) -> list[str]:
    """Return the names of ``functions``, different from each other and from ``taken``: ``contains``, ``contains_2``."""
    return numbered(map(name_of, functions), taken)


def numbered(given: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Return the ``given`` names, with a number after each that occurs earlier or is ``taken``: ``a``, ``a_2``."""
    found, names = set(taken), []
    for base in given:
        candidates = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(2)))
        name = next(name for name in candidates if name not in found)
        found.add(name)
        names.append(name)
    return names


def option_types(factory: Any) -> dict[str, Any]:
    """Return the annotation of each option of ``factory``, by name.

    ``Any`` stands for a missing annotation, and for one that only a type checker can read.
    """
    made = unwrapped(factory)
    modules = [sys.modules.get(kind.__module__) for kind in getattr(made, "__mro__", (made,))]

    def read(annotation: Any) -> Any:
        if annotation is inspect.Parameter.empty:
            return Any
        for module in modules if isinstance(annotation, str) else ():
            with suppress(Exception):  # a name in the annotation may not exist at run time
                return eval(annotation, dict(vars(module)))
        return Any if isinstance(annotation, str) else annotation

    return {name: read(parameter.annotation) for name, parameter in inspect.signature(factory).parameters.items()}


def names_on_use(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: each of its names is imported when it is first used.

    ``homes`` maps a name to the module that defines it.

    Example: ``__getattr__ = names_on_use(__name__, {"Trainer": "turnwise.train.loop"})`` in ``turnwise.train``
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[room], name, value)
        return value

    return find


def require(room: str, *modules: str) -> None:
    """Raise ``ImportError`` if ``room`` lacks one of ``modules``."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        names = " and ".join(missing)
        raise ImportError(f"{room} needs {names}: pip install {' '.join(missing)}", name=missing[0])
