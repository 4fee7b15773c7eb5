"""Draws from the index of a large store: the weights of its rule, and no look at what did not change."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.stores import indexes, parts, sampling
from turnwise.arena.stores.indexes import IndexedPool
from turnwise.arena.stores.parts import Scores, SortedKeys
from turnwise.arena.stores.sampling import (
    Learnability,
    PrioritizedLevelReplay,
    UniformSampling,
    Weighted,
    WeightedPool,
)
from turnwise.arena.stores.slots import SlotTree, changes

from ..operations import count_operations

RULES = {
    "uniform": UniformSampling(),
    "weighted": Weighted(),
    "learnability": Learnability(),
    "learnability without a floor": Learnability(uniform=0.0),
    "ranks": PrioritizedLevelReplay(),
    "flat ranks": PrioritizedLevelReplay(1.0, staleness=0.3),
    "ranks alone": PrioritizedLevelReplay(0.5, staleness=0.0),
    "ages alone": PrioritizedLevelReplay(staleness=1.0),
    "scores": PrioritizedLevelReplay(0.3, rank=False),
    "scores alone": PrioritizedLevelReplay(1.0, staleness=0.0, rank=False),
}
IN_ORDER = ("uniform", "weighted", "learnability", "learnability without a floor")
"""Rules whose index goes through the artifacts in their order, as their definition does."""


@pytest.fixture
def always_indexed(monkeypatch):
    monkeypatch.setattr(indexes, "SMALL", 0)


@pytest.fixture(params=range(2))
def rng(request):
    seed = random.randrange(2**32) if request.param else 0
    print("seed", seed)
    return random.Random(seed)


def change(store, rng):
    """Do one thing to the store, among few scores and weights, so that many are equal."""
    ids = [artifact.id for artifact in store]
    kind = rng.choice(["add", "add", "record", "record", "record", "weigh", "remove"]) if ids else "add"
    if kind == "add":
        store.add(rng.randrange(1000), weight=rng.choice([0, 0.5, rng.random()]))
    elif kind == "record":
        score = rng.choice([None, 0.0, 0.5, rng.random(), 10.0 ** rng.randrange(-9, 9)])
        store.record(rng.choice(ids), rng.choice([0.0, 1.0, rng.random()]), score=score)
    elif kind == "weigh":
        store.set_weight(rng.choice(ids), rng.choice([0, 1.0, rng.random()]))
    else:
        store.remove(rng.choice(ids))


def expected(store):
    """The pool by the rule's definition, and what each artifact weighs, of 1."""
    artifacts = list(store)
    pool = WeightedPool(artifacts, [store.outcome(a.id) for a in artifacts], store._contents.plays, store.sampling)
    weights = pool.weights or [1.0] * len(pool.artifacts)
    return pool, {a.id: weight / sum(weights) for a, weight in zip(pool.artifacts, weights, strict=True)}


def weights_of(pool):
    """What each artifact of an indexed pool weighs, of 1: by its parts, and by where the draws fall."""
    if pool._uniform:
        return {pool._show(item).id: 1 / len(pool) for _, item in pool._members}
    mass = sum(part.mass for part in pool._parts) or 1.0  # without parts no artifact weighs anything
    found = {pool._show(item).id: sum(part.weight(slot) for part in pool._parts) / mass for slot, item in pool._members}
    return {id: weight for id, weight in found.items() if weight > 0}


@pytest.mark.parametrize("name", RULES)
def test_an_index_weighs_what_its_rule_does(name, rng, always_indexed):
    store, taken = ArtifactStore("q", sampling=RULES[name], window=4), 0
    for _ in range(25):
        for _ in range(rng.choice([1, 1, 1, 30])):
            change(store, rng)
        if not store.count():
            continue
        pool = store._pool()
        assert isinstance(pool, IndexedPool)
        definition, shares = expected(store)
        assert weights_of(pool) == pytest.approx(shares, abs=1e-12)
        assert len(pool) == len(definition) and pool.at_least <= len(pool) and (pool.at_least > 0) == (len(pool) > 0)
        for part in pool._parts:
            # The draws of a part fall on each slot in proportion to its weight: at the ends of its share of the mass.
            edges = [part.find(place / 200) for place in range(200)]
            weights = {slot: part.weight(slot) / part.mass for slot, _ in pool._members}
            for slot, count in Counter(edges).items():
                assert count / 200 == pytest.approx(weights[slot], abs=1.01 / 200)
        if name in IN_ORDER and len(pool):
            taken += 1
            draws = [
                each.draw(9, True, random.Random(taken)) + each.draw(1, False, random.Random(-taken))
                for each in (pool, definition)
            ]
            assert draws[0] == draws[1]
    assert taken or name not in IN_ORDER


