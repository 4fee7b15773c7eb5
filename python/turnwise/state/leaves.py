"""The objects in States as pickles, apart from their structure, and a loader for them that runs no foreign code."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from turnwise._C import CheckpointError
from turnwise.copies import Pickler
from turnwise.state.arrays import freeze_array

_NUMPY_CORE = ("numpy._core", "numpy.core")  # since numpy 2, before
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
"""What a file may name: types and functions that build values and do nothing else."""


def _torch_generator(device: str, state: bytes) -> Any:
    """What a pickled ``torch.Generator`` is read by; its own way goes through an unrestricted pickle."""
    import torch

    generator = torch.Generator(device=device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


class _Pickler(Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Generator:
            return _torch_generator, (str(value.device), value.get_state().numpy().tobytes())
        return super().reducer_override(value)


class Unpickler(pickle.Unpickler):
    """Finds harmless names alone."""

    def find_class(self, module: str, name: str) -> Any:
        if name in HARMLESS.get(module, ()):
            return super().find_class(module, name)
        if module in ("numpy", "torch") and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            if module == "numpy":
                import numpy as np

                if isinstance(found, type) and issubclass(found, np.generic):
                    return found
            elif isinstance(found, sys.modules["torch"].dtype):
                return found
        raise CheckpointError(
            f"it names {module}.{name}, which is none of the types that are known to be harmless: reading it can run "
            "any code. If you trust the file: load(path, allow_pickle=True)"
        )


def dump_leaves(leaves: Sequence[Any]) -> tuple[bytes, list[memoryview]]:
    """The pickle of ``leaves``, and the memory of their read-only arrays, which the pickle only refers to."""
    buffers: list[memoryview] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if not view.readonly:  # an array inside an object that writes to it: it must stay writable
            return True
        buffers.append(view)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=out_of_band).dump(list(leaves))
    return stream.getvalue(), buffers


def first_unpicklable(leaves: Iterable[Any]) -> tuple[Any, Exception] | None:
    """The first leaf that can't be pickled, and why."""
    for leaf in leaves:
        try:
            dump_leaves([leaf])
        except Exception as error:
            return leaf, error
    return None


def load_leaves(pickled: bytes | memoryview, buffers: Iterable[memoryview], *, allow_pickle: bool) -> list[Any]:
    """What :func:`dump_leaves` wrote; arrays are views of ``buffers``."""
    kind = pickle.Unpickler if allow_pickle else Unpickler
    try:
        leaves = kind(io.BytesIO(pickled), buffers=buffers).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a pickle may raise
        raise CheckpointError(f"its objects can't be read: {type(error).__name__}: {error}") from error
    if type(leaves) is not list:
        raise CheckpointError("its objects are no list")
    return leaves


def freeze_leaves(leaves: list[Any]) -> list[Any]:
    """The same leaves; arrays in memory that somebody could write to become read-only copies."""
    ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)
    return [freeze_array(leaf) if type(leaf) is ndarray and not _read_only(leaf) else leaf for leaf in leaves]


def _read_only(array: Any) -> bool:
    """Whether the memory's owner says that it is read-only: bytes, or what Ray shares between processes."""
    if array.flags.writeable:
        return False
    owner = array
    while type(owner) is type(array):
        owner = owner.base
    if type(owner) is memoryview:
        owner = owner.obj
    return owner is not None and memoryview(owner).readonly
