"""Notes of errors: what failed after the first error, and where a run is saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SavedNote(str):
    """A note of an error that ended a run while it trained: where the run is saved."""

    __slots__ = ()


@contextmanager
def after(error: BaseException, what: str) -> Iterator[None]:
    """In the handling of ``error``, keep it the one that is raised: an error of ``what`` becomes a note of it."""
    try:
        yield
    except BaseException as second:
        error.add_note(f"then {what} failed: {type(second).__name__}: {second}")
