"""numpy arrays as leaves: read-only, so that versions can share them."""

from __future__ import annotations

from typing import Any


def freeze_array(array: Any) -> Any:
    """A read-only array with the same values: itself if nobody can write to its memory, else a copy.

    A view is not enough: whoever holds the base could still write, and change every version at once.
    """
    base = array
    while base is not None and type(base).__name__ == "ndarray":
        if base.flags.writeable:
            break
        base = base.base
    if base is None or isinstance(base, bytes):
        return array
    frozen = array.copy()
    frozen.flags.writeable = False
    return frozen
