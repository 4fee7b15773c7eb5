"""States of four sizes, writes to them, and methods to copy and write them. This module imports only numpy, as
processes whose memory is measured import it.

A ``Method`` holds a state in its own form: plain containers, persistent maps, or a ``turnwise.state.State``.
``write`` and ``append`` return the changed form, because a write to a persistent map creates a new map.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Path = tuple[Any, ...]
Write = tuple[Path, Any]
SIZES = ("S", "M", "L", "XL")
SEED = 20_26


# ---------------------------------------------------------------------------------------------------------------------
# The states
# ---------------------------------------------------------------------------------------------------------------------
def make(size: str) -> dict[str, Any]:
    """Make the state of this size: equal at every call, and sharing nothing with earlier ones."""
    return {"S": _board_game, "M": _transcript, "L": _long_transcript, "XL": _society}[size](random.Random(SEED))


def text(rng: random.Random, length: int) -> str:
    """Return a new string of random words, about ``length`` characters long."""
    words = []
    while length > 0:
        words.append("".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))))
        length -= len(words[-1]) + 1
    return " ".join(words)


def messages(rng: random.Random, turns: int) -> list[dict[str, Any]]:
    """Return ``turns`` calls of a tool, each with the tool's answer, about 2.4 kB per turn."""
    made: list[dict[str, Any]] = [{"role": "system", "content": text(rng, 400)}]
    for turn in range(turns):
        call = f"call_{rng.getrandbits(64):016x}"
        made += [
            {
                "role": "assistant",
                "content": text(rng, 600),
                "tool_calls": [
                    {"id": call, "type": "function", "function": {"name": "search", "arguments": text(rng, 80)}}
                ],
            },
            {
                "role": "tool",
                "tool_call_id": call,
                "content": {"ok": True, "pages": [text(rng, 540) for _ in range(3)], "seconds": rng.random()},
                "turn": turn,
            },
        ]
    return made


def _game(rng: random.Random, players: int) -> dict[str, Any]:
    return {"turn": 0, "to_move": 0, "score": [0.0] * players, "seed": rng.getrandbits(32)}


def _square(rng: random.Random) -> str:
    return rng.choice("abcdefgh") + rng.choice("12345678")


def _board_game(rng: random.Random) -> dict[str, Any]:
    """Return a board of 8x8, two players, and the moves so far."""
    moves = [[_square(rng), _square(rng)] for _ in range(24)]
    player = {"name": "proposer", "clock": 300.0, "captured": ["pawn", "knight"], "castled": False}
    return {
        "game": _game(rng, 2),
        "board": [[rng.choice([0, 0, 0, 1, 2, 3, -1, -2, -3]) for _ in range(8)] for _ in range(8)],
        "players": [copy.deepcopy(player), copy.deepcopy(player) | {"name": "critic"}],
        "messages": moves,
        "rules": {"name": "checkers", "length": 200, "notes": text(rng, 400)},
    }


def _transcript(rng: random.Random) -> dict[str, Any]:
    return {"game": _game(rng, 2), "messages": messages(rng, 40)}


def _long_transcript(rng: random.Random) -> dict[str, Any]:
    grid = np.random.default_rng(SEED)
    return {
        "game": _game(rng, 2),
        "messages": messages(rng, 440),
        "token_ids": [rng.randrange(65_536, 152_000) for _ in range(65_536)],
        "arrays": {"map": grid.random((256, 256), np.float32), "seen": grid.random((256, 256), np.float32)},
    }


def _society(rng: random.Random) -> dict[str, Any]:
    """Return four agents, each with the contents of the long transcript, in a world of 8,000 things."""
    world = {
        f"thing-{number}": {"at": [rng.random(), rng.random()], "note": text(rng, 60), "hp": 9}
        for number in range(8_000)
    }
    agents = [{key: value for key, value in _long_transcript(rng).items() if key != "game"} for _ in range(4)]
    return {"game": _game(rng, 4), "messages": messages(rng, 40), "agents": agents, "world": world}


# ---------------------------------------------------------------------------------------------------------------------
# Paths and writes
# ---------------------------------------------------------------------------------------------------------------------
def items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


