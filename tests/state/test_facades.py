"""StateDict and StateList against dict and list: the same methods, results, errors and messages; and the traps."""

from __future__ import annotations

import bisect
import collections.abc
import copy
import heapq
import json
import operator
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest

from turnwise.state import OpaqueError, PrunedError, State, StateDict, StateError, StateList, Store, to_python

DICT = {"a": 1, "b": [1, 2], 3: None, None: "x", (1, 2): 2.5, True: {"deep": [0]}}
LIST = [3, 1, 2, "x", None, 1.0, True, [1], {"k": 1}, (1, 2), 3]


def facade(data: Any) -> Any:
    return Store().state(data).data


def outcome(call: Callable[[Any], Any], subject: Any) -> tuple[Any, ...]:
    try:
        result = call(subject)
    except Exception as error:
        return "raises", type(error), str(error)
    if isinstance(result, collections.abc.Iterator):
        result = list(result)
    result = to_python(result)
    return "gives", result, shape(result)


def shape(value: Any) -> Any:
    """The types in a value, and the order of keys: what ``==`` does not look at."""
    if isinstance(value, dict):
        return value.__class__, [(type(key), key, shape(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return value.__class__, [shape(item) for item in value]
    return type(value)


# ---- the whole surface ----------------------------------------------------------------------------------------------
def test_every_public_name_is_there() -> None:
    for compiled, plain in ((StateDict, dict), (StateList, list)):
        missing = {name for name in dir(plain) if not hasattr(compiled, name)}
        # list[int] is for annotations; `in` goes through the iterator.
        assert missing <= {"__class_getitem__", "__contains__"}
        public = [name for name in dir(plain) if not name.startswith("_")]
        inherited = [name for name in public if getattr(compiled, name) is getattr(object, name, None)]
        assert public and not inherited


def update_in_place(function: Callable[..., Any], value: Any) -> Callable[[Any], Any]:
    return lambda subject: function(subject, value)


class Keys:
    def keys(self) -> list[str]:
        return ["p", "q"]

    def __getitem__(self, key: str) -> str:
        return key * 2


def broken() -> Any:
    yield 1
    raise KeyError("in the generator")


DICT_CALLS: list[Callable[[Any], Any]] = [
    *(lambda d, k=k: d[k] for k in (*DICT, "no", 1, 1.0, (1, 2.0), (9,), ((),), [], {}, float("nan"))),
    *(lambda d, k=k: d.get(k) for k in (*DICT, "no", [])),
    *(lambda d, k=k: d.get(k, 7) for k in ("a", "no")),
    lambda d: d.get(),
    lambda d: d.get(1, 2, 3),
    *(lambda d, k=k: k in d for k in (*DICT, "no", 0, {})),
    *(lambda d, k=k: d.__setitem__(k, 5) for k in (*DICT, "new", 1.0, [], {1})),
    *(lambda d, k=k: d.__delitem__(k) for k in (*DICT, "no", [], (1, 3), ("t",))),
    *(lambda d, k=k: d.pop(k) for k in (*DICT, "no", [], (5,))),
    *(lambda d, k=k: d.pop(k, "none") for k in (*DICT, "no", [])),
    lambda d: d.pop(),
    lambda d: [d.popitem() for _ in range(6)],
    lambda d: [d.popitem() for _ in range(7)],
    lambda d: (d.clear(), d),
    lambda d: (d.clear(), d.popitem()),
    *(lambda d, k=k: (d.setdefault(k), d) for k in ("a", "no", 1.0, [])),
    *(lambda d, k=k: (d.setdefault(k, [4]), d) for k in ("a", "no")),
    *(
        lambda d, o=o: (d.update(o), d)
        for o in ({}, {"a": 0}, [("a", 0), (3, 4)], "", [[1, 2]], Keys(), OrderedDict(z=1))
    ),
    *(lambda d, o=o: (d.update(o), d) for o in (5, None, [5], ["abc"], [(1,)], "abc", [([], 1)])),
    lambda d: (d.update(a=2, c=3), d),
    lambda d: (d.update({"q": 1}, q=3), d),
    lambda d: (d.update(), d),
    lambda d: (d.update(d), d),
    *(lambda d, o=o: d | o for o in ({}, {"a": 0}, defaultdict(int, z=1))),
    *(lambda d, o=o: o | d for o in ({}, {"a": 0}, OrderedDict(z=1))),
    *(update_in_place(operator.ior, o) for o in ({"n": 1}, [("n", 1)], [1], 5, None)),
    lambda d: d.copy(),
    lambda d: d.fromkeys([1, 2]),
    lambda d: d.fromkeys("ab", 0),
    *(
        lambda d, f=f: f(d)
        for f in (list, len, repr, str, bool, sorted, sum, min, dict, tuple, iter, reversed, hash, set)
    ),
    lambda d: sorted(d, key=repr),
    lambda d: f"{d}",
    lambda d: (list(d.keys()), list(d.values()), list(d.items())),
    lambda d: (list(reversed(d)), list(reversed(d.keys())), list(reversed(d.values())), list(reversed(d.items()))),
    lambda d: (repr(d.keys()), repr(d.values()), repr(d.items())),
    lambda d: (len(d.keys()), len(d.values()), len(d.items())),
    lambda d: ("a" in d.keys(), "no" in d.keys(), ("a", 1) in d.items(), ("a", 2) in d.items(), 1 in d.items()),  # noqa: SIM118
    lambda d: (1 in d.values(), [1, 2] in d.values(), 99 in d.values()),
    lambda d: (d.keys() & {"a", "zz"}, d.keys() | {"zz"}, d.keys() - {"a"}, d.keys() ^ {"a", "zz"}),
    lambda d: ({"a", "zz"} & d.keys(), {"zz"} | d.keys(), {"a", "zz"} - d.keys(), {"a", "zz"} ^ d.keys()),
    lambda d: (d.keys() & ["a"], d.keys() - "ab", d.keys().isdisjoint(["a"]), d.keys().isdisjoint(["zz"])),
    lambda d: (d.keys() == {"a"}, d.keys() == set(DICT), d.keys() <= set(DICT), d.keys() > {"a"}, d.keys() != {"a"}),
    lambda d: d.items() & {("a", 1)},
    lambda d: hash(d.keys()),
    lambda d: hash(d.items()),
    lambda d: len(d.items() | {1}),
    lambda d: d.values() == d.values(),
    lambda d: d.keys().mapping == d,
    *(lambda d, o=o: (d == o, o == d, d != o, o != d) for o in (DICT, {}, {"a": 1}, 5, None, [], Counter())),
    *(lambda d, o=o: d < o for o in ({}, 5)),
    lambda d: {**d},
    lambda d: (lambda **named: named)(**{key: d["a"] for key in ("x", "y")}),
    lambda d: operator.length_hint(iter(d)),
    lambda d: [*d],
    lambda d: dict(zip(d, range(9), strict=False)),
    lambda d: list(enumerate(d)),
    lambda d: max(d.values(), key=str),
    lambda d: all(d) or any(d),
    lambda d: json.dumps({"a": 1}) if isinstance(d, dict) else "",
    lambda d: isinstance(d, collections.abc.MutableMapping),
    lambda d: d.__class__,
    lambda d: d[:1],
    lambda d: d.missing,
]

LIST_CALLS: list[Callable[[Any], Any]] = [
    *(lambda s, i=i: s[i] for i in (0, -1, 5, 10, -11, 11, -12, 2**70, True, np.int64(2))),
    *(lambda s, i=i: s[i] for i in ("a", None, 1.0, (1,))),
    *(lambda s, p=p: s[p] for p in (slice(None), slice(2, 5), slice(None, None, -1), slice(-3, None), slice(9, 2, -3))),
    *(lambda s, p=p: s[p] for p in (slice(0, 99, 2), slice(5, 2), slice(None, None, 0), slice("a", 2))),
    *(lambda s, i=i: (s.__setitem__(i, "new"), s) for i in (0, -1, 10, 11, -12, "a", 2**70)),
    *(lambda s, i=i: (s.__delitem__(i), s) for i in (0, -1, 10, 11, -12, "a", None)),
    *(
        lambda s, p=p, o=o: (s.__setitem__(p, o), s)
        for p in (slice(None), slice(2, 5), slice(5, 2), slice(None, None, 2), slice(None, None, -1), slice(8, 1, -3))
        for o in ([], [7], "abc", (4, 5, 6, 7, 8, 9), range(11), 5, None)
    ),
    *(lambda s, p=p: (s.__delitem__(p), s) for p in (slice(None), slice(2, 5), slice(5, 2), slice(None, None, 2))),
    *(lambda s, p=p: (s.__delitem__(p), s) for p in (slice(None, None, -1), slice(8, 1, -3), slice(1, 2, 0))),
    *(lambda s, p=p: (s.__delitem__(p), s) for p in (slice(1, 8, 3), slice(5, 2, 2), slice(2, 3, 5), slice(9, 0, -9))),
    lambda s: (s.append(4), s),
    lambda s: s.append(),
    *(lambda s, o=o: (s.extend(o), s) for o in ([1], "ab", (), range(3), {1: 2}, {5}, 5, None)),
    lambda s: (s.extend(s), s),
    lambda s: (s.__setitem__(slice(1, 3), s), s),
    *(lambda s, i=i: (s.insert(i, "new"), s) for i in (0, -1, 5, 99, -99, True, "a", 1.0)),
    lambda s: s.insert(1),
    *(lambda s, i=i: (s.pop(i), s) for i in (0, -1, 5, 10, 11, -12, "a", None)),
    lambda s: (s.pop(), s),
    lambda s: s.pop(1, 2),
    lambda s: [s.pop() for _ in range(12)],
    lambda s: (s.clear(), s, s.pop()),
    *(lambda s, v=v: (s.remove(v), s) for v in (3, "x", None, 1, [1], {"k": 1}, (1, 2), 99)),
    *(lambda s, v=v: (s.index(v), s.count(v)) for v in (3, "x", None, 1, [1], {"k": 1}, (1, 2))),
    *(lambda s, a=a: s.index(*a) for a in ((99,), (3, 1), (3, -1), (3, 0, 5), (3, 1, -1), (3, -99, 99), (3, 1, 2**70))),
    *(lambda s, a=a: s.index(*a) for a in ((3, "a"), (3, 0, None), (3, 1.0), (), (1, 2, 3, 4))),
    lambda s: s.count(99),
    lambda s: (s.reverse(), s),
    lambda s: (s.sort(key=repr), s),
    lambda s: (s.sort(key=str, reverse=True), s),
    lambda s: (s.sort(key=lambda item: 0, reverse=True), s),
    lambda s: s.sort(repr),
    lambda s: s.sort(key=5),
    lambda s: s.copy(),
    *(lambda s, o=o: s + o for o in ([], [1])),
    *(lambda s, o=o: o + s for o in ([], [1])),
    *(update_in_place(operator.iadd, o) for o in ([1], "ab", (1,), 5, None)),
    *(lambda s, n=n: s * n for n in (0, 1, 2, -1, True)),
    *(lambda s, n=n: n * s for n in (0, 2)),
    *(update_in_place(operator.imul, n) for n in (0, 1, 2, -1, 1.5, "a")),
    *(lambda s, v=v: v in s for v in (3, 1, 1.0, [1], {"k": 1}, 99)),
    *(
        lambda s, f=f: f(s)
        for f in (list, len, repr, str, bool, tuple, iter, reversed, hash, sorted, sum, min, max, set)
    ),
    *(lambda s, o=o: (s == o, o == s, s != o, o != s) for o in (LIST, [], LIST[:3], [*LIST, 1], 5, None, tuple(LIST))),
    *(lambda s, o=o, f=f: f(s[:3], o) for o in ([3, 1, 2], [3], [4], []) for f in (operator.lt, operator.ge)),
    *(lambda s, o=o, f=f: f(s, o) for o in ([3, 1, 2], [3], [4], []) for f in (operator.lt, operator.le)),
    *(lambda s, o=o, f=f: f(o, s) for o in ([3, 1, 2], [3], [4], []) for f in (operator.gt, operator.ge)),
    lambda s: [*s, *s],
    lambda s: list(enumerate(s)),
    lambda s: list(zip(s, s[2:], strict=False)),
    lambda s: (lambda *rest: rest)(*s),
    lambda s: operator.length_hint(iter(s)),
    lambda s: operator.length_hint(reversed(s)),
    lambda s: list(map(str, s)),
    lambda s: " ".join(s),
    lambda s: isinstance(s, collections.abc.MutableSequence),
    lambda s: s.__class__,
    lambda s: (bisect.bisect([1, 2], s[0]), bisect.bisect_left(s, 1, hi=1)),
    lambda s: (bisect.insort(s, 0, hi=0), s),
    lambda s: (random.Random(5).shuffle(s), s),
    lambda s: random.Random(5).choice(s),
    lambda s: sorted(s, key=repr),
    lambda s: s.missing,
]

# Where the interpreter itself, or a generic Python function, words the message: the type is compared alone.
WORDED_BY_OTHERS = ("unsupported operand", "not supported between", "unhashable type", "argument", "has no attribute")


def same_outcome(call: Callable[[Any], Any], data: Any) -> None:
    plain = copy.deepcopy(data)
    subject = facade(data)
    expected, got = outcome(call, plain), outcome(call, subject)
    worded = expected[0] == "raises" and any(words in f"{expected[2]} {got[2]}" for words in WORDED_BY_OTHERS)
    if worded:
        got, expected = got[:2], expected[:2]
    assert got == expected
    assert to_python(subject) == plain
    assert repr(subject) == repr(plain)


@pytest.mark.parametrize("n", range(len(DICT_CALLS)))
def test_dict_call(n: int) -> None:
    same_outcome(DICT_CALLS[n], DICT)


@pytest.mark.parametrize("n", range(len(LIST_CALLS)))
def test_list_call(n: int) -> None:
    same_outcome(LIST_CALLS[n], LIST)


@pytest.mark.parametrize("items", [[3, 1, 2] * 50, list("hello" * 40), [0.5, 1, True] * 9])
def test_calls_on_lists_that_sort(items: list[Any]) -> None:
    for call in (
        *(lambda s, f=f: f(s) for f in (sorted, min, max, set, sum)),
        lambda s: (s.sort(), s),
        lambda s: (s.sort(reverse=True), s),
        lambda s: (s.sort(), bisect.bisect_left(s, s[7]), bisect.insort(s, s[0]), s),
    ):
        same_outcome(call, items)


def test_heapq_says_that_it_takes_lists_alone() -> None:
    with pytest.raises(TypeError, match="list"):
        heapq.heappush(facade([1, 2]), 0)
    assert heapq.nsmallest(2, facade([3, 1, 2])) == [1, 2]
    assert list(heapq.merge(facade([1, 3]), facade([2]))) == [1, 2, 3]


# ---- traps ----------------------------------------------------------------------------------------------------------
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


def test_orjson_fails_loudly_or_converts() -> None:
    orjson = pytest.importorskip("orjson")
    data = {"a": [1, {"b": None}], "e": {}}
    with pytest.raises(TypeError):
        orjson.dumps(facade(data))
    assert orjson.loads(orjson.dumps(facade(data), default=to_python)) == data


def test_class_is_spoofed_and_type_is_not() -> None:
    root = facade({"l": [], "d": {}})
    assert isinstance(root, dict) and isinstance(root["l"], list) and not isinstance(root, list)
    assert root.__class__ is dict and type(root) is StateDict and type(root["l"]) is StateList
    assert isinstance(root, collections.abc.Mapping) and isinstance(root["l"], collections.abc.Sequence)
    assert isinstance(root.keys(), collections.abc.KeysView) and isinstance(root.items(), collections.abc.Set)
    assert isinstance(root.values(), collections.abc.ValuesView)
    for kind in (State, StateList):
        with pytest.raises(TypeError):
            object.__new__(kind)


def test_nothing_is_hashable() -> None:
    root = facade({"l": []})
    for value in (root, root["l"]):
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)
        with pytest.raises(TypeError, match="unhashable"):
            root[value] = 1


def test_one_facade_for_one_container() -> None:
    root = facade({"a": [], "d": {}})
    root["b"] = root["a"]
    assert root["a"] is root["a"] is root["b"] is next(iter(root.values())) is root.get("a")
    number, text = 12345678901234567890, "text" * 3
    root["n"], root["t"] = number, text
    assert root["n"] is number and root["t"] is text
    again = root._state.fork().data
    assert again["a"] is again["b"] and again["a"] is not root["a"]


class Text(str):
    pass


class Number(int):
    pass


class Colour(Enum):
    RED = 1


def test_leaves_keep_their_types() -> None:
    data = {"s": Text("x"), "n": Number(3), "e": Colour.RED, "b": True, "f": 1.0, Text("k"): 1}
    branch = Store().state(data).fork().data
    assert [type(value) for value in branch.values()] == [type(value) for value in data.values()]
    assert branch["s"] is data["s"] and type(list(branch)[-1]) is Text
    assert branch["k"] == 1 and branch[Text("s")] == "x"


def test_equal_keys_of_other_types() -> None:
    root, plain = facade({}), {}
    for d in (root, plain):
        d[1] = "int"
        d[True] = "bool"
        d[1.0] = "float"
        d[0.0] = "zero"
        d[False] = "no"
        d[np.int64(1)] = "numpy"
    assert list(map(repr, root.items())) == list(map(repr, plain.items()))
    nan = float("nan")
    for d in (root, plain):
        d[nan] = 1
        d[float("nan")] = 2
    assert len(root) == len(plain) and root[nan] == 1


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


@pytest.mark.parametrize("size", [2, 30])
@pytest.mark.parametrize("what", ["clear", "grow", "delete", "fork", "rollback", "prune", "replace"])
def test_eq_that_changes_the_dict(size: int, what: str) -> None:
    store = Store()
    store.register(Awkward, "share")
    state = store.state({})
    d = state.data
    turns = 0

    def act() -> None:
        nonlocal turns
        turns += 1
        if turns > 5:
            return
        if what == "clear":
            d.clear()
        elif what == "grow":
            d.update({f"{turns} {i}": i for i in range(40)})
        elif what == "delete":
            for key in list(d)[::2]:
                del d[key]
        elif what == "fork":
            state.fork()
            d[f"fork {turns}"] = 1
        elif what == "rollback":
            state.rollback()
        elif what == "prune":
            state.prune()
        else:
            for key in d:
                d[key] = [turns]

    for i in range(size):
        d[Awkward(lambda: None)] = i
    turns = 99
    state.commit()
    d[Awkward(act)] = "last"
    turns = 0
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


def test_a_detached_facade_lives_on() -> None:
    state = Store().state({"a": {"b": [1]}})
    a, b = state.data["a"], state.data["a"]["b"]
    state.data["a"] = {"b": [2]}
    a["b"].append(5)
    assert b == [1, 5] and state.data["a"]["b"] == [2]
    state.collect()
    assert a == {"b": [1, 5]}
    state.data["back"] = a
    assert state.fork().data == {"a": {"b": [2]}, "back": {"b": [1, 5]}}


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


class Pair(NamedTuple):
    left: Any
    right: Any


def test_tuples() -> None:
    shared = [1]
    data = {"t": (1, (2, shared)), "n": Pair(shared, 3), "pure": Pair(1, 2)}
    state = Store().state(data)
    root = state.data
    assert root == data and type(root["n"]) is Pair and root["pure"] is data["pure"]
    root["t"][1][1].append(2)
    assert root["n"].left is root["t"][1][1] and root["n"].left == [1, 2] and shared == [1]
    child = state.fork().data
    child["n"].left.append(3)
    assert root["n"].left == [1, 2] and child["t"][1][1] == [1, 2, 3]
    plain = to_python(child)
    assert type(plain["n"]) is Pair and type(plain["n"].left) is list


def test_match_statements() -> None:
    root = facade({"kind": "move", "at": [1, 2], "rest": {}})
    match root:
        case {"kind": "move", "at": [x, y], **rest}:
            assert (x, y) == (1, 2) and list(rest) == ["rest"]
        case _:
            raise AssertionError
    match root["at"]:
        case [first, *others]:
            assert first == 1 and others == [2]
        case _:
            raise AssertionError
    match root:
        case list():
            raise AssertionError
        case dict():
            pass
        case _:
            raise AssertionError


def test_unpacking() -> None:
    root = facade({"a": 1, "b": [1, 2]})
    assert {**root, "c": 0} == {"a": 1, "b": [1, 2], "c": 0}
    assert (lambda a, b: (a, b))(**root) == (1, [1, 2])
    first, *rest = root["b"]
    assert (first, rest, [*root["b"]]) == (1, [2], [1, 2])
    plain = {}
    plain.update(root)
    plain |= root
    assert plain == root and list(plain) == ["a", "b"]
    assert dict(root) == root and list(root["b"]) == root["b"]


def test_shallow_copies_are_plain_and_hold_the_facades() -> None:
    root = facade({"a": [1], "l": [[2]]})
    for shallow in (copy.copy(root), root.copy(), dict(root)):
        assert type(shallow) is dict and shallow["a"] is root["a"]
    for shallow in (copy.copy(root["l"]), root["l"].copy(), root["l"][:], list(root["l"])):
        assert type(shallow) is list and shallow[0] is root["l"][0]


def test_deepcopy_of_a_facade_is_a_fork() -> None:
    root = facade({"a": {"x": [1]}, "b": []})
    twin = copy.deepcopy(root["a"])
    assert type(twin) is StateDict and twin == {"x": [1]} and twin._state is not root._state
    twin["x"].append(2)
    assert root["a"] == {"x": [1]} and twin._state.data is twin
    holder = copy.deepcopy({"p": root["a"], "q": [root["a"]["x"], root["a"]]})
    holder["p"]["x"].append(3)
    assert holder["q"][0] is holder["p"]["x"] and holder["q"][1] is holder["p"]
    assert root["a"]["x"] == [1]


def test_pickled_facades_are_plain_and_keep_aliasing() -> None:
    root = facade({"a": [1]})
    root["b"] = root["a"]
    root["self"] = root
    back = pickle.loads(pickle.dumps(root))
    assert type(back) is dict and back["a"] is back["b"] and back["self"] is back
    assert type(pickle.loads(pickle.dumps(root["a"]))) is list


def test_comparison_goes_both_ways_round() -> None:
    data = {"a": [1, {"b": (1, 2)}], 2: None}
    one, two = facade(data), facade(data)
    assert one == two and two == one and one == data and data == one
    assert [one] == [data] and {"k": one} == {"k": two} and (one["a"],) == (data["a"],)
    two["a"][1]["b"] = (1, 3)
    assert one != two and data != two and two != data
    assert one["a"] != (1, {"b": (1, 2)}) and one != 5 and one["a"] is not None
    assert facade([1, 2]) < facade([1, 3]) and facade([1, 3]) > [1, 2] and facade([1, 2]) < [1, 3]
    assert OrderedDict(data) == one and one == OrderedDict(data)


def test_cycles() -> None:
    data: dict[str, Any] = {"l": []}
    data["l"].append(data["l"])
    data["d"] = data
    root = facade(data)
    assert root["d"] is root and root["l"][0] is root["l"] and repr(root) == repr(data)
    with pytest.raises(RecursionError):
        assert root == copy.deepcopy(data)
    assert root["l"] == root["l"]


def test_numpy_takes_them() -> None:
    root = facade({"grid": [[1, 2], [3, 4]], "floats": [0.5, 1.5]})
    assert np.array(root["grid"]).tolist() == [[1, 2], [3, 4]]
    assert np.asarray(root["floats"], np.float32).dtype == np.float32
    assert np.sum(root["floats"]) == 2


def test_messages_are_those_of_the_plain_containers() -> None:
    root = facade({"l": [1]})
    for call, error, message in (
        (lambda: root["no"], KeyError, "'no'"),
        (lambda: root[(1, 2)], KeyError, "(1, 2)"),
        (lambda: root["l"][1], IndexError, "list index out of range"),
        (lambda: root["l"].pop(3), IndexError, "pop index out of range"),
        (lambda: root["l"].__setitem__(1, 0), IndexError, "list assignment index out of range"),
        (lambda: root["l"]["a"], TypeError, "list indices must be integers or slices, not str"),
        (lambda: root["l"].remove(5), ValueError, "list.remove(x): x not in list"),
        (lambda: root["l"].index(5), ValueError, "5 is not in list"),
    ):
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == message


def test_keys_may_not_change() -> None:
    class Player:
        pass

    store = Store()
    root = store.state({"a": 1}).data
    for key in (Player(), (1, Player()), root._state):
        with pytest.raises(OpaqueError, match=r"a key of type (Player|State)"):
            root[key] = 1
        with pytest.raises(OpaqueError, match="a key"):
            store.state({key: 1})
    assert root == {"a": 1}
    store.register(Player, "share")
    player = Player()
    root[player] = 2
    assert root._state.fork().data[player] == 2
