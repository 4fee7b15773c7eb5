"""Where facades could behave otherwise than the dict and list that they stand for, one test each."""

from __future__ import annotations

import collections.abc
import copy
import json
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

from turnwise.state import OpaqueError, PrunedError, State, StateDict, StateError, StateList, Store, to_python


def facade(data: Any) -> Any:
    return Store().state(data).data


def test_json_fails_loudly_or_converts() -> None:
    data = {"a": [1, {"b": None}], "e": {}, "l": []}
    root = facade(data)
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(root)
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps({"in": root["a"]})
    assert json.dumps(root, default=to_python) == json.dumps(data)
    assert json.loads(json.dumps({"in": [root["a"]]}, default=to_python)) == {"in": [data["a"]]}
    assert json.loads(json.dumps(root, default=to_python, indent=1)) == data


def test_class_is_spoofed_and_type_is_not_and_nothing_is_hashable() -> None:
    root = facade({"l": [], "d": {}})
    assert isinstance(root, dict) and isinstance(root["l"], list) and not isinstance(root, list)
    assert root.__class__ is dict and type(root) is StateDict and type(root["l"]) is StateList
    assert isinstance(root, collections.abc.Mapping) and isinstance(root["l"], collections.abc.Sequence)
    assert isinstance(root.keys(), collections.abc.KeysView) and isinstance(root.items(), collections.abc.Set)
    assert isinstance(root.values(), collections.abc.ValuesView)
    for kind in (State, StateList):
        with pytest.raises(TypeError):
            object.__new__(kind)
    for value in (root, root["l"]):
        for use in (hash, lambda value: root.__setitem__(value, 1)):
            with pytest.raises(TypeError, match="unhashable"):
                use(value)


class Text(str):
    pass


class Key(str):
    __slots__ = ()


class Number(int):
    pass


class Colour(Enum):
    RED = 1


def test_leaves_keep_their_types() -> None:
    data = {"s": Text("x"), "n": Number(3), "e": Colour.RED, "b": True, "f": 1.0, Key("k"): 1}
    branch = Store().state(data).fork().data
    assert [type(value) for value in branch.values()] == [type(value) for value in data.values()]
    assert branch["e"] is data["e"] and type(list(branch)[-1]) is Key
    assert branch["k"] == 1 and branch[Key("s")] == "x"


@pytest.mark.parametrize(
    "value", [Text("x"), Number(3), type("Names", (frozenset,), {})("ab")], ids=lambda value: type(value).__name__
)
def test_attributes_of_a_leaf_stay_in_their_branch(value: Any) -> None:
    value.notes = ["root"]
    state = Store().state({"v": value})
    branches = state.fork(2)
    branches[0].data["v"].notes.append("one branch")
    assert branches[0].data["v"].notes == ["root", "one branch"]
    assert branches[1].data["v"].notes == state.data["v"].notes == ["root"]
    assert branches[0].data["v"] == branches[1].data["v"] == value


class Player:
    pass


def test_keys_may_not_change() -> None:
    for kind, key in ((Text, Text("k")), (Player, Player()), (Player, (1, Player()))):
        store = Store()
        root = store.state({"a": 1}).data
        for put in (lambda: root.__setitem__(key, 2), lambda: store.state({key: 1})):  # noqa: B023
            with pytest.raises(
                OpaqueError, match=rf"a key of type {kind.__name__}.*store.register\({kind.__name__}, 'share'\)"
            ):
                put()
        with pytest.raises(OpaqueError, match="a key of type State"):
            root[root._state] = 1
        assert root == {"a": 1}
        store.register(kind, "share")
        root[key] = 2
        assert root._state.fork().data[key] == 2


class Awkward:
    """Equal to nothing, and does something each time it is asked."""

    def __init__(self, act: Callable[[], None], equal: bool = False) -> None:
        self.act = act
        self.equal = equal

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        self.act()
        return self.equal


def delete_some(d: Any) -> None:
    for key in list(d)[::2]:
        del d[key]


ACTS: dict[str, Callable[[Any, int], Any]] = {
    "clear": lambda d, turn: d.clear(),
    "grow": lambda d, turn: d.update({f"{turn} {i}": i for i in range(40)}),
    "delete": lambda d, turn: delete_some(d),
    "fork": lambda d, turn: (d._state.fork(), d.update({f"fork {turn}": 1})),
    "rollback": lambda d, turn: d._state.rollback(),
    "prune": lambda d, turn: d._state.prune(),
    "replace": lambda d, turn: [d.update({key: [turn]}) for key in d],
}


