"""Random histories of several versions at once, against plain containers and ``copy.deepcopy``.

After every step each version must hold what its model holds: values and their types, the order of keys, and which
containers are one and the same. A failure prints the steps that lead to it, and a blob that replays them.
"""

from __future__ import annotations

import copy
import gc
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turnwise.state import OpaqueError, State, StateDict, StateError, StateList, Store, to_python

CONTAINERS = (dict, list)
MAX_VERSIONS = 7
MAX_ITEMS = 6000  # of a version: bigger ones are cleared, so that comparing stays quick


# ---- what is written ------------------------------------------------------------------------------------------------
# A recipe, so that the state and the model get equal objects that share nothing: an atom, or a tuple that says what to
# build. ("alias", n): the n-th container that the version has; ("cycle",): a list that holds itself.
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "bc", 0.5, 1.0, b"x", 2**70, (1, "t"), ()])
)
KEYS = st.one_of(
    st.integers(0, 12),
    st.sampled_from([True, False, 1.0, None, "a", "b", "key", (1, 2), (1.0, 2), frozenset({3}), 2.5]),
)
RECIPES = st.recursive(
    st.one_of(
        ATOMS,
        st.tuples(st.just("alias"), st.integers(0, 40)),
        st.tuples(st.just("held"), st.integers(0, 10)),
        st.tuples(st.just("set"), st.frozensets(st.integers(0, 5), max_size=3)),
        st.just(("cycle",)),
    ),
    lambda inner: st.one_of(
        st.tuples(st.just("list"), st.lists(inner, max_size=4)),
        st.tuples(st.just("tuple"), st.lists(inner, max_size=3)),
        st.tuples(st.just("dict"), st.lists(st.tuples(KEYS, inner), max_size=4)),
        st.tuples(st.just("twice"), inner),
    ),
    max_leaves=6,
)


def is_recipe(item: Any) -> bool:
    return isinstance(item, tuple) and bool(item) and item[0] in BUILDERS


BUILDERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "list": lambda parts, build: [build(part) for part in parts],
    "tuple": lambda parts, build: tuple(build(part) for part in parts),
    "dict": lambda parts, build: {key: build(part) for key, part in parts},
    "set": lambda parts, build: set(parts),
    "twice": lambda part, build: [built := build(part), built],
    "alias": lambda n, build: None,
    "held": lambda n, build: None,
    "cycle": lambda part, build: None,
}


