"""Fork several objects at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from turnwise._C import State, StateDict, StateList
from turnwise.state.exclusive import graph_of
from turnwise.state.store import OBJECTS
from turnwise.utils.copies import check_copies


def fork_many(objects: Sequence[Any], n: int) -> list[list[Any]]:
    """Make ``n`` independent copies of ``objects``, each a list of the same length. Sharing among objects is kept.

    Objects may be :class:`ForkableMixin` objects, States, facades, and anything :func:`copy.deepcopy` copies. Lists and
    dicts are copied as facades, unless another of the objects refers into them. Raises the errors of deepcopy; the
    objects are then unchanged.

    Example: ``for env, agents in fork_many([env, agents], 8): ...``
    """
    if not isinstance(objects, list | tuple):
        raise TypeError(f"objects={objects!r}: expected a list or tuple of the objects to fork together")
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"n={n!r}: expected a whole number >= 0")
    if n < 0:
        raise ValueError(f"n={n!r}: expected a whole number >= 0")
    # Lists and dicts that nothing else refers into become one State, which forks in constant time.
    graphs = {index: graph_of(item, OBJECTS.is_shared) for index, item in enumerate(objects) if _is_plain(item)}
    apart: list[int] = []
    versions: list[State] = []
    copies: list[list[Any]] = []
    for number in range(n):
        # Copy the other objects first. Their memo shows which containers they refer into.
        memo: dict[int, Any] = {}
        made = [None if graphs.get(index) else copy.deepcopy(item, memo) for index, item in enumerate(objects)]
        if number == 0:
            apart = _apart_from(memo, objects, graphs)
            versions = OBJECTS.state([objects[index] for index in apart]).fork(n) if apart else []
        for index in graphs:
            if index in apart:
                made[index] = versions[number].data[apart.index(index)]
            else:
                made[index] = copy.deepcopy(objects[index], memo)
        check_copies(memo)
        copies.append(made)
    return copies


def forkable(data: Any) -> Any:
    """Return ``data`` in a form that deep-copies in constant time: a facade for a dict or list, else ``data`` itself.

    The State takes over the contents, as it does on a write. It keeps the same objects, and forks copy them with one
    memo.

    Example: ``state.data = forkable({"board": board, "env": env})``
    """
    if not _is_plain(data):
        return data
    state = OBJECTS.state(None)
    return state._rooted_at(state._take_over([data])[0])


def prune(data: Any) -> None:
    """Free the version that a facade belongs to; other objects are ignored. Later use raises PrunedError."""
    if type(data) is StateDict or type(data) is StateList:
        data._state.prune()


def _is_plain(value: Any) -> bool:
    return type(value) is list or type(value) is dict


def _apart_from(memo: dict[int, Any], objects: Sequence[Any], graphs: dict[int, set[int] | None]) -> list[int]:
    """Return the containers that nothing in the memo refers into. Copies the others, which may extend the memo."""
    apart = [index for index, graph in graphs.items() if graph is not None]
    while met := [index for index in apart if not memo.keys().isdisjoint(graphs[index] or ())]:
        for index in met:
            copy.deepcopy(objects[index], memo)
            apart.remove(index)
    return apart
