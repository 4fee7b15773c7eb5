"""Adds the less common TokenArray methods to the compiled type."""

from __future__ import annotations

import pickle
from typing import Any

from turnwise._C import TokenArray

_MOST_SHOWN = 16


def _view(tokens: TokenArray) -> memoryview:
    return memoryview(tokens._bytes()).cast("i")


def _from_buffer(buffer: Any) -> TokenArray:
    return TokenArray(memoryview(buffer).cast("B").cast("i"))


def _numpy(self: TokenArray) -> Any:
    """Return the ids as a read-only int32 array, without a copy until the next write. Torch's from_numpy accepts it."""
    import numpy as np

    return np.frombuffer(self._bytes(), np.int32)


def _array(self: TokenArray, dtype: Any = None, copy: bool | None = None) -> Any:
    array = self.numpy()
    if dtype is not None and dtype != array.dtype:
        if copy is False:
            raise ValueError(f"dtype={dtype!r}: without a copy a TokenArray is int32 only")
        return array.astype(dtype)
    return array.copy() if copy else array


def _tolist(self: TokenArray) -> list[int]:
    """Return the ids as a list of ints."""
    return _view(self).tolist()


def _iterate(self: TokenArray) -> Any:
    return iter(self.tolist())


def _equals(self: TokenArray, other: object) -> Any:
    if self is other:
        return True
    if type(other) is TokenArray:
        return len(self) == len(other) and self._bytes() == other._bytes()
    if isinstance(other, list):
        return len(self) == len(other) and self.tolist() == other
    return NotImplemented


def _repr(self: TokenArray) -> str:
    size = len(self)
    if size <= _MOST_SHOWN:
        return f"TokenArray({self.tolist()})"
    first, last = (", ".join(map(str, self[part].tolist())) for part in (slice(0, 3), slice(-3, None)))
    return f"TokenArray([{first}, ..., {last}]: {size} tokens)"


def _copy(self: TokenArray, memo: Any = None) -> TokenArray:
    """Return an array outside any State. In a deep copy of its State, return that copy's array."""
    known = None if memo is None or self._state is None else memo.get(id(self._state))
    return self[:] if known is None else known._facade(self)


def _reduce(self: TokenArray, protocol: int) -> Any:
    ids = self._bytes()
    return _from_buffer, (pickle.PickleBuffer(ids) if protocol >= 5 else ids,)


for _name, _method in {
    "numpy": _numpy,
    "tolist": _tolist,
    "__array__": _array,
    "__iter__": _iterate,
    "__eq__": _equals,
    "__repr__": _repr,
    "__copy__": _copy,
    "__deepcopy__": _copy,
    "__reduce_ex__": _reduce,
}.items():
    setattr(TokenArray, _name, _method)
