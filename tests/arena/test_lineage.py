"""Which artifact was made from which, also where some are gone."""

from __future__ import annotations

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.context import EpisodeContext, Luck, inside
from turnwise.types import EpisodeState, Rollout


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


def test_lineage_survives_saving_and_files(tmp_path):
    expected = [family().ancestors(id) for id in "abxcde"]
    memory = ArtifactStore("q")
    memory.load_state_dict(family().state_dict())
    family(path=tmp_path / "q.db").close()
    file = ArtifactStore("q", path=tmp_path / "q.db")
    for store in (memory, file, file.frozen()):
        assert [store.ancestors(id) for id in "abxcde"] == expected


def test_inside_an_episode_the_source_is_its_rollout():
    store = ArtifactStore("q")
    with inside(EpisodeContext(Rollout("e7.1", "propose", None), EpisodeState(), Luck(0))):
        assert store.add("x").source == "e7.1" and store.add("y", source="mine").source == "mine"
    assert store.add("z").source is None


@pytest.mark.parametrize("parents", ["q-1", [1], [None]])
def test_parents_are_ids(parents):
    with pytest.raises(TypeError, match=r"parents=.*: expected ids of artifacts"):
        ArtifactStore("q").add("x", parents=parents)
