"""Copies that belong together: one memo over facades, States and objects, as :func:`copy.deepcopy` has one."""

from __future__ import annotations

import copy
from typing import Any

from turnwise._C import State
from turnwise.copies import check_copies
from turnwise.state.opaque import EXPLAINING, can_be_copied, explained

_memos: dict[int, dict[int, Any]] = {}
"""The memo of each State that is being forked as part of a deep copy, by the State's id."""


def fork_within(state: State, memo: dict[int, Any]) -> State:
    """The fork of ``state`` that belongs to this deep copy: made at the first call, the same one afterwards."""
    known = memo.get(id(state))
    if known is None:
        _memos[id(state)] = memo
        try:
            known = state.fork()
        finally:
            del _memos[id(state)]
        memo[id(state)] = known
        keep_alive(state, memo)
    return known


def keep_alive(value: Any, memo: dict[int, Any]) -> None:
    """As deepcopy does: what the memo knows by its id must outlive the memo."""
    memo.setdefault(id(memo), []).append(value)


def copy_linked(objects: list[Any], state: State, child: State) -> list[Any]:
    """Copies of the objects in ``state`` for its fork ``child``: what they share, and what they hold of it, fits.

    Raises :class:`OpaqueError`, with the path, for what can't be copied.
    """
    memo = _memos.get(id(state))
    if memo is None:
        memo = {}
    memo[id(state)] = child
    try:
        copies = [copy.deepcopy(each, memo) for each in objects]
        check_copies(memo)
    except TypeError as error:
        if EXPLAINING:
            raise
        raise _explained(state, objects, error) from error
    return copies


def _explained(state: State, objects: list[Any], error: TypeError) -> Exception:
    EXPLAINING.append(True)
    try:
        culprit = next((each for each in objects if not can_be_copied(each, {id(state): state})), None)
    finally:
        EXPLAINING.pop()
    path = None if culprit is None else state._path_of(culprit)
    return error if path is None else explained(culprit, error, "data" + "".join(f"[{key!r}]" for key in path))


def copy_facade(facade: Any, memo: dict[int, Any] | None = None) -> Any:
    """A fork of the State that has this container as its root; within a deep copy, the one fork that belongs to it."""
    if memo is None:
        return facade._state.fork()._rooted_at(facade)
    if id(facade._state) in memo:
        return memo[id(facade._state)]._facade(facade)
    return fork_within(facade._state, memo)._rooted_at(facade)
