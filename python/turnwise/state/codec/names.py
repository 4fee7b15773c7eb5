"""Decide which names of Python a file may use."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from turnwise.state.codec.core import CodecError

_HARMLESS: dict[str, frozenset[str]] = {
    "builtins": frozenset(
        {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range"}
        | {"set", "slice", "str", "tuple", "type", "Ellipsis", "NotImplemented"}
    ),
    "array": frozenset({"array"}),
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "datetime": frozenset({"date", "datetime", "time", "timedelta", "timezone"}),
    "decimal": frozenset({"Decimal"}),
    "fractions": frozenset({"Fraction"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}),
    "random": frozenset({"Random"}),
    "types": frozenset({"EllipsisType", "NoneType", "NotImplementedType"}),
    "uuid": frozenset({"UUID"}),
    "numpy": frozenset({"dtype", "ndarray"}),
    "torch": frozenset({"Tensor", "device"}),
    "turnwise.state.versions": frozenset({"ABSENT"}),
}
"""Types and constants that any file may name."""


class UntrustedNameError(CodecError):
    """A file names something that may run code. ``name`` is its last part."""

    def __init__(self, module: str, title: str) -> None:
        super().__init__(f"it names {module}.{title}, which is not one of the types known to be harmless")
        self.name = title.rpartition(".")[2]


class Names:
    """The names that a reader accepts: harmless types, and more if the caller says so.

    ``allow`` lists classes and functions that a file may also call. ``data_classes`` admits dataclasses, named tuples,
    enums and exceptions of modules that are already imported. ``anything`` admits, imports and calls every name.

    Example: ``Names(allow=[Board])``
    """

    def __init__(self, allow: Iterable[Any] = (), *, data_classes: bool = False, anything: bool = False) -> None:
        self._allowed = {(each.__module__, each.__qualname__): each for each in allow}
        self._data_classes, self._anything = data_classes, anything

    def find(self, name: Any) -> Any:
        """Return what ``"module:name"`` names. Raises :class:`UntrustedNameError` before any import."""
        module, title = _split(name)
        if self._may_call(module, title):
            return self.find_callable(name)
        found = _imported(module, title)
        if self._data_classes and _is_data(found):
            return found
        found = _harmless(module, title)
        if found is None:
            raise UntrustedNameError(module, title)
        return found

    def find_callable(self, name: Any) -> Any:
        """Return what ``"module:name"`` names if the reader may call it."""
        module, title = _split(name)
        if (module, title) in self._allowed:
            return self._allowed[module, title]
        if not self._anything:
            raise UntrustedNameError(module, title)
        found: Any = importlib.import_module(module)
        for part in title.split("."):
            found = getattr(found, part)
        return found

    def check_callable(self, value: Any) -> None:
        """Raise :class:`UntrustedNameError` unless the caller allowed ``value``, or it is a harmless type."""
        if self._anything or any(value is each for each in self._allowed.values()):
            return
        kind = value if isinstance(value, type) else type(value)
        if kind is not value or _harmless(kind.__module__, kind.__qualname__) is not kind:
            raise UntrustedNameError(kind.__module__, kind.__qualname__)

    def _may_call(self, module: str, title: str) -> bool:
        return self._anything or (module, title) in self._allowed


def name_of(value: Any, title: str | None = None) -> str:
    """Return ``"module:name"`` of a class, function or constant. Raises ``TypeError`` if the name leads elsewhere."""
    title = title or value.__qualname__
    module = getattr(value, "__module__", None) or "builtins"
    if _imported(module, title) is not value:
        raise TypeError(f"{value!r} is not found as {module}.{title}")
    return f"{module}:{title}"


def _split(name: Any) -> tuple[str, str]:
    module, colon, title = name.partition(":")
    if not (module and colon and title):
        raise CodecError(f"{name!r} is no name")
    return module, title


def _imported(module: str, title: str) -> Any:
    """Return the object ``module.title`` if the module is already imported, else ``None``. Runs no code of either."""
    found: Any = sys.modules.get(module)
    for part in title.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _harmless(module: str, title: str) -> Any:
    """Return a harmless type or constant. It imports no module but those listed, numpy and torch."""
    if title in _HARMLESS.get(module, ()):
        return getattr(importlib.import_module(module), title)
    if module in ("numpy", "torch") and "." not in title:
        found = vars(importlib.import_module(module)).get(title)  # getattr could import a module of that name
        if module == "torch" and isinstance(found, sys.modules["torch"].dtype):
            return found
        if module == "numpy" and isinstance(found, type) and issubclass(found, sys.modules["numpy"].generic):
            return found
    return None


def _is_data(found: Any) -> bool:
    """True for a class of data. One with ``__del__`` is none: it would run on what a file says."""
    is_class = isinstance(found, type) and not hasattr(found, "__del__")
    return is_class and (
        is_dataclass(found)
        or issubclass(found, enum.Enum | BaseException)
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )
