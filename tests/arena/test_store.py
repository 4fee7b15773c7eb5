"""Artifact stores: ids, limits, sampling, saving, the view that evaluation gets, and what was made from what."""

from __future__ import annotations

import json
import random

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.runtime.context import EpisodeContext, use_context
from turnwise.arena.runtime.hashing import LazyRandom
from turnwise.types import Artifact, EpisodeState, Rollout


def filled(count=5, **options):
    store = ArtifactStore("q", **options)
    for number in range(count):
        store.add({"n": number}, weight=float(number))
    return store


def numbers(artifacts):
    return [artifact.data["n"] for artifact in artifacts]


def random_uses(store, seed, actions=120):
    """Random additions, removals, weights, outcomes and draws; what was drawn, and what was refused."""
    rng, seen = random.Random(seed), []
    for number in range(actions):
        known = [artifact.id for artifact in store]
        action = rng.choice(["add", "add", "add", "remove", "weight", "record", "record", "draw"])
        if action == "add" or not known:
            parents = rng.sample(known, min(len(known), rng.randint(0, 2)))
            added = store.add({"n": rng.randint(0, 30)}, weight=rng.random(), parents=parents, meta={"at": number})
            seen.append(added and (added.id, added.source, added.parents, added.id in store, store.ancestors(added.id)))
        elif action == "remove":
            store.remove(known[0] if rng.random() < 0.3 else rng.choice(known))
        elif action == "weight":
            store.set_weight(rng.choice(known), rng.random() + 0.1)
        elif action == "record":
            seen.append(store.record(rng.choice(known), rng.random(), score=rng.random()))
        else:
            seen.append([a.id for a in store.sample(min(3, len(known)))])
    return seen


def test_add_makes_unique_ids_keeps_the_source_and_refuses_a_duplicate_id():
    store = ArtifactStore("q")
    first, taken = store.add("x", source="r-1"), store.add("y", id="q-2")
    third, fourth = store.add("z"), store.add("w")
    assert (first.id, first.source, taken.id) == ("q-0", "r-1", "q-2")
    assert len({item.id for item in store}) == 4 == store.count() == len(store)
    assert store.get(fourth.id) is fourth and third.id != "q-2"
    for again in (lambda: store.add("y", id="q-2"), lambda: store.add(Artifact("q-2", "y"))):
        with pytest.raises(ValueError, match="id='q-2': the store 'q' already has"):
            again()
    assert [item.data for item in store] == ["x", "y", "z", "w"]


def test_dedup_refuses_equal_data_until_it_is_gone():
    store = ArtifactStore("q", dedup=True)
    one = store.add({"a": [1, 2]})
    assert store.add({"a": [1, 2]}) is None and store.count() == 1
    assert store.add({"a": [1, 2.0]}) is not None
    store.remove(one.id)
    assert store.add({"a": [1, 2]}) is not None


def test_dedup_of_a_store_that_was_saved_with_duplicates():
    store = ArtifactStore("q")
    for _ in range(3):
        store.add("x")
    strict = ArtifactStore("q", dedup=True)
    strict.load_state_dict(store.state_dict())
    for id in ("q-1", "q-0", "q-2"):
        assert strict.add("x") is None or id == "q-2"
        strict.remove(id)
    assert [item.id for item in strict] == ["q-3"]


def test_max_size_drops_the_oldest():
    store = filled(10, max_size=3)
    assert numbers(store) == [7, 8, 9]
    with pytest.raises(KeyError, match="no artifact 'q-0'"):
        store.get("q-0")


def test_samples_differ_from_one_another_unless_replaced():
    store = filled(6)
    assert sorted(numbers(store.sample(6))) == [0, 1, 2, 3, 4, 5]
    assert len(store.sample(50, replacement=True)) == 50
    with pytest.raises(ValueError, match="k=7: the store 'q' has 6 artifacts"):
        store.sample(7)
    assert ArtifactStore("empty").sample_one() is None
    assert ArtifactStore("empty").sample(0) == []


def test_sampling_has_its_own_seed_and_survives_saving():
    a, b = filled(20, seed=4), filled(20, seed=4)
    assert numbers(a.sample(9)) == numbers(b.sample(9))
    assert numbers(filled(20, seed=5).sample(9)) != numbers(filled(20, seed=4).sample(9))
    c = ArtifactStore("q", dedup=True)
    c.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert numbers(a.sample(9)) == numbers(c.sample(9))
    assert a.add("new").id == c.add("new").id
    assert c.add({"n": 3}) is None, "dedup knows what was loaded"


def test_inside_an_episode_samples_come_from_that_episodes_generator():
    def draw(seed, store):
        context = EpisodeContext(Rollout("r", "e", None), EpisodeState(), LazyRandom(seed))
        with use_context(context):
            return numbers(store.sample(5))

    store, untouched = filled(20), filled(20)
    assert draw(1, store) == draw(1, store) != draw(2, store)
    assert numbers(store.sample(5)) == numbers(untouched.sample(5))


def test_a_frozen_view_reads_and_writes_nothing():
    store, untouched = filled(4), filled(4)
    view = store.frozen()
    assert view.add("new").id == "q-4" == store.frozen().add("newer").id
    view.remove("q-1")
    view.set_weight("q-1", 9.0)
    view.get("q-2").meta["mark"] = True
    assert numbers(view) == numbers(store) == [0, 1, 2, 3]
    assert store.get("q-1").weight == 1.0 and store.get("q-2").meta == {}
    view.sample(3)
    assert numbers(store.sample(3)) == numbers(untouched.sample(3))
    assert numbers(store.frozen().sample(3)) == numbers(store.frozen().sample(3)), "paired"
    with view.transaction():
        assert view.add({"n": 9}).id in view and view.count() == 5
    assert view.count() == 4


def episode(root=0, seed=1):
    return EpisodeContext(Rollout(f"e{root}", "e", None), EpisodeState(), LazyRandom(seed), root=root)


@pytest.mark.parametrize("sampling", ["uniform", "weighted", "prioritized", "learnability"])
@pytest.mark.parametrize("seed", range(5))
def test_an_episode_can_not_tell_a_frozen_view_from_a_store(sampling, seed):
    options = {"max_size": 12, "dedup": True, "sampling": sampling, "window": 3}
    store, twin = ArtifactStore("q", **options), ArtifactStore("q", **options)
    for each in (store, twin):
        random_uses(each, seed, actions=40)
    before, view, other = json.dumps(store.state_dict()), store.frozen(), store.frozen()
    answers = []
    for each in (view, twin):
        with use_context(episode()):
            said = random_uses(each, seed + 9)
            said += [[*each], [each.outcome(artifact.id) for artifact in each]]
            said += [artifact.id for artifact in each.split("train", share=0.5).sample(2)]
            for wrong in (
                lambda q: q.add("new", id=next(iter(q)).id),
                lambda q: q.add("new", weight=-1.0),
                lambda q: q.add("new", parents="q-1"),
                lambda q: q.remove("nobody"),
                lambda q: q.set_weight("nobody", 1.0),
                lambda q: q.set_weight(next(iter(q)).id, -1.0),
                lambda q: q.record("nobody", 1.0),
                lambda q: q.record(next(iter(q)).id),
            ):
                with pytest.raises((ValueError, KeyError, TypeError)) as caught:
                    wrong(each)
                said.append(str(caught.value))
        answers.append(said)
    assert answers[0] == answers[1]
    with use_context(episode(root=1)):
        assert [*view] == [*other], "another episode's writes are its own"
    assert json.dumps(store.state_dict()) == before


