"""What of an object can't be copied: found by trying its parts, and named by its path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwise._C import OpaqueError, StateDict, StateList
from turnwise.copies import deep_copy
from turnwise.state.plain import to_python

EXPLAINING: list[bool] = []
"""Not empty while an error is looked into: the copies that are tried then raise plainly."""


def explained(owner: Any, error: TypeError, at: str = "") -> Exception:
    """The error with the path of what can't be copied in ``owner``, which lies ``at`` another path; the error itself
    where no single thing is to blame."""
    path, culprit = at or type(owner).__name__, owner
    error = error.__cause__ if isinstance(error.__cause__, TypeError) else error  # it may have been explained below
    # What leads back to the object or to its own containers is not to blame.
    seen = {id(owner): owner}
    seen |= {id(part._state): part._state for _, part in _parts(owner) if type(part) in (StateDict, StateList)}
    EXPLAINING.append(True)
    try:
        while True:
            parts = [(step, part) for step, part in _parts(culprit) if id(part) not in seen]
            found = next(((step, part) for step, part in parts if not can_be_copied(part, dict(seen))), None)
            if found is None:
                break
            path, culprit = path + found[0], found[1]
            seen[id(culprit)] = culprit
    finally:
        EXPLAINING.pop()
    if culprit is owner and not at:
        return error
    what = f"{path}: an object of type {type(culprit).__name__}, which can't be copied ({error})"
    if culprit is owner or not getattr(type(owner), "__turnwise_forkable__", False):
        return OpaqueError(what)
    name = type(owner).__name__
    return OpaqueError(
        f"{what}. If all copies may hold the same one, share the attribute: class {name}(ForkableMixin, share=(...))"
    )


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        shared = getattr(type(value), "_turnwise_share", ())
        yield from ((f".{name}", item) for name, item in vars(value).items() if name not in shared)


def can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        deep_copy(to_python(value), memo)
    except Exception:
        return False
    return True
