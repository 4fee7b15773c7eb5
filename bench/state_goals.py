"""The goals of the state store, and the figures measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from state_cases import SIZES
from state_lists import HISTORIES

Row = dict[str, Any]

AT_LEAST = {  # by size
    "deepcopy / fork": (300, 2_000, 50_000, 200_000),
    "8 deepcopies / 8 × (fork + write)": (60, 400, 10_000, 25_000),
    "copium + 1% of containers / fork + the same": (3, 8, 30, 12),
    "copium + 1% of leaves / fork + the same": (3, 8, 30, 12),
    "pickles of each version / checkpoint": (5, 25, 80, 25),
}
TREE = "64 branches × 32 turns, in deepcopies"
AT_MOST = {TREE: (400, 200, 50, 70)}
FLAT, FIRST_WRITE, PRUNE, COLLECT = 2.0, 3.0, 10.0, 2.0
LIST_WRITES, LIST_WRITE, LIST_BYTES = ("insert(0)", "pop(0)", "del [0]"), 5.0, 4_096.0
READS = {  # at most, × plain
    **{"held key": 1.3, "random paths": 1.3, "three-hop chain": 2.0, "int list element": 3.5},
    **{"traversal of messages": 1.3, "traversal with isinstance": 1.3},
    **{"owned write, dict": 1.5, "owned write, list": 1.5},
    **{f"int list element, {history}": 3.5 for history in HISTORIES},
    **{"FrozenLake step": 1.15, "Blackjack step": 1.15, "Warehouse step": 1.15},
}


def goals(copied: list[Row], written: list[Row], read: list[Row], grown: list[Row], listed: list[Row]) -> list[Row]:
    """Return a row per goal and size, except for figures that are unknown without a peer or with a small tree."""
    return [
        {
            "goal": goal,
            "state": state,
            "method": "turnwise",
            "figure": float(figure),
            "wanted": f"{'≥' if least else '≤'} {wanted:,}",
            "met": "yes" if (figure >= wanted if least else figure <= wanted) else "NO",
        }
        for goal, state, figure, least, wanted in _figures(copied, written, read, grown, listed)
        if figure is not None
    ]


def _figures(
    copied: list[Row], written: list[Row], read: list[Row], grown: list[Row], listed: list[Row]
) -> Iterator[tuple[str, str, float | None, bool, float]]:
    """Yield ``(goal, state, figure, at least?, wanted)``."""
    forks = {(row["state"], row["method"]): row for row in copied}
    tree = {row["state"]: row for row in grown if row["method"] == "turnwise" and row["versions"] == 64 * 32}
    sizes = [size for size in SIZES if (size, "turnwise") in forks]
    for goal, wanted in AT_LEAST.items():
        for size in sizes:
            yield goal, size, _ratio(goal, size, forks, tree), True, wanted[SIZES.index(size)]
    for size in tree:
        yield TREE, size, tree[size]["in deepcopies"], False, AT_MOST[TREE][SIZES.index(size)]
    if {"S", "XL"} <= set(sizes):
        largest, smallest = forks["XL", "turnwise"]["fork, µs"], forks["S", "turnwise"]["fork, µs"]
        yield "fork of XL / fork of S", "", largest / smallest, False, FLAT
    for row in written:
        yield f"first write, {row['first write']}, µs", row["state"], row["µs"], False, FIRST_WRITE
    for row in listed:
        if row["method"] == "turnwise" and row["write"] in LIST_WRITES:
            yield f"{row['write']} of a long list, µs", "", row["µs"], False, LIST_WRITE
            yield f"{row['write']} of a long list, bytes un-shared", "", row["bytes un-shared"], False, LIST_BYTES
    for size, row in tree.items():
        yield "prune, µs per version", size, row["prune, µs"], False, PRUNE
        yield "gc.collect, × of the process without a tree", size, row["× empty"], False, COLLECT
    for row in read:
        if row["method"] == "turnwise" and row["read"] in READS:
            yield f"{row['read']}, × plain", "M", row["× plain"], False, READS[row["read"]]


def _ratio(goal: str, size: str, forks: dict[tuple[str, str], Row], tree: dict[str, Row]) -> float | None:
    ours, deepcopy, copium = (forks.get((size, method)) for method in ("turnwise", "deepcopy", "copium"))
    assert ours is not None and deepcopy is not None
    if goal.startswith("pickles"):
        return tree[size]["pickles / checkpoint"] if size in tree else None
    if goal == "deepcopy / fork":
        return deepcopy["fork, µs"] / ours["fork, µs"]
    if goal.startswith("8 deepcopies"):
        return deepcopy["8 copies, µs"] / ours["8 × (copy + write), µs"]
    column = f"8 × (copy + 1% of {'leaves' if 'leaves' in goal else 'containers'}), µs"
    return copium[column] / ours[column] if copium else None