def build_pair(recipe: Any, aliases: list[tuple[Any, Any]], held: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """What ``recipe`` says, for the state and for the model."""

    def build(side: int, part: Any) -> Any:
        if not is_recipe(part):
            return part
        if part[0] == "cycle":
            ring: list[Any] = [0]
            ring.append(ring)
            return ring
        if part[0] in ("alias", "held"):
            pairs = aliases if part[0] == "alias" else held
            return pairs[part[1] % len(pairs)][side] if pairs else None
        return BUILDERS[part[0]](part[1], lambda inner: build(side, inner))

    return build(0, recipe), build(1, recipe)


# ---- comparing ------------------------------------------------------------------------------------------------------
def check_same(real: Any, model: Any, *, plain: bool = False, sets_are_one: bool = True) -> int:
    """Raises unless both have the same structure; gives the number of items. ``plain``: facades are not allowed."""
    met: dict[int, int] = {}
    back: dict[int, int] = {}
    alive: list[Any] = []
    open_ = [(real, model)]
    items = 0
    while open_:
        ours, theirs = open_.pop()
        items += 1
        if isinstance(theirs, tuple):
            assert type(ours) is type(theirs) and len(ours) == len(theirs), (ours, theirs)
            open_.extend(zip(ours, theirs, strict=True))
            continue
        if type(theirs) not in (dict, list, set):
            assert type(ours) is type(theirs) and ours == theirs, (ours, theirs)
            continue
        assert isinstance(ours, type(theirs)), (ours, theirs)
        if plain:
            assert type(ours) is type(theirs)
        if type(theirs) is set:
            assert ours == theirs
            if not sets_are_one:
                continue
        if id(ours) in met or id(theirs) in back:
            assert met.get(id(ours)) == id(theirs) and back.get(id(theirs)) == id(ours), "aliasing differs"
            continue
        met[id(ours)] = id(theirs)
        back[id(theirs)] = id(ours)
        alive.append(ours)
        assert len(ours) == len(theirs)
        if type(theirs) is dict:
            for (key, item), (their_key, their_item) in zip(ours.items(), theirs.items(), strict=True):
                assert type(key) is type(their_key) and key == their_key, (key, their_key)
                open_.append((item, their_item))
        elif type(theirs) is list:
            open_.extend(zip(ours, theirs, strict=True))
    return items


def containers(root: Any) -> Iterator[Any]:
    """The containers that ``root`` leads to, each once, in an order that depends on structure alone."""
    seen: set[int] = set()
    alive = []
    open_ = [root]
    while open_:
        item = open_.pop()
        if isinstance(item, tuple):
            open_.extend(reversed(item))
        elif isinstance(item, CONTAINERS) and id(item) not in seen:
            seen.add(id(item))
            alive.append(item)
            yield item
            children = list(item.values()) if isinstance(item, dict) else list(item)
            if len(children) <= 200:
                open_.extend(reversed(children))


def has_tuples(root: Any) -> bool:
    items = (list(each.values()) if isinstance(each, dict) else each for each in containers(root))
    return any(isinstance(item, tuple) for each in items for item in each)


def sort_key(item: Any) -> tuple[str, Any]:
    if isinstance(item, (*CONTAINERS, set, tuple)):
        return ("~", len(item))
    return (type(item).__name__, repr(item))


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "gives", call()
    except (LookupError, TypeError, ValueError) as error:
        return "raises", (type(error), str(error))


# ---- the calls ------------------------------------------------------------------------------------------------------
def reinsert(d: Any) -> None:
    for each in list(d)[:3]:
        d[each] = d.pop(each)


DICT_WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "set": operator.setitem,
    "delete": lambda d, key, value: operator.delitem(d, key),
    "pop": lambda d, key, value: d.pop(key),
    "pop default": lambda d, key, value: d.pop(key, None),
    "popitem": lambda d, key, value: d.popitem(),
    "setdefault": lambda d, key, value: d.setdefault(key, value),
    "update": lambda d, key, value: d.update({key: value, "z": 1}),
    "pairs": lambda d, key, value: d.update([(key, value)], named=value),
    "|=": lambda d, key, value: operator.ior(d, {key: value}),
    "|": lambda d, key, value: d | {key: 1},
    "clear": lambda d, key, value: d.clear(),
    "get": lambda d, key, value: d.get(key, 5),
    "in": lambda d, key, value: key in d,
    "named": lambda d, key, value: d.update(a=value),
    "reinsert": lambda d, key, value: reinsert(d),
}
LIST_WRITES: dict[str, Callable[[Any, Any, list[Any], Any], Any]] = {
    "append": lambda items, i, values, atom: items.append(values[0]),
    "insert": lambda items, i, values, atom: items.insert(i, values[0]),
    "set": lambda items, i, values, atom: operator.setitem(items, i, values[0]),
    "delete": lambda items, i, values, atom: operator.delitem(items, i),
    "pop": lambda items, i, values, atom: items.pop(),
    "pop at": lambda items, i, values, atom: items.pop(i),
    "extend": lambda items, i, values, atom: items.extend(values),
    "+=": lambda items, i, values, atom: operator.iadd(items, values),
    "*=": lambda items, i, values, atom: operator.imul(items, abs(i) % 3),
    "clear": lambda items, i, values, atom: items.clear(),
    "slice": lambda items, part, values, atom: items[part],
    "set slice": lambda items, part, values, atom: operator.setitem(items, part, values),
    "delete slice": lambda items, part, values, atom: operator.delitem(items, part),
    "reverse": lambda items, i, values, atom: items.reverse(),
    "sort": lambda items, i, values, atom: items.sort(key=sort_key),
    "sort back": lambda items, i, values, atom: items.sort(key=sort_key, reverse=True),
    "remove": lambda items, i, values, atom: items.remove(atom),
    "index": lambda items, i, values, atom: items.index(atom, i),
    "count": lambda items, i, values, atom: items.count(atom),
    "+": lambda items, i, values, atom: items + [1],  # noqa: RUF005 - is what is tested
}
NUMBERS = st.one_of(st.none(), st.integers(-6, 6))
VERSION, TARGET, PLACE = st.integers(0, 9), st.integers(0, 60), st.integers(0, 4300)