def test_episodes_of_a_frozen_view_draw_from_their_own_and_may_give_an_id_again():
    view, drawn = filled(3, sampling="weighted").frozen(), []
    for root in range(2):
        with use_context(episode(root)):
            for number in range(3):
                view.remove(f"q-{number}")
            view.add({"n": 7 + root}, id="q-0")
            drawn += [numbers(view), numbers(view.sample(1)), numbers(view.split("train", share=0.001).sample(1))]
            assert len(view) == 1
    assert drawn == [[7]] * 3 + [[8]] * 3


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_bad_weights_and_sizes(weight):
    with pytest.raises(ValueError, match="weight="):
        ArtifactStore("q").add("x", weight=weight)
    with pytest.raises(ValueError, match="max_size=0"):
        ArtifactStore("q", max_size=0)


# -- which artifact was made from which, and by whose rollout ----------------------------------------------------------
def test_ancestors_and_descendants_also_where_some_are_gone():
    """a -> b -> d, a -> c -> d -> e, x -> e; y and z are made from each other."""
    store = ArtifactStore("q")
    family = {"a": "", "b": "a", "x": "", "c": "a", "d": "bc", "e": "dx", "y": "z", "z": "y"}
    for id, parents in family.items():
        store.add(f"data {id}", id=id, parents=list(parents))
    assert store.get("d").parents == ("b", "c")
    assert store.ancestors("e") == ["d", "x", "b", "c", "a"] and store.ancestors("a") == []
    assert store.descendants("a") == ["b", "c", "d", "e"] and store.descendants("e") == []
    assert store.ancestors("y") == ["z"] == store.descendants("y")
    with pytest.raises(KeyError, match="no artifact 'nobody'"):
        store.ancestors("nobody")
    assert store.descendants("nobody") == []
    for gone in "bc":
        store.remove(gone)
    assert store.ancestors("e") == ["d", "x", "b", "c"], "what is gone is named, but its past is forgotten"
    assert store.descendants("a") == [] and store.descendants("b") == ["d", "e"]


def made_by(store, rollout_id, data, **options):
    with use_context(EpisodeContext(Rollout(rollout_id, "author", None), EpisodeState(), LazyRandom(0))):
        return store.add(data, **options)


def test_inside_an_episode_the_source_is_its_rollout():
    store = ArtifactStore("q")
    assert made_by(store, "e7.1", "x").source == "e7.1" and made_by(store, "e7.1", "y", source="mine").source == "mine"
    assert store.add("z").source is None
    for parents in ("q-1", [1], [None]):
        with pytest.raises(TypeError, match=r"parents=.*: expected ids of artifacts"):
            store.add("w", parents=parents)


@pytest.mark.parametrize("shared", [False, True])
def test_two_runs_on_one_file_number_their_rollouts_alike_and_are_told_apart(tmp_path, shared):
    def opened(shared=shared):
        store = ArtifactStore("q", path=tmp_path / "q.db", shared=shared)
        store.set_run_name("solve")
        return store

    first = opened()
    one = made_by(first, "e0.0", "a")
    state = json.loads(json.dumps(first.state_dict()))
    if not shared:
        first.close()
    second = opened()
    two = made_by(second, "e0.0", "b")
    assert one.source == two.source == "e0.0" and one.run != two.run == second.run == second.frozen().run
    assert one.run.startswith("solve@") and two.run.startswith("solve@")
    assert [(a.data, a.run) for a in second] == [("a", one.run), ("b", two.run)]
    second.close()
    first.close()
    resumed = opened(shared=True)
    with pytest.warns(UserWarning, match="changes by other runs"):
        resumed.load_state_dict(state)
    assert made_by(resumed, "e1", "c").run == one.run, "a resumed run is the same one"
    assert [a.run for a in ArtifactStore("q", path=tmp_path / "q.db")] == [one.run, two.run, one.run]
    memory = ArtifactStore("q")
    memory.set_run_name("solve")
    assert memory.run is None and memory.add("x").run is None
