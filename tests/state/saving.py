"""Random States for the tests of files and pickles, their comparison, and damaged structures."""

from __future__ import annotations

import collections
import contextlib
import random
from typing import Any

import numpy as np

from turnwise.state import CheckpointError, OpaqueError, State, StateDict, StateList, Store, TokenArray


class Board:
    """An object that no policy is known for."""

    def __init__(self, cells: list[int] | None = None) -> None:
        self.cells = cells if cells is not None else [0, 0]


KEYS: list[Any] = ["a", "b", "key", 0, 1, 2**62, None, 2.5, (1, "t"), b"x", *(f"k{i}" for i in range(40))]


def atom(rng: random.Random) -> Any:
    numbers = [True, 3, -1, 2**59 - 1, 2**59, -(2**59), -(2**59) - 1, 2**63, 10**30, 0.0, -0.0, 2.5, 1j]
    others = [None, "", "text", b"bytes", (1, ("t", None)), frozenset({1, 2})]
    fresh = [rng.randrange(-(10**6), 10**6), f"s{rng.randrange(99)}"]
    return rng.choice([*numbers, *others, *fresh])


def make(rng: random.Random, pool: list[Any], depth: int = 4) -> Any:
    """Data of every kind; ``pool`` holds the containers so far, some of which come up again."""
    kind = rng.randrange(12) if depth else 0
    if kind < 4:
        return atom(rng)
    if kind == 4 and pool:
        return rng.choice(pool)  # an alias, or a cycle
    if kind == 5:
        return (make(rng, pool, depth - 1), [make(rng, pool, depth - 1)])
    if kind == 6:
        return TokenArray(rng.choices(range(-(2**31), 2**31), k=rng.choice([0, 1, 600])))
    if kind == 7:
        shape = rng.choice([(0,), (5,), (3, 4)])
        return np.asarray(rng.choices(range(99), k=int(np.prod(shape))), rng.choice(["i4", "f8"])).reshape(shape)
    if kind == 8:
        return rng.choice([random.Random(rng.random()), collections.deque([1, [2]]), {1, 2}, bytearray(b"abc")])
    made: Any = {} if kind < 11 else []
    pool.append(made)
    size = rng.choice([0, 1, 3, 9, 40, 300]) if depth < 4 else 6
    if type(made) is list:
        made.extend(make(rng, pool, depth - 1 if size < 9 else 0) for _ in range(size))
    else:
        keys = rng.sample(KEYS, min(size, 40)) + list(range(100, 60 + size))
        made.update((key, make(rng, pool, depth - 1 if size < 9 else 0)) for key in keys)
    return made


def containers(state: State) -> list[Any]:
    """The dicts and lists that can be reached from the root, in the order of a walk."""
    found: list[Any] = []
    open_, seen = [state.data], set()
    while open_:
        item = open_.pop(0)
        if type(item) in (StateDict, StateList) and id(item) not in seen:
            seen.add(id(item))
            found.append(item)
            open_ += list(item.values()) if type(item) is StateDict else list(item)
        elif isinstance(item, tuple):
            open_ += item
    return found


def write(state: State, rng: random.Random, times: int = 5) -> None:
    """Random writes; the same for equal States and equal generators."""
    for _ in range(times):
        target = rng.choice(containers(state) or [None])
        value = make(rng, [], 1)
        if type(target) is StateDict:
            if target and rng.random() < 0.4:
                del target[rng.choice(list(target))]
            else:
                target[rng.choice([*KEYS, rng.randrange(500)])] = value
        elif type(target) is StateList:
            if target and rng.random() < 0.3:
                del target[rng.randrange(len(target))]
            elif target and rng.random() < 0.5:
                target[rng.randrange(len(target))] = value
            else:
                target.insert(rng.randrange(len(target) + 1), value)


def tree(rng: random.Random, store: Store, count: int = 6) -> dict[str, State]:
    """Some versions that come from one, some of them frozen."""
    data = {"first": make(rng, []), "second": make(rng, [])}
    data["self"] = data
    versions = [store.state(data)]
    while len(versions) < count:
        parent = rng.choice(versions)
        if parent.frozen or rng.random() < 0.8:
            child = parent.fork()
            write(child, rng)
        else:
            child = parent.commit()
            write(parent, rng)
        versions.append(child)
    return {f"v{number}": state for number, state in enumerate(versions)}


def shape(value: Any) -> Any:
    """What a State or plain data holds, types and aliasing included, as something that ``==`` compares."""
    if type(value) is State:
        value = value.data
    numbers: dict[int, int] = {}
    alive: list[Any] = []
    described: list[Any] = []
    open_: list[Any] = []

    def of(item: Any) -> Any:
        if isinstance(item, tuple):
            return (type(item).__name__, *map(of, item))
        if type(item) in (StateDict, StateList, dict, list, TokenArray):
            if id(item) not in numbers:
                numbers[id(item)] = len(numbers)
                alive.append(item)
                open_.append(item)
            return ("container", numbers[id(item)])
        if isinstance(item, np.ndarray):
            return ("array", item.dtype.str, item.shape, item.tobytes())
        if isinstance(item, random.Random):
            return ("random", item.getstate())
        if isinstance(item, set | frozenset):
            return (type(item).__name__, sorted(item))
        return (type(item).__name__, repr(item))

    root = of(value)
    while open_:
        item = open_.pop(0)
        if isinstance(item, dict):
            described.append(("dict", [(of(key), of(held)) for key, held in item.items()]))
        elif type(item) is TokenArray:
            described.append(("tokens", list(item)))
        else:
            described.append(("list", [of(held) for held in item]))
    return root, described


def use(state: State) -> None:
    """Everything that a damaged structure could trip."""
    state.to_python()
    fork = state.fork()
    for item in containers(fork)[:20]:
        if isinstance(item, dict):
            item["fresh"] = [1]
            for key in list(item)[:3]:
                del item[key]
            assert "absent" not in item
        else:
            item.insert(0, 1)
            item += [2, [3]]
            del item[: len(item) // 2]
    fork.data  # noqa: B018
    fork.collect()
    fork.fork().diff(state)
    fork.store.stats()


def mangled(structure: bytes, rng: random.Random) -> bytes:
    data = bytearray(structure)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place, length = rng.randrange(len(data)), rng.randrange(1, 12)
        match rng.randrange(6):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place] = rng.choice([0, 1, 2, 3, 127, 128, 255, rng.randrange(256)])
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = rng.randbytes(length)
            case 4:
                data[place:place] = data[place : place + length]
            case 5:
                other = rng.randrange(len(data))
                data[place : place + length] = data[other : other + length]
        if not data:
            data = bytearray(b"\0")
    return bytes(data)


def fuzz(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    store = Store()
    refused_count = 0
    for number in range(rounds):
        if number % 100 == 0:
            states = list(tree(rng, store, 4).values())
            structure, objects, versions = store._archive(states)
        damaged = mangled(structure, rng)
        try:
            loaded = store._restore(damaged, list(objects), versions)
        except (CheckpointError, OpaqueError, MemoryError):
            refused_count += 1
            continue
        for state in loaded:
            with contextlib.suppress(RecursionError):  # tuples may be deep
                use(state)
    print(f"{refused_count} of {rounds} refused")
    assert refused_count > rounds // 2