def often(table: dict[str, Any], *again: str) -> st.SearchStrategy[str]:
    """A key of ``table``; those of ``again`` twice as often as the others."""
    return st.sampled_from([*again, *table])


# ---- the histories ---------------------------------------------------------------------------------------------------
class Version:
    """A state, the model of it, and pairs of objects that a user of both might still hold."""

    def __init__(self, state: State, model: Any) -> None:
        self.state = state
        self.model = model
        self.held: list[tuple[Any, Any]] = []

    def pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(containers(self.state.data), containers(self.model), strict=True))

    def settled(self) -> None:
        """A fork took the plain containers over: what the user holds of them is not the state's any more."""
        self.held = [pair for pair in self.held if isinstance(pair[0], StateDict | StateList) and is_facade(pair[0])]


def is_facade(item: Any) -> bool:
    return type(item) in (StateDict, StateList)


class Histories(RuleBasedStateMachine):
    versions: list[Version]

    @initialize(recipe=RECIPES, as_list=st.booleans())
    def start(self, recipe: Any, as_list: bool) -> None:
        self.store = Store()
        data, model = build_pair(recipe, [], [])
        if as_list:
            data, model = [data, [], {}], [model, [], {}]
        else:
            data, model = {"root": data, "l": [1, [2]], "d": {}}, {"root": model, "l": [1, [2]], "d": {}}
        self.versions = [Version(self.store.state(data), model)]

    def version(self, n: int, writable: bool = True) -> Version:
        versions = [each for each in self.versions if not (writable and each.state.frozen)]
        return versions[n % len(versions)]

    def target(self, version: Version, n: int, kind: type) -> tuple[Any, Any] | None:
        """A container of the version, or one that is only held."""
        pairs = [pair for pair in version.pairs() + version.held if isinstance(pair[1], kind)]
        return pairs[n % len(pairs)] if pairs else None

    def step(self, version: Version, call: Callable[[int], Any], hold: int) -> None:
        """The same call on both sides; then equal results or equal errors."""
        (kind, ours), (their_kind, theirs) = outcome(lambda: call(0)), outcome(lambda: call(1))
        assert kind == their_kind, (ours, theirs)
        if kind == "raises":
            assert ours == theirs
            return
        if isinstance(theirs, (*CONTAINERS, tuple)):
            check_same(ours, theirs)
        if isinstance(theirs, CONTAINERS):
            version.held.append((ours, theirs))
        elif not isinstance(theirs, tuple):
            assert type(ours) is type(theirs) and ours == theirs

    # ---- writes
    @rule(v=VERSION, n=TARGET, key=KEYS, recipe=RECIPES, what=often(DICT_WRITES, "set"))
    def write_dict(self, v: int, n: int, key: Any, recipe: Any, what: str) -> None:
        version = self.version(v)
        found = self.target(version, n, dict)
        if found is None:
            return
        values = build_pair(recipe, version.pairs(), version.held)
        self.step(version, lambda side: DICT_WRITES[what](found[side], key, values[side]), n)

    @rule(
        v=VERSION,
        n=TARGET,
        i=st.integers(-6, 6),
        part=st.builds(slice, st.integers(-6, 6), NUMBERS, st.sampled_from([None, 1, 2, -1, -2, 3])),
        recipes=st.lists(RECIPES, min_size=1, max_size=4),
        what=often(LIST_WRITES, "append", "insert", "set slice"),
    )
    def write_list(self, v: int, n: int, i: int, part: slice, recipes: list[Any], what: str) -> None:
        version = self.version(v)
        found = self.target(version, n, list)
        if found is None or (what == "*=" and len(found[1]) > 500):
            return
        pairs = version.pairs()
        built = [build_pair(recipe, pairs, version.held) for recipe in recipes]
        values = ([one for one, _ in built], [other for _, other in built])
        atom = recipes[0] if not is_recipe(recipes[0]) else 1
        place = part if what.endswith("slice") else i
        self.step(version, lambda side: LIST_WRITES[what](found[side], place, values[side], atom), n)

    @rule(v=VERSION, n=TARGET, at=st.integers(0, 30), recipe=RECIPES, many=st.booleans())
    def write_and_hold(self, v: int, n: int, at: int, recipe: Any, many: bool) -> None:
        """A plain container is put in, and the user goes on filling the very object."""
        version = self.version(v)
        values = build_pair(("list", [recipe]) if many else ("dict", [("k", recipe)]), version.pairs(), version.held)
        found = self.target(version, n, dict)
        if found:
            for side in (0, 1):
                found[side][f"held{at}"] = values[side]
        else:
            found = self.target(version, n, list)
            assert found
            for side in (0, 1):
                found[side].insert(at, values[side])
        version.held.append(values)

    @rule(v=VERSION, n=TARGET, k=st.integers(0, 9))
    def change_set(self, v: int, n: int, k: int) -> None:
        """Objects that the store can't look into are changed in place."""
        version = self.version(v)
        both = [
            [item for each in side for item in (each.values() if isinstance(each, dict) else each) if type(item) is set]
            for side in (containers(version.state.data), containers(version.model))
        ]
        assert len(both[0]) == len(both[1])
        if both[0]:
            found = self.target(version, k, dict)
            for side, sets in enumerate(both):
                sets[n % len(sets)].add(k)
                if found:  # and one that was in the state before gets a second place
                    found[side][f"set{k}"] = sets[n % len(sets)]

    # ---- many items
    @rule(v=VERSION, n=TARGET, size=st.sampled_from([9, 17, 70, 140, 1100]), step=st.integers(1, 4), back=st.booleans())
    def many_keys(self, v: int, n: int, size: int, step: int, back: bool) -> None:
        found = self.target(self.version(v), n, dict)
        if found is None:
            return
        for d in found:
            for key in range(size):
                d[key] = [key] if key % 50 == 0 else str(key)
            for key in range(0, size, step):
                del d[key]
            for key in range(size - 1, -1, -step) if back else range(0, size, step * 2):
                d[key] = -key

    @rule(v=VERSION, n=TARGET, turns=st.integers(10, 60))
    def churn(self, v: int, n: int, turns: int) -> None:
        """New keys come and go at the end, and the size stays."""
        found = self.target(self.version(v), n, dict)
        for d in found or ():
            for turn in range(turns):
                d[f"turn {turn}"] = turn
                d.popitem()

    @rule(v=VERSION, n=TARGET, size=st.sampled_from([5, 130, 300, 4200]), at=PLACE, cut=PLACE)
    def many_items(self, v: int, n: int, size: int, at: int, cut: int) -> None:
        found = self.target(self.version(v), n, list)
        for items in found or ():
            items[at:at] = range(size)
            del items[at + 2 : at + 2 + cut]
            items.insert(at // 2, "here")

    # ---- versions
    @precondition(lambda self: len(self.versions) < MAX_VERSIONS)
    @rule(v=VERSION, n=st.sampled_from([None, 0, 1, 2]))
    def fork(self, v: int, n: int | None) -> None:
        version = self.version(v, writable=False)
        children = [version.state.fork()] if n is None else version.state.fork(n)
        version.settled()
        self.versions += [Version(child, copy.deepcopy(version.model)) for child in children]
        assert all(not child.frozen for child in children)

    @precondition(lambda self: len(self.versions) < MAX_VERSIONS)
    @rule(v=VERSION)
    def commit(self, v: int) -> None:
        version = self.version(v)
        commit = version.state.commit()
        version.settled()
        assert commit.frozen
        self.versions.append(Version(commit, copy.deepcopy(version.model)))

    @rule(v=VERSION, to=VERSION)
    def rollback(self, v: int, to: int) -> None:
        version, goal = self.version(v), self.version(to, writable=False)
        facades = [facade for facade, _ in version.pairs() if is_facade(facade)]
        version.state.rollback(goal.state)
        goal.settled()
        if goal is not version:
            version.model = copy.deepcopy(goal.model)
            version.held = []
        alive = {id(each) for each in containers(version.state.data)}
        for facade in facades:  # each shows a container that the version has, or says that it is gone
            try:
                facade.__len__()
            except StateError:
                assert id(facade) not in alive

    @precondition(lambda self: sum(not each.state.frozen for each in self.versions) > 1)
    @rule(v=VERSION, drop=st.booleans())
    def end(self, v: int, drop: bool) -> None:
        version = self.version(v)
        root = version.state.data
        if not drop:
            version.state.prune()
            with pytest.raises(StateError):
                len(root)
        self.versions.remove(version)

    @precondition(lambda self: any(each.state.frozen for each in self.versions))
    @rule(v=VERSION)
    def end_commit(self, v: int) -> None:
        commits = [each for each in self.versions if each.state.frozen]
        self.versions.remove(commits[v % len(commits)])

    @rule(v=VERSION)
    def round_trip(self, v: int) -> None:
        """Pickled and back: the same, in a store of its own, and it can be written."""
        version = self.version(v, writable=False)
        copied = pickle.loads(pickle.dumps(version.state))
        version.settled()
        assert copied.frozen == version.state.frozen and copied.store is not self.store
        branch, model = copied.fork(), copy.deepcopy(version.model)
        for ours, theirs in list(zip(containers(branch.data), containers(model), strict=True)):
            if isinstance(theirs, dict):
                assert all(key in ours for key in theirs)
                for side in (ours, theirs):
                    for key in list(side)[::2]:
                        del side[key]
                    side.update({"new": 1, 5: 2})
            else:
                for side in (ours, theirs):
                    side[1:] = [0, *side[:-1]]
        check_same(branch.data, model)
        check_same(copied.data, version.model, sets_are_one=not copied.frozen)

    @rule(v=VERSION)
    def collect(self, v: int) -> None:
        self.version(v, writable=False).state.collect()

    @rule()
    def collect_python(self) -> None:
        gc.collect()

    @rule(v=VERSION, w=VERSION, n=TARGET)
    def refused(self, v: int, w: int, n: int) -> None:
        """What can't be put in raises, and changes nothing."""
        version, other = self.version(v), self.version(w, writable=False)
        found = self.target(version, n, dict)
        if found is None or other is version or not is_facade(other.state.data):
            return
        for bad in (other.state.data, [object()], {"a": {"b": [version.state]}}):
            if is_facade(found[0]):
                with pytest.raises(OpaqueError):
                    found[0]["bad"] = bad

    @rule(v=VERSION)
    def shrink(self, v: int) -> None:
        version = self.version(v)
        if sum(map(len, containers(version.model))) > MAX_ITEMS:
            for side in (version.state.data, version.model):
                for each in list(containers(side)):
                    if isinstance(each, list):
                        del each[1000:]

    # ---- after every step
    @invariant()
    def all_are_equal(self) -> None:
        for version in getattr(self, "versions", ()):
            items = check_same(version.state.data, version.model, sets_are_one=not version.state.frozen)
            for ours, theirs in version.held:
                check_same(ours, theirs)
            if items < 200:
                plain = to_python(version.state)
                check_same(plain, version.model, plain=True, sets_are_one=not version.state.frozen)
                if not has_tuples(version.model):  # a tuple in a cycle has another identity each time
                    assert repr(version.state.data) == repr(version.model)
                try:
                    assert version.state.data == version.model
                    assert version.model == version.state.data
                    assert (version.state.data != version.model) is False
                except RecursionError:  # cycles, on which dict and list give up too
                    with pytest.raises(RecursionError):
                        assert copy.deepcopy(version.model) == version.model

    def teardown(self) -> None:
        if not hasattr(self, "versions"):
            return
        store = self.store
        self.versions.clear()
        gc.collect()
        assert store.states() == []


def some(examples: int) -> settings:
    return settings(max_examples=examples, stateful_step_count=40, derandomize=True, deadline=None, print_blob=True)


class TestHistories(Histories.TestCase):  # type: ignore[misc, valid-type]
    settings = some(20)


@pytest.mark.slow
class TestMoreHistories(TestHistories):
    settings = some(150)