@pytest.mark.parametrize("name", RULES)
def test_draws_without_replacement_follow_the_weights_in_turn(name, rng, always_indexed):
    """The second of two, given the first, has its share of what is left."""
    store = ArtifactStore("q", sampling=RULES[name])
    for number in range(5):
        store.add(number, weight=[0.5, 0.0, 2.0, 1.0, 1.0][number])
    for number, (reward, score) in enumerate([(1.0, 0.5), (0.0, 0.25), (1.0, 0.5), (0.5, 0.0)]):
        store.record(f"q-{number}", reward, success=[0.25, 0.5, 1.0, 0.5][number], score=score)
    pool, (_, shares) = store._pool(), expected(store)
    every = pool.draw(len(pool), False, rng)
    assert sorted(a.id for a in every) == sorted(shares), "all of them, each once"
    count = 3000
    pairs = Counter(tuple(a.id for a in pool.draw(2, False, rng)) for _ in range(count))
    for first, share in shares.items():
        for second, other in shares.items():
            if first != second:
                assert pairs[first, second] / count == pytest.approx(share * other / (1 - share), abs=0.04)
    with pytest.raises(ValueError, match=f"has {len(shares)} artifacts to draw from"):
        store.sample(len(shares) + 1)


def test_a_store_that_can_not_be_drawn_from(always_indexed):
    store = ArtifactStore("q", sampling="weighted")
    assert store.sample_one() is None
    store.add("x", weight=0.0)
    with pytest.raises(ValueError, match="k=1: the store 'q' has 0 artifacts"):
        store.sample_one()
    with pytest.raises(ValueError, match="k=1: the store 'q' has 0 artifacts"):
        store.sample(replacement=True)
    assert store.sample(0) == []


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("side", [None, "train"])
def test_views_follow_too_and_a_resumed_store_draws_the_same(name, side, rng, always_indexed):
    """A frozen view keeps its draws while the store changes, and a resumed store has the ones of its state."""

    def of(store):
        return store if side is None else store.split(side, share=0.3)

    store = ArtifactStore("q", sampling=RULES[name], seed=5)
    for _ in range(80):
        change(store, rng)
    for _ in range(5):
        store.add(f"more {rng.random()}")
    view = store.frozen()
    twin = ArtifactStore("q", sampling=RULES[name], seed=5)
    twin.load_state_dict(json.loads(json.dumps(store.state_dict())))
    for _ in range(4):
        before = weights_of(of(view)._pool())
        assert before == pytest.approx(weights_of(of(twin.frozen())._pool()))
        state = store.state_dict()
        again = ArtifactStore("q", sampling=RULES[name])
        again.load_state_dict(json.loads(json.dumps(state)))
        most = len(of(store)._pool())  # few artifacts of a side may weigh something
        assert most == len(of(again)._pool())
        drawn = [
            [a.id for a in of(each).sample(k, replacement=k > min(3, most))]
            for k in ((1, 3, 5) if most else ())
            for each in (store, again)
        ]
        assert drawn[::2] == drawn[1::2]
        for _ in range(9):
            change(store, rng)
        assert weights_of(of(view)._pool()) == before and len(view) == len(twin)


def test_a_rule_that_inherits_weighs_for_itself():
    class Last(Learnability):
        def weights(self, artifacts, outcomes, plays):
            return [0.0] * (len(artifacts) - 1) + [1.0]

    store = ArtifactStore("q", sampling=Last())
    for number in range(sampling.SMALL + 9):
        store.add(number)
    assert store.sample_one().data == sampling.SMALL + 8
    assert isinstance(store._pool(), WeightedPool)


# -- what a change costs -----------------------------------------------------------------------------------------------
SIZES = (1200, 6000)


def filled(size, rule, path=None):
    """A store of which a tenth was attempted. It has drawn before."""
    store = ArtifactStore("q", path=path, sampling=rule)
    with store.transaction():
        for number in range(size):
            store.add(number)
        for number in range(0, size, 10):
            store.record(f"q-{number}", number % 7 / 7, score=number % 64 / 64)
    for of in (store, store.split("train")):
        of.sample(5)
    return store


def record_and_draw(store):
    store.record("q-4", 1.0)
    store.sample_one()


