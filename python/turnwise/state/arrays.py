"""numpy arrays as leaves: read-only, so that versions can share them."""

from __future__ import annotations

from typing import Any


def freeze_array(array: Any) -> Any:
    """A read-only array with the same values: itself if nobody can write to its memory, else a copy.

    A flag is not enough: whoever holds the base, or a view of it, could still write and change every version at once.
    So the copy lies in a bytes object, which numpy makes writable for nobody.
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
    if type(base) is memoryview:  # a file's or a pickle's
        base = base.obj
    if type(base) is bytes:
        return array
    # The order in memory stays: code that is fast on columns stays so.
    turned = array.flags.f_contiguous and not array.flags.c_contiguous
    rows = array.T if turned else array
    frozen = np.ndarray(rows.shape, rows.dtype, rows.tobytes())
    return frozen.T if turned else frozen
