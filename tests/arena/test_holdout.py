"""Held-out sides: nothing crosses, whatever is added, removed, added again or loaded."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import numpy as np
import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.runtime.hashing import content_digest
from turnwise.arena.stores.holdout import HashSplit


@dataclass
class Puzzle:
    rows: tuple[int, ...]
    name: str = "p"


def sides(store, **options):
    return {side: [item.data for item in store.split(side, **options)] for side in ("train", "eval")}


def test_each_artifact_is_on_one_side_and_the_share_is_about_right():
    store = ArtifactStore("q")
    for number in range(4000):
        store.add({"question": f"{number} + 1 = ?"})
    found = sides(store, share=0.2)
    assert len(found["train"]) + len(found["eval"]) == 4000
    assert len(found["eval"]) / 4000 == pytest.approx(0.2, abs=0.02)
    train, held_out = store.split("train", share=0.2), store.split("eval", share=0.2)
    assert len(held_out) == held_out.count() == len(found["eval"])
    assert all(item.id in held_out and item.id not in train for item in held_out.sample(50))
    assert {item.id for item in train.sample(len(train))} == {item.id for item in train}
    assert train.sample_one().id in train and "nobody" not in train


@pytest.mark.parametrize("kept", ["memory", "file"])
def test_nothing_leaks_after_adds_removals_and_reloads(tmp_path, kept):
    """Once held out, never trained on: the same contents come and go 800 times, through JSON and through files."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng, ever = random.Random(seed), {"train": set(), "eval": set()}
    options = {"max_size": 60} | ({"path": tmp_path / "q.db"} if kept == "file" else {})
    store = ArtifactStore("q", **options)
    for number in range(800):
        contents = (n := rng.randint(0, 150), f"{n} + 1 = ?", {"n": float(n)})
        store.add({"question": rng.choice([contents, list(contents)]), 1: True} if kept == "file" else list(contents))
        if rng.random() < 0.3:
            store.remove(rng.choice([item.id for item in store]))
        if number % 80 == 79:
            state = store.state_dict()
            store.close()
            store = ArtifactStore("q", **options)
            store.load_state_dict(json.loads(json.dumps(state)))
        if number % 20 == 0:
            for side in ever:
                ever[side] |= {content_digest(item.data) for item in store.split(side, share=0.3)}
                drawn = store.split(side, share=0.3)
                if len(drawn):
                    ever[side] |= {content_digest(item.data) for item in drawn.sample(5, replacement=True)}
    assert ever["train"] and ever["eval"] and ever["train"].isdisjoint(ever["eval"])


def test_a_key_says_what_of_the_data_counts():
    def question(data):
        return data["question"].casefold()

    store = ArtifactStore("q")
    for number in range(300):
        store.add({"question": f"What is {number}?", "seen": number})
        store.add({"question": f"WHAT IS {number}?", "seen": -number})
    found = {side: {question(data) for data in items} for side, items in sides(store, key=question).items()}
    assert found["train"].isdisjoint(found["eval"]) and found["eval"]


def test_an_id_that_is_given_again_is_judged_anew():
    store, rule = ArtifactStore("q"), HashSplit()
    texts = (f"text {number}" for number in range(1000))
    trains = next(text for text in texts if rule.side_of(text) == "train")
    evals = next(text for text in texts if rule.side_of(text) == "eval")
    side = store.split("eval")
    store.add(trains, id="one")
    assert len(side) == 0
    store.remove("one")
    store.add(evals, id="one")
    assert [item.data for item in side] == [evals] and side.sample_one().data == evals


def test_another_division_of_the_same_store_is_refused():
    store = ArtifactStore("q")
    store.split("eval", share=0.2)
    store.split("train", share=0.2)
    with pytest.raises(ValueError, match=r"share=0.1, key=None: the store 'q' was split by share=0.2"):
        store.split("train")
    again = ArtifactStore("q")
    again.load_state_dict(json.loads(json.dumps(store.state_dict())))
    with pytest.raises(ValueError, match=r"share=0.3.* was split by share=0.2"):
        again.split("train", share=0.3)
    again.split("train", share=0.2, key=str)
    with pytest.raises(ValueError, match="key="):
        again.split("eval", share=0.2)
    with pytest.raises(ValueError, match=r"share=0.5"):
        store.frozen().split("eval", share=0.5)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="side='test': expected one of"):
        ArtifactStore("q").split("test")
    for share in (0, 1, -0.5):
        with pytest.raises(ValueError, match="share="):
            ArtifactStore("q").split("eval", share=share)
    with pytest.raises(TypeError, match="key='question'"):
        ArtifactStore("q").split("eval", key="question")
    with pytest.raises(TypeError, match="data of type 'object' can't be put on a side: give split"):
        HashSplit().side_of(object())


def test_draws_of_a_side_follow_the_rule_and_come_from_the_stores_generator():
    a, b = (ArtifactStore("q", sampling="weighted", seed=5) for _ in range(2))
    for store in (a, b):
        for number in range(60):
            store.add(number, weight=float(number % 3))
    train = a.split("train")
    assert {item.data % 3 for item in train.sample(200, replacement=True)} == {1, 2}
    b.split("train").sample(200, replacement=True)
    assert [item.id for item in a.sample(9)] == [item.id for item in b.sample(9)]
    a.set_weight(train.sample_one().id, 0.0)
    assert len(train._pool().artifacts) == len(b.split("train")._pool().artifacts) - 1
    with pytest.raises(ValueError, match="k=99: the store 'q' has"):
        train.sample(99)
    assert ArtifactStore("q").split("eval").sample_one() is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: "x"}, {"1": "x"}),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        ({3, 1, 2}, {2, 3, 1}),
        (Puzzle((1,)), {"rows": [1], "name": "p"}),
    ],
    ids=repr,
)
def test_contents_that_a_reload_can_not_tell_apart_are_one(one, other):
    assert content_digest(one) == content_digest(other)


def test_other_contents_differ():
    values = [None, "", "None", b"", 0, 1, 0.5, "1", [], [[]], [1, [2]], [[1], 2], {}, {"a": None}, ["a", None], "ab"]
    values += [["a", "b"], ["ab"], {"a": "b"}, [["a", "b"]], float("nan"), float("inf"), 10**30, 1e30 * 1.1]
    assert len({content_digest(value) for value in values}) == len(values)


def test_sides_are_the_same_in_every_process():
    """Each process has other hashes of strings, and so another order of a set."""
    data = {"a": set("abcdefghijkl"), "b": [1, "ü"]}
    assert content_digest(data).hex() == "02b19daf303d18f28e83c96994582574"