def draw_several(store):
    store.set_weight("q-5", 0.5)
    store.sample(8)


def draw_of_a_side(store):
    store.record("q-6", 0.0, score=2.0)
    store.split("train").sample_one()


def add_and_remove(store):
    store.remove(store.add("new").id)
    store.sample_one()


def freeze(store):
    view = store.frozen()
    view.sample(3)
    with view.transaction():
        view.add("mine")
        view.sample_one()


@pytest.mark.parametrize("rule", ["uniform", "weighted", "prioritized", "learnability"])
@pytest.mark.parametrize("act", [record_and_draw, draw_several, draw_of_a_side, add_and_remove, freeze])
def test_a_change_costs_no_look_at_the_whole_store(act, rule):
    small, large = (filled(size, rule) for size in SIZES)
    counts = [count_operations(lambda store=store: act(store)) for store in (small, large)]
    assert counts[1] < 1.6 * counts[0], f"{SIZES} artifacts: {counts} operations"


def test_nor_does_it_in_a_file_that_another_process_changes(tmp_path):
    counts = []
    for size in SIZES:
        path = tmp_path / f"{size}.db"
        filled(size, "learnability", path).close()
        reader, writer = (ArtifactStore("q", path=path, sampling="learnability") for _ in range(2))
        reader.sample(2)
        writer.record("q-4", 1.0)
        counts.append(count_operations(lambda store=reader: store.sample(2)))
        counts.append(count_operations(lambda store=writer: store.record("q-4", 1.0)))
        assert reader.outcome("q-4").attempts == 2
    assert counts[2] < 1.6 * counts[0] and counts[3] < 1.6 * counts[1], counts


# -- the trees below ---------------------------------------------------------------------------------------------------
def test_a_tree_of_slots_is_a_dict_of_which_forks_are_copies(rng):
    versions = [(SlotTree(), {})]
    for step in range(300):
        tree, values = rng.choice(versions)
        if rng.random() < 0.2:
            versions.append((tree.fork(), dict(values)))
        for _ in range(rng.randrange(4)):
            slot = int(10 ** rng.uniform(0, 1 + step / 60))  # the trees grow
            if rng.random() < 0.6:
                values[slot] = rng.choice([0.0, rng.random()])
                tree.put(slot, str(slot), values[slot])
            else:  # most of these slots are empty, and some lie above all of the tree
                values.pop(slot, None)
                tree.drop(slot)
    for tree, values in versions:
        slots = sorted(values)
        assert list(tree) == [(slot, str(slot)) for slot in slots] and len(tree) == len(slots)
        assert tree.total == pytest.approx(sum(values.values())) and tree.get(3**12) is None
        assert [tree.find(place)[0] for place in range(len(slots))] == slots
        built = SlotTree.built((slot, str(slot), values[slot]) for slot in slots)
        assert list(built) == list(tree) and [built.value(slot) for slot in slots] == [values[slot] for slot in slots]
        for other, others in rng.sample(versions, min(5, len(versions))):
            changed = [slot for slot in sorted(values.keys() | others) if (slot in values) != (slot in others)]
            found = [(slot, before, after) for slot, before, after in changes(tree, other) if before != after]
            assert found == [(s, str(s) if s in values else None, str(s) if s in others else None) for s in changed]


def test_keys_stay_in_order_and_groups_of_equal_scores_are_known(rng, monkeypatch):
    monkeypatch.setattr(parts, "_CHUNK", 4)
    scores, held = Scores(), {}
    for _ in range(400):
        before, there = scores.fork(), dict(held)
        slot = rng.randrange(60)
        if slot in held:
            scores.remove(slot, held.pop(slot))
        if rng.random() < 0.7:
            held[slot] = rng.choice([math.inf, 0.0, 1.0, 0.25, rng.random()])
            scores.add(slot, held[slot])
        for kept, values in ((scores, held), (before, there)):
            keys = sorted((-score, slot) for slot, score in values.items())
            assert [kept.keys[place] for place in range(len(kept.keys))] == keys
            assert [kept.keys.place(key) for key in keys] == list(range(len(keys)))
            groups = [key for key, _ in keys]
            ties = [(groups.index(s), groups.index(s) + n) for s, n in sorted(Counter(groups).items()) if n > 1]
            assert list(kept.ties()) == ties
            assert kept.best() == max((score for score in values.values() if score < math.inf), default=None)
    assert list(Scores(held.items()).ties()) == list(scores.ties())
    assert len(SortedKeys()) == 0
