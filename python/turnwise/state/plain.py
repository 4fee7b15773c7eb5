"""From facades back to plain containers."""

from __future__ import annotations

from typing import Any

from turnwise._C import State, StateDict, StateList, TokenArray


def to_python(value: Any) -> Any:
    """Plain containers with the contents of ``value``: a State, one of its facades, or anything that holds some.

    Aliasing and cycles within it are kept; leaves, and objects that the store can't look into, are the same objects. A
    :class:`TokenArray` becomes a list of ints. Also a ``default=`` for :func:`json.dumps` and ``orjson.dumps``.

    Example: ``json.dumps(state.data, default=to_python)``
    """
    if type(value) is State:
        value = value.data
    memo: dict[int, Any] = {}
    open_: list[tuple[Any, Any]] = []

    def plain(item: Any) -> Any:
        kind = type(item)
        if kind is TokenArray:
            known = memo.get(id(item))
            if known is None:
                known = memo[id(item)] = item.tolist()
                kept.append(item)
            return known
        if kind not in (StateDict, StateList, dict, list):
            return rebuilt(item) if isinstance(item, tuple) else item
        known = memo.get(id(item))
        if known is None:
            known = memo[id(item)] = {} if kind in (StateDict, dict) else []
            open_.append((item, known))
            kept.append(item)
        return known

    def rebuilt(item: tuple[Any, ...]) -> Any:
        parts = [plain(part) for part in item]
        if all(ours is theirs for ours, theirs in zip(parts, item, strict=True)):
            return item
        return tuple.__new__(type(item), parts)

    kept: list[Any] = []  # facades stay alive, so that their ids stay theirs
    result = plain(value)
    while open_:
        source, target = open_.pop()
        if type(target) is dict:
            for key, item in source.items():
                target[key] = plain(item)
        else:
            target.extend(map(plain, source))
    return result
