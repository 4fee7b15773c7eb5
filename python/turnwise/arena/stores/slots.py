"""A persistent tree of numbered slots. Forks share it, so a snapshot costs nothing, and a change a few nodes.

Each node knows the number of items below each of its children, and the sum of their values. So the tree finds an item
by its place or by a cumulative sum, and the differences of two trees, without looking at what they share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

V = TypeVar("V")

BITS = 5
WIDTH = 1 << BITS
"""Children of a node."""


class _Node:
    """Children or items, with the count and the sum of each. Only trees with the same ``owner`` change it."""

    __slots__ = ("counts", "items", "owner", "sums")

    def __init__(self, owner: object, below: _Node | None = None) -> None:
        self.owner = owner
        self.items: list[Any] = [None] * WIDTH
        self.counts = [0] * WIDTH
        self.sums: list[float] = [0] * WIDTH
        if below is not None:
            self.set(0, below, sum(below.counts), sum(below.sums))

    def set(self, index: int, item: Any, count: int, value: float) -> None:
        self.items[index], self.counts[index], self.sums[index] = item, count, value

    def copied(self, owner: object) -> _Node:
        copied = _Node.__new__(_Node)
        copied.owner = owner
        copied.items, copied.counts, copied.sums = self.items[:], self.counts[:], self.sums[:]
        return copied


class SlotTree(Generic[V]):
    """Items by slot number, each with a value, in the order of slots.

    One thread at a time may change a tree. Any thread may read its forks meanwhile.

    Example::

        tree = SlotTree[str]()
        tree.put(7, "seven", 2.0)
        before = tree.fork()
        tree.drop(7)
        assert before.get(7) == "seven" and before.total == 2.0 and len(tree) == 0
    """

    __slots__ = ("_height", "_owner", "_root")

    def __init__(self) -> None:
        self._owner, self._height = object(), 0
        self._root = _Node(self._owner)

    @classmethod
    def built(cls, rows: Iterable[tuple[int, V, float]]) -> SlotTree[V]:
        """Return the tree of ``(slot, item, value)``, which come in the order of slots."""
        tree = cls()
        nodes = tree._level((slot, item, 1, value) for slot, item, value in rows)
        while len(nodes) > 1 or (nodes and nodes[0][0] > 0):
            nodes = tree._level((number, node, sum(node.counts), sum(node.sums)) for number, node in nodes)
            tree._height += 1
        if nodes:
            tree._root = nodes[0][1]
        return tree

    def _level(self, rows: Iterable[tuple[int, Any, int, float]]) -> list[tuple[int, _Node]]:
        nodes: list[tuple[int, _Node]] = []
        for slot, item, count, value in rows:
            if not nodes or nodes[-1][0] != slot >> BITS:
                nodes.append((slot >> BITS, _Node(self._owner)))
            nodes[-1][1].set(slot & WIDTH - 1, item, count, value)
        return nodes

    def fork(self) -> SlotTree[V]:
        """Return a tree with the same items, in constant time. Neither sees changes of the other."""
        fork = SlotTree.__new__(SlotTree)
        fork._root, fork._height, fork._owner = self._root, self._height, object()
        self._owner = object()
        return fork

    # -- reading -------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return sum(self._root.counts)

    @property
    def total(self) -> float:
        """Sum of the values."""
        return sum(self._root.sums)

    def get(self, slot: int) -> V | None:
        leaf = self._leaf(slot)
        return None if leaf is None else leaf.items[slot & WIDTH - 1]

    def value(self, slot: int) -> float:
        """Return the value of a slot; 0 if it is empty."""
        leaf = self._leaf(slot)
        return 0 if leaf is None else leaf.sums[slot & WIDTH - 1]

    def _leaf(self, slot: int) -> _Node | None:
        if slot >> BITS * (self._height + 1):
            return None
        node: _Node | None = self._root
        for shift in range(BITS * self._height, 0, -BITS):
            if node is None:
                return None
            node = node.items[slot >> shift & WIDTH - 1]
        return node

    def __iter__(self) -> Iterator[tuple[int, V]]:
        """Yield ``(slot, item)``. The tree must not change meanwhile; fork it first."""
        yield from _walk(self._root, self._height, 0)

    def find(self, mass: float, each: float = 1, scale: float = 0) -> tuple[int, V]:
        """Return the first slot up to which the items weigh more than ``mass``, and its item.

        An item weighs ``each + scale * value``, at least 0. If rounding makes ``mass`` all that they weigh, this is the
        last one that weighs something. So ``find(k)`` is item number ``k``. Raises ``ValueError`` if all weigh 0.
        """
        node, slot = self._root, 0
        for _ in range(self._height + 1):
            chosen = -1
            for index, count in enumerate(node.counts):
                if count and (below := each * count + scale * node.sums[index]) > 0:
                    chosen = index
                    if mass < below:
                        break
                    mass -= below
            else:
                mass = math.inf  # rounding: go on with the last one below, too
            if chosen < 0:
                raise ValueError("no item of the tree weighs anything")
            slot, node = slot << BITS | chosen, node.items[chosen]
        return slot, node  # type: ignore[return-value]

    # -- changing ------------------------------------------------------------------------------------------------------
    def put(self, slot: int, item: V, value: float = 0) -> None:
        """Set the item of a slot."""
        while slot >> BITS * (self._height + 1):
            self._root, self._height = _Node(self._owner, self._root if len(self) else None), self._height + 1
        self._set(slot, item, 1, value)

    def drop(self, slot: int) -> None:
        """Empty a slot, which may be empty."""
        if self.get(slot) is not None:  # a slot above all of the tree is none of its nodes
            self._set(slot, None, 0, 0)

    def _set(self, slot: int, item: V | None, count: int, value: float) -> None:
        owner, node = self._owner, self._root
        if node.owner is not owner:
            node = self._root = node.copied(owner)
        path: list[tuple[_Node, int]] = []
        for shift in range(BITS * self._height, 0, -BITS):
            index = slot >> shift & WIDTH - 1
            path.append((node, index))
            child = node.items[index]
            if child is None:
                child = _Node(owner)
            elif child.owner is not owner:
                child = child.copied(owner)
            node.items[index] = node = child
        node.set(slot & WIDTH - 1, item, count, value)
        for parent, index in reversed(path):
            below = sum(node.counts)
            parent.set(index, node if below else None, below, sum(node.sums))
            node = parent


def changes(old: SlotTree[V], new: SlotTree[V]) -> Iterator[tuple[int, V | None, V | None]]:
    """Yield ``(slot, old item, new item)`` where two trees have other items, in the order of slots.

    Nodes that both share are not visited. Neither tree may change meanwhile.
    """
    height = max(old._height, new._height)
    yield from _differences(_lifted(old, height), _lifted(new, height), height, 0)


def _lifted(tree: SlotTree[Any], height: int) -> _Node:
    node = tree._root
    for _ in range(height - tree._height):
        node = _Node(None, node)
    return node


def _differences(old: _Node | None, new: _Node | None, height: int, base: int) -> Iterator[tuple[int, Any, Any]]:
    nothing = [None] * WIDTH
    before, after = (nothing if node is None else node.items for node in (old, new))
    for index, (ours, theirs) in enumerate(zip(before, after, strict=True)):
        if ours is not theirs:
            slot = base << BITS | index
            if height:
                yield from _differences(ours, theirs, height - 1, slot)
            else:
                yield slot, ours, theirs


def _walk(node: _Node, height: int, base: int) -> Iterator[tuple[int, Any]]:
    for index, item in enumerate(node.items):
        if item is not None:
            if height:
                yield from _walk(item, height - 1, base << BITS | index)
            else:
                yield base << BITS | index, item
