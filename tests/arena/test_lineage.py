"""Which artifact was made from which, also where some are gone."""

from __future__ import annotations

import json

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.runtime.context import EpisodeContext, use_context
from turnwise.arena.runtime.rng import LazyRandom
from turnwise.types import EpisodeState, Rollout


def in_json(state):
    return json.loads(json.dumps(state))


def family(**options):
    """a -> b -> d, a -> c -> d -> e; x alone."""
    store = ArtifactStore("q", **options)
    for id, parents in (("a", ()), ("b", ["a"]), ("x", ()), ("c", ["a"]), ("d", ("b", "c")), ("e", ["d", "x"])):
        store.add(f"data {id}", id=id, parents=parents)
    return store


def test_ancestors_and_descendants():
    store = family()
    assert store.get("d").parents == ("b", "c")
    assert store.ancestors("e") == ["d", "x", "b", "c", "a"] and store.ancestors("a") == []
    assert store.descendants("a") == ["b", "c", "d", "e"] and store.descendants("e") == []
    with pytest.raises(KeyError, match="no artifact 'nobody'"):
        store.ancestors("nobody")
    assert store.descendants("nobody") == []


def test_what_is_gone_is_named_but_its_past_is_forgotten():
    store = family()
    store.remove("b")
    store.remove("c")
    assert store.ancestors("e") == ["d", "x", "b", "c"]
    assert store.descendants("a") == [] and store.descendants("b") == ["d", "e"]


def test_circles_end():
    store = ArtifactStore("q")
    store.add(1, id="a", parents=["b"])
    store.add(2, id="b", parents=["a"])
    assert store.ancestors("a") == ["b"] == store.descendants("a")


def test_inside_an_episode_the_source_is_its_rollout():
    store = ArtifactStore("q")
    with use_context(EpisodeContext(Rollout("e7.1", "propose", None), EpisodeState(), LazyRandom(0))):
        assert store.add("x").source == "e7.1" and store.add("y", source="mine").source == "mine"
    assert store.add("z").source is None


# -- whose rollout made it ---------------------------------------------------------------------------------------------
def made_by(store, rollout_id, data):
    with use_context(EpisodeContext(Rollout(rollout_id, "author", None), EpisodeState(), LazyRandom(0))):
        return store.add(data)


@pytest.mark.parametrize("shared", [False, True])
def test_two_runs_on_one_file_number_their_rollouts_alike_and_are_told_apart(tmp_path, shared):
    first = ArtifactStore("q", path=tmp_path / "q.db", shared=shared)
    first.set_run_name("solve")
    one = made_by(first, "e0.0", "a")
    state = in_json(first.state_dict())
    if not shared:
        first.close()
    second = ArtifactStore("q", path=tmp_path / "q.db", shared=shared)
    second.set_run_name("solve")
    two = made_by(second, "e0.0", "b")
    assert one.source == two.source == "e0.0" and one.run != two.run == second.run == second.frozen().run
    assert one.run.startswith("solve@") and two.run.startswith("solve@")
    assert [(a.data, a.run) for a in second] == [("a", one.run), ("b", two.run)]
    second.close()
    first.close()
    resumed = ArtifactStore("q", path=tmp_path / "q.db", shared=True)
    resumed.set_run_name("solve")
    with pytest.warns(UserWarning, match="changes by other runs"):
        resumed.load_state_dict(state)
    assert made_by(resumed, "e1", "c").run == one.run, "a resumed run is the same one"
    assert [a.run for a in ArtifactStore("q", path=tmp_path / "q.db")] == [one.run, two.run, one.run]
    memory = ArtifactStore("q")
    memory.set_run_name("solve")
    assert memory.run is None and memory.add("x").run is None


@pytest.mark.parametrize("parents", ["q-1", [1], [None]])
def test_parents_are_ids(parents):
    with pytest.raises(TypeError, match=r"parents=.*: expected ids of artifacts"):
        ArtifactStore("q").add("x", parents=parents)
