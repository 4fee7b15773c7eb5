"""Forkable Python state, for episodes that branch.

This interim copies with :func:`copy.deepcopy`; a copy-on-write store takes its place behind the same calls.
"""

from __future__ import annotations

import copy
from typing import TypeVar

__all__ = ["fork_many"]

T = TypeVar("T")


def fork_many(objects: T, n: int) -> list[T]:
    """``n`` independent copies of ``objects``, copied jointly: what was shared between them stays shared in each copy.

    Example: ``for env, agents in fork_many((env, agents), 8): ...``
    """
    if n < 0:
        raise ValueError(f"n={n!r}: expected a count >= 0")
    return [copy.deepcopy(objects) for _ in range(n)]
