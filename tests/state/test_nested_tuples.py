"""Tuples in which one tuple lies twice, and in it another twice: few objects, and more paths than anybody can walk."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from turnwise.state import Store, load, to_python
from turnwise.state.exclusive import is_constant

DEPTH = 16  # 65,536 paths: a walk of each takes long enough to notice, and ends


class Pair(NamedTuple):
    left: Any
    right: Any


class Rules:
    """An object that all versions share."""


class Counting(Store):
    """Counts how often its shared objects were looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.register(Rules, "share")
        self.looks = 0

    def look(self, value: Any) -> None:
        self.looks += 1

    def _policy_of(self, kind: type) -> Any:
        found = super()._policy_of(kind)
        return (0, self.look, False) if kind is Rules else found


def nest(core: Any, kind: Any = tuple, depth: int = DEPTH) -> Any:
    for _ in range(depth):
        core = (core, core) if kind is tuple else kind(core, core)
    return core


def core_of(value: Any, kind: type = tuple, depth: int = DEPTH) -> Any:
    """What lies innermost, each tuple on the way there being one object."""
    for _ in range(depth):
        assert type(value) is kind and value[0] is value[1]
        value = value[0]
    return value


@pytest.mark.parametrize("kind", [tuple, Pair])
def test_one_read_gives_one_tuple(kind: type) -> None:
    state = Store().state({"t": nest([1], kind)})
    fork = state.fork()
    fork.data["t"][0]
    for version in (state, fork):
        assert core_of(version.data["t"], kind) == [1]
        assert core_of(version.data["t"], kind) is core_of(version.data["t"], kind)
    core_of(fork.data["t"], kind).append(2)
    assert core_of(state.data["t"], kind) == [1] and core_of(fork.data["t"], kind) == [1, 2]


@pytest.mark.parametrize("kind", [tuple, Pair])
def test_to_python_keeps_aliasing_as_deepcopy_does(kind: Any) -> None:
    tuple_ = nest([1], kind)
    data = {"a": tuple_, "b": {"c": [tuple_, tuple_[0]]}, "pure": nest((1, 2), kind)}
    state = Store().state(data)
    for made in (state.to_python(), to_python(state.data), to_python([state.data])[0], copy.deepcopy(data)):
        core = core_of(made["a"], kind)
        assert type(core) is list and core == [1] and core is not tuple_
        assert made["b"]["c"][0] is made["a"] and made["b"]["c"][1] is made["a"][0]
        assert core_of(made["pure"], kind) == (1, 2)
    assert to_python(state.data["a"])[0] is not state.data["a"][0]


def test_what_is_shared_is_looked_at_once(tmp_path: Path) -> None:
    store = Counting()
    rules = Rules()
    state = store.state({"pure": nest((rules,))})
    assert store.looks <= 2
    state.data["later"] = nest((rules, 1))
    state.fork()
    assert store.looks < 10
    store.looks = 0
    assert core_of(pickle.loads(pickle.dumps(nest((1,))))) == (1,)
    store.save(tmp_path / "s", {"state": state})
    assert store.looks == 0
    again = load(tmp_path / "s", store=store, allow_pickle=True)["state"]
    assert store.looks == 2 and type(core_of(again.data["pure"])[0]) is Rules


def test_differences_stand_at_the_first_path_of_each_tuple() -> None:
    state = Store().state({"t": nest((0, [1])), "u": 0, "v": 0})
    fork = state.fork()
    assert state.diff(fork) == []
    core_of(fork.data["t"])[1].append(2)
    ((path, before, after),) = [(change.path, change.before, change.after) for change in state.diff(fork)][0:1]
    assert path == ("t", *[0] * DEPTH, 1, 1) and after == 2 and repr(before) == "ABSENT"
    assert len(state.diff(fork)) == 1
    # A pair of tuples that two containers hold is told of twice: constants of one module are often one object.
    state.data["u"] = state.data["v"] = (1, (2,))
    fork.data["u"] = fork.data["v"] = (1, (3,))
    state.data["t"] = fork.data["t"] = None
    assert [(change.path, change.after) for change in state.diff(fork)] == [(("u", 1, 0), 3), (("v", 1, 0), 3)]


def test_constants() -> None:
    assert all(map(is_constant, (5, (), (1, ("a", frozenset({(2, None)}))), nest(()))))
    for value in ([], nest(([],)), nest((1, {2: 3})), (1, (2, Pair(3, 4))), frozenset({Pair(1, 2)})):
        assert not is_constant(value)


EVERY_WAY = """
import copy, json, pickle, sys
from turnwise.state import ForkableMixin, Store, load, to_python

def nest(core):
    for _ in range(300):
        core = (core, core)
    return core

class Env(ForkableMixin):
    def __init__(self):
        self.pure, self.impure, self.held = nest(()), nest(([1],)), [nest((1, [2])), nest((3,))]

store = Store(check_shared=True)
state = store.state({"pure": nest(()), "impure": nest([1]), "late": nest(([1], 2))})
state.data["new"] = nest([3])
state.data["leaf"] = nest((4,))
for version in (state, state.fork(), state.commit(), copy.deepcopy(state.data)._state):
    version.to_python()
    to_python([version.data])
    list(version.data.items()), version.data["impure"][0], version.data["pure"]
    version.stats() if hasattr(version, "stats") else store.stats()
    assert version.diff(state) == [] == state.diff(version)
other = Store().state({"pure": nest((1,)), "impure": nest([2]), "late": nest(([1], 3))})
assert len(state.diff(other)) == 5
store.save(sys.argv[1], {"state": state})
load(sys.argv[1])["state"].to_python()
pickle.loads(pickle.dumps(state)).to_python()
pickle.loads(pickle.dumps(state.data))
env = Env()
copies = [copy.copy(env), Env()]
for each in copies:
    each.__reduce_ex__(4)
print("done")
"""


def test_no_way_walks_every_path(tmp_path: Path) -> None:
    # In another process: were one to walk them, it would not come back.
    result = subprocess.run(
        [sys.executable, "-P", "-c", EVERY_WAY, str(tmp_path / "file")], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.split() == ["done"], result.stderr[-3000:]