def walk(container: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value below ``container`` with its path, containers before their contents."""
    for key, value in items(container):
        yield (*path, key), value
        if isinstance(value, dict | list):
            yield from walk(value, (*path, key))


def at(container: Any, path: Path) -> Any:
    for key in path:
        container = container[key]
    return container


def changed(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + ("." if isinstance(value, str) else 1)


FIRST_WRITE: Write = (("game", "turn"), 1)


def writes(data: dict[str, Any], what: str) -> list[Write]:
    """Return writes to 1% of the leaves, or to one leaf in 1% of the containers: evenly spread, at least one."""
    leaves = [(p, v) for p, v in walk(data) if isinstance(v, bool | int | float | str)]
    if what == "leaves":
        chosen = leaves
    else:
        first = {path[:-1]: (path, value) for path, value in reversed(leaves)}
        chosen = [first[path] for path, value in walk(data) if path in first]
    return [(path, changed(value)) for path, value in chosen[min(50, len(chosen) // 2) :: 100]]


def census(data: dict[str, Any]) -> dict[str, Any]:
    values = [value for _, value in walk(data)]
    containers = sum(isinstance(value, dict | list) for value in values)
    pickled = len(pickle.dumps(data, 5)) / 1e3
    return {"pickled, kB": pickled, "containers": containers + 1, "leaves": len(values) - containers}


def turn(size: str, branch: int, number: int) -> tuple[list[tuple[Path, Any]], list[Write]]:
    """Return the appends and writes of one turn of a rollout: one append, and counters, squares, a token or things."""
    rng = random.Random(f"{size}/{branch}/{number}")
    new: list[Write] = [
        (("game", "turn"), number + 1),
        (("game", "to_move"), number % 2),
    ]
    if size == "S":
        new += [(("board", rng.randrange(8), rng.randrange(8)), value) for value in (0, 2)]
        return [(("messages",), [_square(rng), _square(rng)])], new
    new.append((("game", "score", number % 2), rng.random()))
    said = {"role": "assistant", "content": text(rng, 600)}
    if size == "L":
        new.append((("token_ids", rng.randrange(65_536)), rng.randrange(152_000)))
    if size == "XL":
        new += [(("world", f"thing-{rng.randrange(8_000)}", "hp"), rng.randrange(9)) for _ in range(3)]
        return [(("agents", branch % 4, "messages"), said)], new
    return [(("messages",), said)], new


# ---------------------------------------------------------------------------------------------------------------------
# Methods to copy
# ---------------------------------------------------------------------------------------------------------------------
class Method:
    """A method with plain containers, and a function that copies them."""

    def __init__(self, name: str, fork: Callable[[Any], Any]) -> None:
        self.name = name
        self.fork = fork

    def hold(self, data: dict[str, Any]) -> Any:
        return copy.deepcopy(data)

    def write(self, held: Any, path: Path, value: Any) -> Any:
        at(held, path[:-1])[path[-1]] = value
        return held

    def append(self, held: Any, path: Path, value: Any) -> Any:
        at(held, path).append(value)
        return held

    def write_all(self, held: Any, changes: Sequence[Write]) -> Any:
        for path, value in changes:
            held = self.write(held, path, value)
        return held

    def plain(self, held: Any) -> Any:
        return held


class Turnwise(Method):
    """The method of a ``State``, written through its facade."""

    def __init__(self) -> None:
        from turnwise.state import Store

        super().__init__("turnwise", lambda held: held.fork())
        self.store = Store()

    def hold(self, data: dict[str, Any]) -> Any:
        return self.store.state(data)

    def write(self, held: Any, path: Path, value: Any) -> Any:
        at(held.data, path[:-1])[path[-1]] = value
        return held

    def append(self, held: Any, path: Path, value: Any) -> Any:
        at(held.data, path).append(value)
        return held

    def plain(self, held: Any) -> Any:
        from turnwise.state import to_python

        return to_python(held.data)


class Persistent(Method):
    """The method of nested persistent maps. A fork is the same map; arrays are shared, as no bench writes into them."""

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda held: held)
        self.module = importlib.import_module(name)
        # immutables has no vector: a list becomes a map by index, whose order is lost.
        self.vector = getattr(self.module, "pvector", lambda values: self.module.Map(enumerate(values)))
        self.map = getattr(self.module, "pmap", None) or self.module.Map

    def hold(self, data: Any) -> Any:
        if isinstance(data, dict):
            return self.map({key: self.hold(value) for key, value in data.items()})
        return self.vector([self.hold(value) for value in data]) if isinstance(data, list) else data

    def write(self, held: Any, path: Path, value: Any) -> Any:
        key = path[0]
        return held.set(key, value if len(path) == 1 else self.write(held[key], path[1:], value))

    def append(self, held: Any, path: Path, value: Any) -> Any:
        old, new = at(held, path), self.hold(value)
        return self.write(held, path, old.append(new) if hasattr(old, "append") else old.set(len(old), new))

    def plain(self, held: Any, like: Any = None) -> Any:
        if hasattr(held, "keys"):
            if all(isinstance(key, int) for key in held):  # immutables: a list
                return [self.plain(held[index]) for index in range(len(held))]
            return {key: self.plain(held[key]) for key in held}
        return [self.plain(value) for value in held] if type(held) is type(self.vector([])) else held


PEERS = ("copium", "immutables", "pyrsistent")


def method(name: str) -> Method:
    if name == "turnwise":
        return Turnwise()
    if name == "deepcopy":
        return Method(name, copy.deepcopy)
    if name == "pickle":
        return Method(name, lambda held: pickle.loads(pickle.dumps(held, 5)))
    if name == "copium":
        return Method(name, importlib.import_module("copium").deepcopy)
    return Persistent(name)


def methods() -> dict[str, Method]:
    """Return every installed method, turnwise last."""
    found = [name for name in PEERS if importlib.util.find_spec(name)]
    for name in sorted(set(PEERS) - set(found)):
        print(f"without {name}: not installed")
    return {name: method(name) for name in ("deepcopy", "pickle", *found, "turnwise")}


def has(name: str) -> bool:
    """Return True if this store has the attribute. With older stores a bench reports less."""
    import turnwise.state

    return hasattr(turnwise.state, name)


def same(one: Any, other: Any) -> bool:
    """Return True for equal values, types and array contents, with any order of maps."""
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other
