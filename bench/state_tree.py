"""A tree of versions, all kept, in a new process: memory, gc pauses, checkpoint, pruning. Prints JSON.

python bench/state_tree.py unit M                 # resident bytes of one kept deepcopy
python bench/state_tree.py tree M turnwise 64 32  # 64 branches x 32 turns, each turn a fork that is written to

The script imports only numpy and the method's package, so that the garbage collector sees little except the tree.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from state_cases import Method, Turnwise, has, make, method, same, turn

Tree = list[list[Any]]
UNIT_BYTES = 64 << 20  # so many bytes of deepcopies are kept to measure one


class Pauses:
    """Times the garbage collector's pauses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self.begun = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self.begun)


def resident() -> int | None:
    """Return the resident bytes of this process, without freed memory; ``None`` if the system doesn't report them."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        lines = Path("/proc/self/status").read_text().splitlines()
    except (OSError, AttributeError):
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def collect_seconds() -> float:
    """Return the median seconds of full collections, without the first two, which have more to do."""
    samples = []
    for _ in range(9):
        start = time.perf_counter()
        gc.collect()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])


def unit(size: str) -> dict[str, Any]:
    data = make(size)
    first = copy.deepcopy(data)
    before = resident()
    kept = [copy.deepcopy(data) for _ in range(4)]
    rough = (resident() or 0) - (before or 0)
    count = max(8, min(8192, UNIT_BYTES * 4 // max(rough, 1)))
    del kept
    before = resident()
    kept = [copy.deepcopy(data) for _ in range(count)]
    after = resident()
    assert same(kept[-1], first)
    return {"bytes": None if before is None or after is None else (after - before) / count}


def grow(way: Method, root: Any, size: str, branches: int, turns: int) -> Tree:
    """Return every version of every branch. A turn forks the last version, appends a message and writes some leaves."""
    tree = []
    for branch in range(branches):
        versions, held = [], root
        for number in range(turns):
            held = play(way, way.fork(held), size, branch, number)
            versions.append(held)
        tree.append(versions)
    return tree


def play(way: Method, held: Any, size: str, branch: int, number: int) -> Any:
    appended, written = turn(size, branch, number)
    for path, value in appended:
        held = way.append(held, path, value)
    return way.write_all(held, written)


def verify(way: Method, root: Any, tree: Tree, size: str) -> None:
    """Check that the root is unchanged, and that one branch equals plain containers in its middle and at its end."""
    plain = Method("plain", lambda held: held)
    expected = make(size)
    assert same(way.plain(root), expected), f"{way.name}: the root has changed"
    branch = len(tree) // 2
    for number, version in enumerate(tree[branch]):
        expected = play(plain, expected, size, branch, number)
        if number in (len(tree[branch]) // 2, len(tree[branch]) - 1):
            assert same(way.plain(version), expected), f"{way.name}: turn {number} differs"


def checkpoint(way: Turnwise, tree: Tree) -> dict[str, Any]:
    """Save every version in one file, and compare its size with a pickle of each, extrapolated from one branch."""
    from turnwise.state import load

    states = {f"{branch}/{number}": held for branch, line in enumerate(tree) for number, held in enumerate(line)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        start = time.perf_counter()
        way.store.save(path, states)
        saving = time.perf_counter() - start
        size = path.stat().st_size
        start = time.perf_counter()
        loaded = load(path)
        loading = time.perf_counter() - start
    last = f"{len(tree) - 1}/{len(tree[-1]) - 1}"
    assert loaded.keys() == states.keys() and same(way.plain(loaded[last]), way.plain(states[last])), "checkpoint"
    pickles = sum(len(pickle.dumps(way.plain(held), 5)) for held in tree[0]) * len(tree)
    return {"checkpoint": size, "pickles": pickles, "save": saving, "load": loading}


def measure(size: str, name: str, branches: int, turns: int) -> dict[str, Any]:
    way = method(name)
    play(way, way.hold(make(size)), size, 0, 0)  # what the first call imports and allocates is nobody's memory
    empty = collect_seconds()
    root = way.hold(make(size))
    pauses = Pauses()
    before = resident()
    gc.callbacks.append(pauses)
    start = time.perf_counter()
    tree = grow(way, root, size, branches, turns)
    seconds = time.perf_counter() - start
    gc.callbacks.remove(pauses)
    after = resident()
    result = {
        "bytes": None if before is None or after is None else after - before,
        "seconds": seconds,
        "gc share": sum(pauses.seconds) / seconds,
        "longest pause": max(pauses.seconds, default=0.0),
        "gc.collect": collect_seconds(),
        "gc.collect, empty": empty,
    }
    verify(way, root, tree, size)
    if isinstance(way, Turnwise):
        if has("load"):
            result |= checkpoint(way, tree)
        versions = [held for line in tree for held in reversed(line)]
        start = time.perf_counter()
        for held in versions:
            held.prune()
        result["prune"] = (time.perf_counter() - start) / len(versions)
        assert same(way.plain(root), make(size)), "the root outlives what was pruned"
    return result


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    answer = unit(rest[0]) if what == "unit" else measure(rest[0], rest[1], int(rest[2]), int(rest[3]))
    print(json.dumps(answer))
