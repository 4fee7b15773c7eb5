"""Adds the less common TokenArray methods to the compiled type."""

from __future__ import annotations

import pickle
from typing import Any

from turnwise._C import TokenArray
from turnwise.state.containers import add_to

_MAX_SHOWN = 16


@add_to(TokenArray)
class _TokenMethods:
    def numpy(self: Any) -> Any:
        """Return the ids as a read-only int32 array, without a copy until the next write.

        Torch's from_numpy accepts it.
        """
        import numpy as np

        return np.frombuffer(self._bytes(), np.int32)

    def tolist(self: Any) -> list[int]:
        """Return the ids as a list of ints."""
        return memoryview(self._bytes()).cast("i").tolist()

    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        if dtype is not None and dtype != array.dtype:
            if copy is False:
                raise ValueError(f"dtype={dtype!r}: without a copy a TokenArray is int32 only")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __iter__(self: Any) -> Any:
        return iter(self.tolist())

    def __eq__(self: Any, other: object) -> Any:
        if self is other:
            return True
        if type(other) is TokenArray:
            return len(self) == len(other) and self._bytes() == other._bytes()
        if isinstance(other, list):
            return len(self) == len(other) and self.tolist() == other
        return NotImplemented

    def __repr__(self: Any) -> str:
        size = len(self)
        if size <= _MAX_SHOWN:
            return f"TokenArray({self.tolist()})"
        first, last = (", ".join(map(str, self[part].tolist())) for part in (slice(0, 3), slice(-3, None)))
        return f"TokenArray([{first}, ..., {last}]: {size} tokens)"

    def __copy__(self: Any, memo: Any = None) -> TokenArray:
        """Return an array outside any State. In a deep copy of its State, return that copy's array."""
        state_copy = None if memo is None or self._state is None else memo.get(id(self._state))
        return self[:] if state_copy is None else state_copy._facade(self)

    __deepcopy__ = __copy__

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        ids = self._bytes()
        return _from_buffer, (pickle.PickleBuffer(ids) if protocol >= 5 else ids,)


def _from_buffer(buffer: Any) -> TokenArray:
    return TokenArray(memoryview(buffer).cast("B").cast("i"))
