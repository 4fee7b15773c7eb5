"""Deep copies across facades, States and objects, with one memo as in :func:`copy.deepcopy`.

Errors name the part of an object that can't be copied.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

from turnwise._C import OpaqueError, State, StateDict, StateList
from turnwise.state.plain import to_python
from turnwise.utils.copies import check_copies, deep_copy


class Copying(threading.local):
    """What this thread copies now."""

    explains: bool = False
    """An error is being explained; trial copies then raise the plain error."""

    def __init__(self) -> None:
        self.memos: dict[int, dict[int, Any]] = {}
        """The memo of each State that is being forked as part of a deep copy, by the State's id."""


copying = Copying()


def fork_within(state: State, memo: dict[int, Any]) -> State:
    """Return the fork of ``state`` for this deep copy. The first call makes it, and later calls return the same."""
    if id(state) not in memo:
        copying.memos[id(state)] = memo
        try:
            memo[id(state)] = state.fork()
        finally:
            del copying.memos[id(state)]
        keep_alive(state, memo)
    child: State = memo[id(state)]
    return child


def keep_alive(value: Any, memo: dict[int, Any]) -> None:
    """Keep ``value`` alive as long as the memo, which knows it by id (as deepcopy does)."""
    memo.setdefault(id(memo), []).append(value)


def copy_linked(objects: list[Any], state: State, child: State) -> list[Any]:
    """Copy the objects in ``state`` for its fork ``child``, keeping the sharing among them and with the State.

    Raises :class:`OpaqueError`, with the path, for an object that can't be copied.
    """
    memo = copying.memos.get(id(state), {})
    memo[id(state)] = child
    try:
        copies = [copy.deepcopy(each, memo) for each in objects]
        check_copies(memo)
    except TypeError as error:
        if copying.explains:
            raise
        raise _explained(state, objects, error) from error
    return copies


def _explained(state: State, objects: list[Any], error: TypeError) -> Exception:
    copying.explains = True
    try:
        culprit = next((each for each in objects if not can_be_copied(each, {id(state): state})), None)
    finally:
        copying.explains = False
    path = None if culprit is None else state._path_of(culprit)
    return error if path is None else explained(culprit, error, "data" + "".join(f"[{key!r}]" for key in path))


def copy_facade(facade: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a fork of the State, rooted at this container. A deep copy makes one fork and returns it each time."""
    if memo is None:
        return facade._state.fork()._rooted_at(facade)
    if id(facade._state) in memo:
        return memo[id(facade._state)]._facade(facade)
    return fork_within(facade._state, memo)._rooted_at(facade)


def explained(owner: Any, error: TypeError, at: str = "") -> Exception:
    """Return the error with the path of the part of ``owner`` that can't be copied; ``at`` is the path of ``owner``.

    Returns ``error`` itself if no single part is the cause.
    """
    path, culprit = at or type(owner).__name__, owner
    error = error.__cause__ if isinstance(error.__cause__, TypeError) else error  # an inner call may have explained it
    # Values that lead back to the object or to its own containers are not the cause.
    seen = {id(owner): owner}
    seen |= {id(part._state): part._state for _, part in _parts(owner) if type(part) in (StateDict, StateList)}
    # Go down from the owner into the first part that can't be copied, until none of its parts is the cause.
    copying.explains = True
    try:
        while True:
            parts = [(step, part) for step, part in _parts(culprit) if id(part) not in seen]
            cause = next(((step, part) for step, part in parts if not can_be_copied(part, dict(seen))), None)
            if cause is None:
                break
            path, culprit = path + cause[0], cause[1]
            seen[id(culprit)] = culprit
    finally:
        copying.explains = False
    if culprit is owner and not at:
        return error
    message = f"{path}: an object of type {type(culprit).__name__}, which can't be copied ({error})"
    if culprit is owner or not getattr(type(owner), "__turnwise_forkable__", False):
        return OpaqueError(message)
    name = type(owner).__name__
    return OpaqueError(
        f"{message}. If all copies may hold the same one, share the attribute: class {name}(ForkableMixin, share=(...))"
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
