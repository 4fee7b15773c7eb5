"""Convert facades back to plain containers."""

from __future__ import annotations

from typing import Any

from turnwise._C import State, StateDict, StateList, TokenArray
from turnwise.state.exclusive import ATOMS

_CONTAINERS = frozenset({StateDict, StateList, dict, list})


def to_python(value: Any) -> Any:
    """Return plain containers with the contents of ``value``: a State, a facade, or a container that holds some.

    Aliasing and cycles are kept. Leaves, and objects that the store can't look into, are the same objects. A
    :class:`TokenArray` becomes a list of ints. Works as ``default=`` for :func:`json.dumps` and ``orjson.dumps``.

    Example: ``json.dumps(state.data, default=to_python)``
    """
    memo: dict[int, Any] = {}
    kept: list[Any] = []  # keeps objects in `memo` and `shown` alive, so that their ids stay valid
    shown: dict[int, dict[int, Any]] = {}  # by the id of a State: the tuples read in it
    open_: list[tuple[Any, Any]] = []

    def read(source: Any, state: State) -> list[Any]:
        if id(state) not in shown:
            shown[id(state)] = {}
            kept.append(state)
        values: list[Any] = source._values(shown[id(state)])
        return values

    # Return the plain form of an item. A container's is still empty; the loop below fills it.
    def plain(item: Any) -> Any:
        kind = type(item)
        if kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, item))):
            return item
        is_container = kind in _CONTAINERS
        if not is_container and kind is not TokenArray and not isinstance(item, tuple):
            return item
        if id(item) not in memo:
            kept.append(item)
            if not is_container:
                memo[id(item)] = item.tolist() if kind is TokenArray else rebuilt(item)
            else:
                memo[id(item)] = {} if kind in (StateDict, dict) else []
                open_.append((item, memo[id(item)]))
        return memo[id(item)]

    def rebuilt(item: tuple[Any, ...]) -> Any:
        parts = [plain(part) for part in item]
        if all(ours is theirs for ours, theirs in zip(parts, item, strict=True)):
            return item
        return tuple.__new__(type(item), parts)

    # Fill the lists and dicts one after another, without recursion, as they may be nested deeply.
    result = plain(read(value, value)[0] if type(value) is State else value)
    while open_:
        source, target = open_.pop()
        if type(source) in (StateDict, StateList):
            values = read(source, source._state)
        else:
            values = list(source.values()) if type(source) is dict else source
        if type(target) is dict:
            target.update(zip(source, map(plain, values), strict=True))
        else:
            target.extend(map(plain, values))
    return result
