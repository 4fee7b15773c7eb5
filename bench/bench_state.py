"""The state store, copy.deepcopy, copium, pickle, immutables and pyrsistent. Verifies first, then times.

There are four states. S is a board game, M a transcript of 40 turns with a tool's answers. L is a transcript of 440
turns with 65,536 token ids and two arrays, XL has four such agents in a world of 8,000 things. Times are medians of
statements run in turns, including the loop around them. Garbage collection is on; objects from the imports are frozen.
A tree of versions grows in its own process (``state_tree.py``).

A fork of a persistent map is the map itself, so it has no time. immutables has no vector, so a list becomes a map by
index. The last table compares our figures with the goals of the store.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import state_lists
from common import arguments, finish, statements
from state_cases import (
    FIRST_WRITE,
    SIZES,
    Method,
    Persistent,
    Turnwise,
    at,
    census,
    changed,
    make,
    methods,
    same,
    writes,
)
from state_envs import BRANCHES, TURNS
from state_goals import goals
from state_reads import reads, rollouts, steps

Row = dict[str, Any]
HERE = Path(__file__).parent
CHUNK = {  # a place in the state's largest container
    "S": ("board", 4, 4),
    "M": ("messages", 40, "role"),
    "L": ("token_ids", 32_768),
    "XL": ("agents", 3, "token_ids", 32_768),
}

# The statements of each method. `held` is the state, `fork` the method's copy, `eight` a range; eight copies are
# kept until all exist, as branches are.
COPY = {
    "fork": "fork(held)",
    "8 copies": "kept = [fork(held) for _ in eight]",
    "8 × (copy + write)": """kept = [fork(held) for _ in eight]
for child in kept: child['game']['turn'] = 1""",
    "8 × (copy + 1% of leaves)": "kept = [apply(fork(held), leaves) for _ in eight]",
    "8 × (copy + 1% of containers)": "kept = [apply(fork(held), containers) for _ in eight]",
}
STORE = {
    "fork": "held.fork()",
    "8 copies": "kept = held.fork(8)",
    "8 × (copy + write)": """kept = held.fork(8)
for child in kept: child.data['game']['turn'] = 1""",
    "8 × (copy + 1% of leaves)": """kept = held.fork(8)
for child in kept: apply(child.data, leaves)""",
    "8 × (copy + 1% of containers)": """kept = held.fork(8)
