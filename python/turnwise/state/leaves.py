"""Pickle the objects in States apart from their structure, and load them without running foreign code."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from turnwise._C import CheckpointError
from turnwise.utils.copies import CheckedPickler

_NUMPY_CORE = ("numpy._core", "numpy.core")  # numpy 2 and later, earlier versions
HARMLESS: dict[str, frozenset[str]] = {
    "builtins": frozenset(
        {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range"}
        | {"set", "slice", "str", "tuple", "type", "Ellipsis", "NotImplemented"}
    ),
    "array": frozenset({"array", "_array_reconstructor"}),
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "datetime": frozenset({"date", "datetime", "time", "timedelta", "timezone"}),
    "decimal": frozenset({"Decimal"}),
    "fractions": frozenset({"Fraction"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}),
    "random": frozenset({"Random"}),
    "re": frozenset({"_compile"}),
    "uuid": frozenset({"UUID"}),
    "numpy": frozenset({"dtype", "ndarray"}),
    **{f"{core}.multiarray": frozenset({"_reconstruct", "scalar"}) for core in _NUMPY_CORE},
    **{f"{core}.numeric": frozenset({"_frombuffer"}) for core in _NUMPY_CORE},
    "numpy.random._pickle": frozenset({"__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"}),
    "numpy.random.bit_generator": frozenset({"SeedSequence", "__pyx_unpickle_SeedSequence"}),
    "numpy.random._mt19937": frozenset({"MT19937"}),
    "numpy.random._pcg64": frozenset({"PCG64", "PCG64DXSM"}),
    "numpy.random._philox": frozenset({"Philox"}),
    "numpy.random._sfc64": frozenset({"SFC64"}),
    "torch": frozenset({"device"}),
    "turnwise.state.leaves": frozenset({"_torch_generator"}),
    "turnwise.state.versions": frozenset({"ABSENT"}),
}
"""Names allowed in a file: types and functions that only build values."""


def _torch_generator(device: str, state: bytes) -> Any:
    """Rebuild a pickled ``torch.Generator``; torch's own method uses an unrestricted pickle."""
    import torch

    generator = torch.Generator(device=device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


class _LeafPickler(CheckedPickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Generator:
            return _torch_generator, (str(value.device), value.get_state().numpy().tobytes())
        return super().reducer_override(value)


Find = Callable[[str, str], Any]
"""Resolves a module and a name in a pickle; raises :class:`CheckpointError` for a forbidden name."""


def find_harmless(module: str, name: str) -> Any:
    """Return a type or function that only builds values. Raises :class:`CheckpointError` for others before import."""
    if name in HARMLESS.get(module, ()):
        return getattr(importlib.import_module(module), name)
    if module in ("numpy", "torch") and "." not in name:
        value = getattr(importlib.import_module(module), name, None)
        if module == "torch" and isinstance(value, sys.modules["torch"].dtype):
            return value
        if module == "numpy" and isinstance(value, type) and issubclass(value, sys.modules["numpy"].generic):
            return value
    raise CheckpointError(
        f"it names {module}.{name}, which is not one of the types known to be harmless: reading it can run "
        f"any code, so it was not imported. If that class's code may run: load(path, allow=[{name}]). If you trust the "
        "whole file: load(path, allow_pickle=True)"
    )


def load_pickle(pickled: bytes | memoryview, find: Find, buffers: Iterable[memoryview] = ()) -> Any:
    """Unpickle, using only the names that ``find`` resolves.

    No class is created and no named object is changed: an attribute set on a class would last for the process.
    """
    buffers = list(buffers)
    with contextlib.suppress(_NeedsGuard):
        return _Quick(pickled, find, buffers).load()
    return _Guarded(pickled, find, buffers).load()


class _NeedsGuard(Exception):
    """The pickle names an object that a pickle could change or create classes with."""


class _Quick(pickle.Unpickler):
    """The C unpickler, for pickles that name only immutable objects: builtin functions and types written in C."""

    def __init__(self, pickled: bytes | memoryview, find: Find, buffers: list[memoryview]) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        named = self._find(module, name)
        if isinstance(named, types.BuiltinFunctionType):
            return named
        if isinstance(named, type) and not named.__flags__ & _HEAP_TYPE and named is not type:
            return named
        raise _NeedsGuard


_InPython: Any = pickle._Unpickler  # the pure-Python fallback, whose steps can be inspected


class _Guarded(_InPython):
    """Creates objects, and changes only objects that it created."""

    def __init__(self, pickled: bytes | memoryview, find: Find, buffers: list[memoryview]) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._find, self._named = find, list[Any]()

    def find_class(self, module: str, name: str) -> Any:
        self._named.append(self._find(module, name))
        return self._named[-1]

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or self._is_named(target):
            raise CheckpointError(f"it changes {target!r}, which it only names")
        super().load_build()

    def load_reduce(self) -> None:
        make, args = self.stack[-2:]
        if make is type and args in _TYPES_OF:
            super().load_reduce()
        else:
            self._make(make, super().load_reduce)

    def load_newobj(self) -> None:
        self._make(self.stack[-2], super().load_newobj)

    def load_newobj_ex(self) -> None:
        self._make(self.stack[-3], super().load_newobj_ex)

    def _instantiate(self, make: Any, args: Any) -> None:
        self._make(make, super()._instantiate, make, args)

    def _make(self, make: Any, step: Callable[..., None], *arguments: Any) -> None:
        if not self._is_named(make):
            raise CheckpointError(f"it calls {make!r}, which it doesn't name")
        makes_classes = isinstance(make, type) and issubclass(make, type)
        if not makes_classes:
            step(*arguments)
        if makes_classes or isinstance(self.stack[-1], type):
            raise CheckpointError("it makes a class")

    def _is_named(self, value: Any) -> bool:
        return any(value is each for each in self._named)

    dispatch: ClassVar[dict[int, Any]] = {
        **_InPython.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
    }


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: its attributes can be set
_TYPES_OF = ((None,), (Ellipsis,), (NotImplemented,))
"""Reducers for these types, which have no importable name."""


def dump_leaves(leaves: Sequence[Any]) -> tuple[bytes, list[memoryview]]:
    """Return the pickle of ``leaves``, and the memory of their read-only arrays, which the pickle refers to."""
    buffers: list[memoryview] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if not view.readonly:  # an array inside an object that writes to it: it must stay writable
            return True
        buffers.append(view)
        return False

    stream = io.BytesIO()
    _LeafPickler(stream, protocol=5, buffer_callback=out_of_band).dump(list(leaves))
    return stream.getvalue(), buffers


def first_unpicklable(leaves: Iterable[Any]) -> tuple[Any, Exception] | None:
    """Return the first leaf that can't be pickled, with the error."""
    for leaf in leaves:
        try:
            dump_leaves([leaf])
        except Exception as error:
            return leaf, error
    return None


def load_leaves(
    pickled: bytes | memoryview, buffers: Iterable[memoryview], *, allow: Iterable[Any] = (), allow_pickle: bool = False
) -> list[Any]:
    """Load the output of :func:`dump_leaves`. Arrays are views of ``buffers``. ``allow`` lists the caller's classes."""
    allowed = {(each.__module__, each.__qualname__): each for each in allow}

    def find(module: str, name: str) -> Any:
        return allowed[module, name] if (module, name) in allowed else find_harmless(module, name)

    try:
        if allow_pickle:
            leaves = pickle.Unpickler(io.BytesIO(pickled), buffers=buffers).load()
        else:
            leaves = load_pickle(pickled, find, buffers)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle can raise any exception
        raise CheckpointError(f"its objects can't be read: {type(error).__name__}: {error}") from error
    if type(leaves) is not list:
        raise CheckpointError("its objects are not a list")
    return leaves


def freeze_leaves(leaves: list[Any]) -> list[Any]:
    """Return the leaves with read-only copies in place of arrays in writable memory."""
    ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)
    return [freeze_array(leaf) if type(leaf) is ndarray and not _read_only(leaf) else leaf for leaf in leaves]


def _read_only(array: Any) -> bool:
    """Return True if the owner of the memory is read-only, such as bytes or memory that Ray shares."""
    if array.flags.writeable:
        return False
    owner = array
    while type(owner) is type(array):
        owner = owner.base
    if type(owner) is memoryview:
        owner = owner.obj
    return owner is not None and memoryview(owner).readonly


def freeze_array(array: Any) -> Any:
    """Return a read-only array with the same values: itself if its memory can't be written to, else a copy.

    A read-only flag is not enough: code that holds the base, or a view of it, could still change every version at once.
    So the copy is stored in a bytes object, which numpy never makes writable.
    """
    import numpy as np

    if array.dtype.hasobject:
        raise TypeError(
            f"an array of dtype {array.dtype}: the store can't look into the objects in it. Use a list, or "
            "Store(arrays='copy'), where each version copies the array and the objects"
        )
    base = array
    while type(base) is np.ndarray:
        base = base.base
    if type(base) is memoryview:  # memory of a file or a pickle
        base = base.obj
    if type(base) is bytes:
        return array
    # Keep the memory order: code that is fast on columns stays fast.
    turned = array.flags.f_contiguous and not array.flags.c_contiguous
    rows = array.T if turned else array
    frozen = np.ndarray(rows.shape, rows.dtype, rows.tobytes())
    return frozen.T if turned else frozen