@pytest.mark.parametrize("size", [2, 30])
@pytest.mark.parametrize("what", ACTS)
def test_eq_that_changes_the_dict(size: int, what: str) -> None:
    store = Store()
    store.register(Awkward, "share")
    state = store.state({})
    d, turns = state.data, 99

    def act() -> None:
        nonlocal turns
        turns += 1
        if turns <= 5:
            ACTS[what](d, turns)

    for i in range(size):
        d[Awkward(lambda: None)] = i
    state.commit()
    d[Awkward(act)] = "last"
    asked = Awkward(lambda: None)
    for call in (lambda: d.get(asked), lambda: asked in d, lambda: d.pop(asked, 0), lambda: d.__setitem__(asked, 1)):
        turns = 0
        try:
            call()
        except (StateError, KeyError) as error:
            assert what in ("prune", "rollback") or isinstance(error, KeyError)
    if what != "prune":
        assert len(d) == len(list(d)) == len(to_python(d))


@pytest.mark.parametrize("plain", [True, False])
def test_dict_changes_during_iteration(plain: bool) -> None:
    make = dict if plain else facade
    for change in (lambda d: d.update(new=1), lambda d: d.pop("b"), lambda d: d.clear()):
        for view in (iter, lambda d: iter(d.items()), lambda d: iter(d.values()), reversed):
            d = make({"a": 1, "b": 2, "c": 3})
            iterator = view(d)
            next(iterator)
            change(d)
            for _ in range(2):  # and it stays broken
                with pytest.raises(RuntimeError, match="dictionary changed size during iteration"):
                    next(iterator)
    d = make({"a": 1, "b": 2})
    for key in d:
        d[key] = 0  # values may change
    assert dict(d) == {"a": 0, "b": 0}
    iterator = iter(d)
    assert list(iterator) == ["a", "b"]
    d["c"] = 1
    assert list(iterator) == []  # an exhausted one stays so


@pytest.mark.parametrize("plain", [True, False])
def test_list_changes_during_iteration(plain: bool) -> None:
    make = list if plain else facade
    items = make([1, 2, 3, 4])
    seen = []
    for item in items:
        seen.append(item)
        if item < 3:
            items.append(item + 10)
        elif item == 3:
            items.remove(4)
    assert seen == [1, 2, 3, 11, 12]
    iterator = iter(items)
    assert len(list(iterator)) == 5
    items.append(9)
    assert list(iterator) == []
    back = reversed(items)
    items.clear()
    assert list(back) == []


def test_sort_sees_a_change_in_its_middle() -> None:
    for items in ([3, 1, 2], facade([3, 1, 2])):
        with pytest.raises(ValueError, match="list modified during sort"):
            items.sort(key=lambda item, items=items: items.append(item) or item)
    untouched = facade([3, "a", 2])
    with pytest.raises(TypeError):
        untouched.sort()
    assert sorted(map(str, untouched)) == ["2", "3", "a"]


def test_a_facade_that_a_rollback_undid_says_so() -> None:
    state = Store().state({"a": []})
    start = state.commit()
    state.data["new"] = {"x": [1]}
    state.commit()
    new, kept = state.data["new"]["x"], state.data["a"]
    state.rollback(start)
    with pytest.raises(StateError, match="rollback"):
        new.append(1)
    kept.append(1)
    assert state.data == {"a": [1]}
    for i in range(100):  # slots are used again, by others
        state.data[f"k{i}"] = [i]
    state.fork()
    with pytest.raises(StateError, match="rollback"):
        len(new)


@pytest.mark.parametrize("foreign", ["facade", "state", "pruned"])
def test_foreign_things_are_refused_and_nothing_changes(foreign: str) -> None:
    store = Store()
    other, state = store.state({"x": [1]}), store.state({"a": [0, {"b": 1}]})
    bad: Any = other.data["x"] if foreign == "facade" else other
    if foreign == "pruned":
        bad = other.data["x"]
        other.prune()
    before = state.to_python()
    a, b = state.data["a"], state.data["a"][1]
    writes = [
        lambda: a.append(bad),
        lambda: a.extend([1, bad]),
        lambda: a.insert(0, [bad]),
        lambda: a.__setitem__(0, {"deep": (bad,)}),
        lambda: a.__setitem__(slice(0, 1), [bad]),
        lambda: b.__setitem__("k", bad),
        lambda: b.setdefault("k", bad),
        lambda: b.update(b=2) or b.update(k=bad),
    ]
    for write in writes:
        with pytest.raises((OpaqueError, PrunedError)):
            write()
        assert state.to_python() in (before, {"a": [0, {"b": 2}]})
    with pytest.raises((OpaqueError, TypeError)):
        state.data[bad] = 1
    with pytest.raises((OpaqueError, PrunedError)):
        store.state([bad])


def test_shallow_copies_are_plain_and_hold_the_facades() -> None:
    root = facade({"a": [1], "l": [[2]]})
    for shallow in (copy.copy(root), root.copy(), dict(root)):
        assert type(shallow) is dict and shallow["a"] is root["a"]
    for shallow in (copy.copy(root["l"]), root["l"].copy(), root["l"][:], list(root["l"])):
        assert type(shallow) is list and shallow[0] is root["l"][0]
