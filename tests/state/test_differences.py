"""Differences of two versions: those of plain containers, without a look in Python at what did not change."""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import Any

import pytest

from turnwise.state import ABSENT, Store, to_python

from ..operations import count_operations


def differences(old: Any, new: Any, path: tuple[Any, ...] = (), seen: Any = None) -> list[tuple[Any, Any, Any]]:
    """The differences of two plain values, by the definition: those of a pair of lists or dicts at its first path."""
    seen = set() if seen is None else seen
    if type(old) is not type(new) or not isinstance(old, dict | list | tuple):
        return [] if type(old) is type(new) and old == new else [(path, old, new)]
    if not isinstance(old, tuple):
        if (id(old), id(new)) in seen:
            return []
        seen.add((id(old), id(new)))
    if isinstance(old, dict):
        pairs = [(key, value, new.get(key, ABSENT)) for key, value in old.items()]
        pairs += [(key, ABSENT, value) for key, value in new.items() if key not in old]
    else:
        pairs = [(i, *pair) for i, pair in enumerate(zip_longest(old, new, fillvalue=ABSENT))]
    return [found for key, ours, theirs in pairs for found in differences(ours, theirs, (*path, key), seen)]


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.choice(["leaf", "leaf", "dict", "list", "tuple"]) if depth < 4 else "leaf"
    inner = [value(rng, depth + 1) for _ in range(rng.randrange(6))] if kind != "leaf" else []
    if kind == "dict":
        return {rng.choice([f"k{number}", number]): each for number, each in enumerate(inner)}
    return {"leaf": rng.choice([1, 1.0, True, "a", None, 2**70]), "list": inner, "tuple": tuple(inner)}[kind]


def change(data: Any, rng: random.Random) -> None:
    """Change one place below ``data``, a dict or a list of a State."""
    for _ in range(rng.randrange(5)):
        below = [each for each in (data.values() if hasattr(data, "keys") else data) if hasattr(each, "append")]
        below += [each for each in (data.values() if hasattr(data, "keys") else data) if hasattr(each, "keys")]
        if not below:
            break
        data = rng.choice(below)
    new = value(rng, 2)
    if hasattr(data, "keys"):
        key = rng.choice([*data, "new", 7]) if rng.random() < 0.8 else None
        if key in data and rng.random() < 0.4:
            del data[key]
        else:
            data[key] = new
    elif data and rng.random() < 0.4:
        del data[rng.randrange(len(data))]
    elif data and rng.random() < 0.6:
        data[rng.randrange(len(data))] = new
    else:
        data.insert(rng.randrange(len(data) + 1), new)


@pytest.mark.parametrize("again", range(20))
def test_differences_are_those_of_plain_containers(again: int) -> None:
    seed = random.randrange(2**32) if again else 0
    print("seed", seed)
    rng = random.Random(seed)
    shared = [1, {"deep": [2]}]
    root = {f"k{number}": value(rng) for number in range(12)}
    root |= {"long": [[number] for number in range(100)], "many": {n: {"n": n} for n in range(60)}, "one": shared}
    versions = [Store().state(root | {"two": [shared]})]
    for _ in range(15):
        version = rng.choice(versions)
        if rng.random() < 0.7:
            version = version.fork()
            versions.append(version)
        for _ in range(rng.randrange(4)):
            change(version.data, rng)
        if (lost := rng.choice(versions)) is not version and rng.random() < 0.3:
            versions.remove(lost)
            lost.prune()
        other = rng.choice(versions)
        for one, two in ((version, other), (other, version)):
            found = [(each.path, each.before, each.after) for each in one.diff(two)]
            assert found == differences(to_python(one.data), to_python(two.data))


def test_a_difference_costs_no_look_in_python_at_the_rest() -> None:
    counts = []
    for size in (500, 4000):
        state = Store().state({"pool": [{"id": i} for i in range(size)], "by": {f"k{i}": [i] for i in range(size)}})
        fork = state.fork()
        fork.data["pool"][3]["id"] = "new"
        fork.data["by"]["k7"].append(1)
        fork.data["by"]["more"] = 0
        counts.append(count_operations(lambda state=state, fork=fork: state.diff(fork)))
        assert [each.path for each in state.diff(fork)] == [("pool", 3, "id"), ("by", "k7", 1), ("by", "more")]
    assert counts[0] == counts[1], f"{counts} operations"
