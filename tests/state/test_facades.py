"""StateDict and StateList against dict and list: the same methods, results, errors and messages."""

from __future__ import annotations

import bisect
import collections.abc
import copy
import heapq
import json
import operator
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from turnwise.state import StateDict, StateList, Store, to_python

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


class NoIterator:
    def __iter__(self) -> Any:
        raise TypeError("not today")


class OnceOnly:
    """Iterable once: a second ``iter()`` finds it empty."""

    def __init__(self) -> None:
        self.items = [1, 2]

    def __iter__(self) -> Any:
        found, self.items = self.items, []
        return iter(found)


NAN = float("nan")


def matched(subject: Any) -> Any:
    match subject:
        case {"a": number, "b": [first, *others], **rest}:
            return number, first, others, rest
        case [first, _, *others]:
            return first, others
    return None


DICT_CALLS: list[Callable[[Any], Any]] = [
    *(lambda d, k=k: d[k] for k in (*DICT, "no", 1, 1.0, (1, 2.0), (9,), ((),), [], {}, float("nan"))),
    *(lambda d, k=k: d.get(k) for k in (*DICT, "no", [])),
    *(lambda d, k=k: d.get(k, 7) for k in ("a", "no")),
    lambda d: d.get(),
    lambda d: d.get(1, 2, 3),
    *(lambda d, k=k: k in d for k in (*DICT, "no", 0, {})),
    *(lambda d, k=k: d.__setitem__(k, 5) for k in (*DICT, "new", 1.0, np.int64(3), 0.0, NAN, [], {1})),
    lambda d: (d.update([(0, 1), (False, 2), (NAN, 3), (float("nan"), 4)]), d[NAN], len(d), d.popitem()[1]),
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
    *(
        lambda d, o=o: (d == o, o == d, d != o, o != d, [d] == [o])
        for o in (facade(DICT), facade({}), OrderedDict(DICT))
    ),
    *(lambda d, o=o: d < o for o in ({}, 5)),
    lambda d: {**d, "c": 0},
    lambda d: (lambda **named: named)(**{key: d["a"] for key in ("x", "y")}),
    *(lambda d, f=f: f(plain := {"a": 0}, d) or plain for f in (dict.update, operator.ior)),
    matched,
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
        for o in ([], [7], "abc", (4, 5, 6, 7, 8, 9), range(11), 5, None, NoIterator())
    ),
    *(lambda s, p=p: (s.__delitem__(p), s) for p in (slice(None), slice(2, 5), slice(5, 2), slice(None, None, 2))),
    *(lambda s, p=p: (s.__delitem__(p), s) for p in (slice(None, None, -1), slice(8, 1, -3), slice(1, 2, 0))),
    *(lambda s, p=p: (s.__delitem__(p), s) for p in (slice(1, 8, 3), slice(5, 2, 2), slice(2, 3, 5), slice(9, 0, -9))),
    lambda s: (s.append(4), s),
    lambda s: s.append(),
    *(lambda s, o=o: (s.extend(o), s) for o in ([1], "ab", (), range(3), {1: 2}, {5}, 5, None)),
    lambda s: (s.extend(s), s),
    lambda s: s.extend(NoIterator()),
    lambda s: s.__setitem__(slice(1, 3), broken()),
    lambda s: (s.extend(OnceOnly()), s.__setitem__(slice(0, 1), OnceOnly()), s),
    lambda s: (s.__setitem__(slice(0, 4, 2), OnceOnly()), s),
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
    *(lambda s, o=o: (s == o, o == s, s != o, (s,) == (o,)) for o in (facade(LIST), facade(LIST[:3]))),
    *(lambda s, o=o: (s < o, s >= o, o > s, o <= s) for o in (facade([3, 1, 2]), facade([4]), facade([]))),
    *(lambda s, o=o, f=f: f(s[:3], o) for o in ([3, 1, 2], [3], [4], []) for f in (operator.lt, operator.ge)),
    *(lambda s, o=o, f=f: f(s, o) for o in ([3, 1, 2], [3], [4], []) for f in (operator.lt, operator.le)),
    *(lambda s, o=o, f=f: f(o, s) for o in ([3, 1, 2], [3], [4], []) for f in (operator.gt, operator.ge)),
    lambda s: [*s, *s],
    matched,
    lambda s: np.array([s[:3], s[:3]]).tolist(),
    lambda s: (np.asarray(s[:3], np.float32).dtype, np.sum(s[:3])),
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