for child in kept: apply(child.data, containers)""",
}
PERSISTENT = {
    "8 × (copy + write)": "kept = [held.set('game', held['game'].set('turn', 1)) for _ in eight]",
    "8 × (copy + 1% of leaves)": "kept = [write_all(held, leaf_writes) for _ in eight]",
    "8 × (copy + 1% of containers)": "kept = [write_all(held, container_writes) for _ in eight]",
}


def apply(data: Any, changes: list[tuple[Any, Any, Any]]) -> Any:
    for parents, key, value in changes:
        container = data
        for step in parents:
            container = container[step]
        container[key] = value
    return data


# ---------------------------------------------------------------------------------------------------------------------
# The states
# ---------------------------------------------------------------------------------------------------------------------
def described(size: str) -> Row:
    data = make(size)
    sizes = {f"1% of {what}": len(writes(data, what)) for what in ("leaves", "containers")}
    return {"state": size, "method": "plain", **census(data), **sizes}


# ---------------------------------------------------------------------------------------------------------------------
# Copies
# ---------------------------------------------------------------------------------------------------------------------
def verify(size: str, ways: Mapping[str, Method]) -> None:
    """Check that a written fork of every method equals plain containers and leaves its origin unchanged."""
    data = make(size)
    changes = [*writes(data, "leaves"), *writes(data, "containers"), FIRST_WRITE]
    expected = Method("plain", copy.deepcopy).write_all(make(size), changes)
    for name, way in ways.items():
        held = way.hold(data)
        forked = way.write_all(way.fork(held), changes)
        assert same(way.plain(forked), expected), f"{name}, {size}: a written fork is wrong"
        assert same(way.plain(held), data), f"{name}, {size}: writing to a fork changed the state"


def copies(size: str, ways: Mapping[str, Method], rounds: int) -> list[Row]:
    """Return one row per method, with the times of a fork, of eight forks, and of forks that are written to."""
    data = make(size)
    chosen = {what: writes(data, what) for what in ("leaves", "containers")}
    names = {
        "apply": apply,
        "eight": range(8),
        **{what: [(path[:-1], path[-1], value) for path, value in found] for what, found in chosen.items()},
        "leaf_writes": chosen["leaves"],
        "container_writes": chosen["containers"],
    }
    cases = {}
    for name, way in ways.items():
        said = STORE if isinstance(way, Turnwise) else PERSISTENT if isinstance(way, Persistent) else COPY
        own = {**names, "held": way.hold(data), "fork": way.fork, "write_all": way.write_all}
        cases |= {f"{name}/{case}": (source, own) for case, source in said.items()}
    seconds = statements(cases, rounds, seconds=0.6)
    rows = []
    for name in ways:
        taken = {case: seconds.get(f"{name}/{case}") for case in COPY}
        rows.append(
            {
                "state": size,
                "method": name,
                **{f"{case}, µs": None if value is None else value * 1e6 for case, value in taken.items()},
                "× deepcopy": seconds["deepcopy/8 × (copy + write)"] / seconds[f"{name}/8 × (copy + write)"],
            }
        )
    return rows


def first_writes(size: str, rounds: int) -> list[Row]:
    """Time the first write to a held container of a new fork, which copies the shared part."""
    held = Turnwise().hold(make(size))
    rows = []
    for place, path in (("counter", FIRST_WRITE[0]), ("largest container", CHUNK[size])):
        key, value = path[-1], changed(at(held.data, path))
        samples = []
        for _ in range(max(rounds, 5)):
            forks = [held.fork() for _ in range(128)]
            containers = [at(fork.data, path[:-1]) for fork in forks]
            start = time.perf_counter()
            for container in containers:
                container[key] = value
            samples.append((time.perf_counter() - start) / len(forks))
        rows.append({"state": size, "method": "turnwise", "first write": place, "µs": statistics.median(samples) * 1e6})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Trees
# ---------------------------------------------------------------------------------------------------------------------
def child(*words: object) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "state_tree.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr}")
    return json.loads(done.stdout)


def trees(sizes: tuple[str, ...], ways: Mapping[str, Method], quick: bool) -> list[Row]:
    """Grow trees of 64 branches × 32 turns, with all versions kept. Methods that copy whole states stop at M, because
    the memory would not suffice."""
    branches, turns = (4, 8) if quick else (64, 32)
    rows = []
    for size in sizes:
        unit = child("unit", size)["bytes"]
        for name, way in ways.items():
            # pyrsistent takes a quarter of a minute to make XL.
            whole = not isinstance(way, Turnwise | Persistent)
            if (whole and size in ("L", "XL")) or (name, size) == ("pyrsistent", "XL"):
                continue
            found = child("tree", size, name, branches, turns)
            held, packed, prune = found["bytes"], found.get("checkpoint"), found.get("prune")
            rows.append(
                {
                    "state": size,
                    "method": name,
                    "versions": branches * turns,
                    "MB": held and held / 1e6,
                    "in deepcopies": held / unit if held and unit else None,
                    "kB per version": held and held / branches / turns / 1e3,
                    "checkpoint MB": packed and packed / 1e6,
                    "pickles / checkpoint": found["pickles"] / packed if packed else None,
                    "prune, µs": prune and prune * 1e6,
                    "gc.collect, ms": found["gc.collect"] * 1e3,
                    "× empty": found["gc.collect"] / found["gc.collect, empty"],
                    "longest gc pause, ms": found["longest pause"] * 1e3,
                    "gc share": found["gc share"],
                }
            )
    return rows


def main() -> None:
    options = arguments(__doc__)
    options.device, options.threads = "cpu", 1
    gc.collect()
    gc.freeze()
    sizes = SIZES[: 1 if options.quick else None]
    ways = methods()
    copied = []
    # The small first: copium keeps a memo as large as the largest copy so far, and clears it at each.
    for size in sizes:
        verify(size, ways)
        copied += copies(size, ways, options.rounds)
    written = [row for size in sizes for row in first_writes(size, options.rounds)]
    listed = state_lists.writes(options.rounds)
    read = [*reads(ways, options.rounds), *state_lists.reads(options.rounds), *steps(options.rounds)]
    replayed = rollouts(ways, options.rounds, documents=200 if options.quick else 3_000)
    grown = trees(sizes, ways, options.quick)
    finish("state", "state: what is copied", [described(size) for size in sizes], options)
    finish("state", "state: forks and writes", copied, options)
    finish("state", "state: the first write to a fork", written, options)
    finish("state", f"state: the first write to a list of {state_lists.ENTRIES:,} entries of a fork", listed, options)
    finish("state", "state: reads and owned writes of a fork", read, options)
    finish("state", "state: a tree of versions, all kept", grown, options)
    finish("state", f"state: rollout of {BRANCHES} branches × {TURNS} turns replayed", replayed, options)
    finish("state", "state: goals", goals(copied, written, read, grown, listed), options)


if __name__ == "__main__":
    main()
