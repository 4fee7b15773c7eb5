"""How stores draw: what each rule weighs, against values worked by hand, and what draws follow from weights."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.stores.sampling import (
    RULES,
    AttemptStats,
    Learnability,
    PrioritizedLevelReplay,
    UniformSampling,
    Weighted,
    WeightedPool,
    find_rule,
)
from turnwise.types import Artifact


def artifacts(count):
    return [Artifact(f"q-{number}", number, weight=float(number)) for number in range(count)]


def weights_of(rule, outcomes, plays=0):
    return rule.weights(artifacts(len(outcomes)), outcomes, plays)


def test_means_over_all_attempts_and_over_a_window():
    outcome = AttemptStats()
    for plays, reward in enumerate([1.0, 0.0, 0.0, 1.0], start=5):
        outcome = outcome.after(reward, reward, None, plays=plays)
    assert outcome == AttemptStats(4, 0.5, 0.5, score=pytest.approx(1 - 1 / 3), last=8)
    recent = AttemptStats()
    for reward in [0.0] * 50 + [1.0, 1.0]:
        recent = recent.after(reward, reward, 0.25, plays=1, window=2)
    assert recent.reward == recent.success == 0.75 and recent.score == 0.25


def test_uniform_and_weighted():
    assert weights_of(UniformSampling(), [AttemptStats()] * 3) is None
    assert weights_of(Weighted(), [AttemptStats()] * 3) == [0.0, 1.0, 2.0]


def test_prioritized_by_rank_and_staleness():
    """Scores .2 .8 .5 have ranks 3 1 2; with temperature 1/2 the weights are 1/9 1 1/4, of 49/36. Ages are 4 1 5."""
    outcomes = [AttemptStats(1, score=score, last=last) for score, last in ((0.2, 6), (0.8, 9), (0.5, 5))]
    by_rank = [4 / 49, 36 / 49, 9 / 49]
    assert weights_of(PrioritizedLevelReplay(0.5, staleness=0.0), outcomes, 10) == pytest.approx(by_rank)
    assert weights_of(PrioritizedLevelReplay(0.5, staleness=1.0), outcomes, 10) == pytest.approx([0.4, 0.1, 0.5])
    mixed = [0.75 * s + 0.25 * c for s, c in zip(by_rank, [0.4, 0.1, 0.5], strict=True)]
    assert weights_of(PrioritizedLevelReplay(0.5, staleness=0.25), outcomes, 10) == pytest.approx(mixed)


def test_prioritized_by_score():
    outcomes = [AttemptStats(1, score=score) for score in (0.1, 0.4, 0.0)]
    assert weights_of(PrioritizedLevelReplay(1.0, 0.0, rank=False), outcomes) == pytest.approx([0.2, 0.8, 0.0])
    assert weights_of(PrioritizedLevelReplay(0.5, 0.0, rank=False), outcomes) == pytest.approx([1 / 17, 16 / 17, 0.0])
    assert weights_of(PrioritizedLevelReplay(0.5, 0.0, rank=False), [AttemptStats(1, score=0.0)] * 2) == [0.5, 0.5]
    assert weights_of(PrioritizedLevelReplay(0.01, 0.0, rank=False), outcomes)[1] == pytest.approx(1.0), (
        "no overflow, no 0/0"
    )


def test_prioritized_puts_first_what_was_never_attempted():
    outcomes = [AttemptStats(), AttemptStats(2, score=0.9), AttemptStats(), AttemptStats(2, score=0.3)]
    rule = PrioritizedLevelReplay(1.0, staleness=0.0)
    shares = weights_of(rule, outcomes)
    assert shares == pytest.approx([4 / 13, 4 / 13, 4 / 13, 1 / 13]), "ranks 1 1 1 4"
    assert weights_of(rule, [AttemptStats()] * 4) == [0.25] * 4


def test_learnability():
    """p(1-p) of 0, 1/2, 3/4, 1 and never: 0, 4, 3, 0 and 4 sixteenths, of 11."""
    outcomes = [AttemptStats(4, success=p) for p in (0.0, 0.5, 0.75, 1.0)] + [AttemptStats()]
    shares = [0.0, 4 / 11, 3 / 11, 0.0, 4 / 11]
    assert weights_of(Learnability(uniform=0.0), outcomes) == pytest.approx(shares)
    assert weights_of(Learnability(uniform=0.5), outcomes) == pytest.approx([s / 2 + 0.1 for s in shares])
    assert weights_of(Learnability(uniform=0.0), [AttemptStats(1, success=1.0)] * 2) == [0.5, 0.5], "never empty-handed"


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("name", sorted(RULES))
def test_draws_follow_the_weights(name, replacement):
    pool = WeightedPool(
        artifacts(4), [AttemptStats(4, success=p, score=p) for p in (0.5, 0.25, 1.0, 0.0)], 9, RULES[name]()
    )
    rng = random.Random(1)
    drawn = Counter(item.data for _ in range(8000) for item in pool.draw(1, replacement, rng))
    weights = dict(zip((a.data for a in pool.artifacts), pool.weights or [1.0] * 4, strict=True))
    for data, weight in weights.items():
        assert drawn[data] / 8000 == pytest.approx(weight / sum(weights.values()), abs=0.02)


def test_draws_without_replacement_follow_the_weights_in_turn():
    """The second of two, given the first: P(b after a) = w_b / (1 - w_a). Weights 1 2 3, so P(2 then 1) = 1/2 * 2/3."""
    pool = WeightedPool(artifacts(4), [AttemptStats()] * 4, 0, Weighted())
    rng = random.Random(2)
    pairs = Counter(tuple(a.data for a in pool.draw(2, False, rng)) for _ in range(12000))
    assert set(pairs) == {(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)}
    for (first, second), count in pairs.items():
        expected = first / 6 * second / (6 - first)
        assert count / 12000 == pytest.approx(expected, abs=0.02)


def test_weights_of_very_different_sizes_draw_no_order_of_arrival():
    class Steep:
        def weights(self, artifacts, outcomes, plays):
            return [1e-300, 2e-300, 1.0, 1e-300]

    pool = WeightedPool(artifacts(4), [AttemptStats()] * 4, 0, Steep())
    rng = random.Random(3)
    seconds = Counter(pool.draw(2, False, rng)[1].data for _ in range(2000))
    shares = {data: count / 2000 for data, count in seconds.items()}
    assert shares == {
        0: pytest.approx(0.25, abs=0.05),
        1: pytest.approx(0.5, abs=0.05),
        3: pytest.approx(0.25, abs=0.05),
    }


def test_a_store_draws_by_what_was_recorded():
    store = ArtifactStore("q", sampling=Learnability(uniform=0.0), seed=2)
    for number in range(3):
        store.add(number)
    for id, wins in (("q-0", [1, 1, 1, 1]), ("q-1", [1, 0, 1, 0]), ("q-2", [0, 0, 0, 0])):
        for win in wins:
            store.record(id, success=win)
    assert store.outcome("q-1") == AttemptStats(4, 0.5, 0.5, score=pytest.approx(2 / 3), last=8)
    assert {item.data for item in store.sample(60, replacement=True)} == {1}
    with pytest.raises(ValueError, match="k=2: the store 'q' has 1 artifacts to draw from"):
        store.sample(2)
    store.record("q-0", success=0)
    assert {item.data for item in store.sample(60, replacement=True)} == {0, 1}, "weighed anew after a change"


def test_what_is_recorded():
    store = ArtifactStore("q", window=2)
    store.add("x")
    assert store.record("q-0", -0.5) == AttemptStats(1, -0.5, 0.0, 0.5, 1)
    assert store.record("q-0", 0.5, success=0.25, score=2.0) == AttemptStats(2, 0.0, 0.125, 2.0, 2)
    assert store.record("q-0", success=True).reward == 0.5, "the mean of 0 and the success"
    assert store.add("y") and store.outcome("q-1") == AttemptStats(last=3), "no older than its arrival"
    for wrong in ({}, {"reward": math.nan}, {"reward": 1, "success": 2}, {"reward": 1, "score": -1}):
        with pytest.raises(ValueError, match="expected"):
            store.record("q-0", **wrong)
    with pytest.raises(KeyError, match="no artifact 'q-9'"):
        store.record("q-9", 1.0)


def test_outcomes_survive_saving_and_a_frozen_view_keeps_its_own():
    a = ArtifactStore("q", sampling="prioritized", seed=4)
    for number in range(6):
        a.add(number, parents=[f"q-{number - 1}"] if number else ())
        a.record(f"q-{number}", reward=number / 6)
    b = ArtifactStore("q", sampling="prioritized", seed=9)
    b.load_state_dict(a.state_dict())
    assert [b.outcome(item.id) for item in b] == [a.outcome(item.id) for item in a]
    assert [item.id for item in b.sample(4)] == [item.id for item in a.sample(4)]
    assert b.ancestors("q-2") == ["q-1", "q-0"] and b.record("q-0", 1.0).last == 7
    view = a.frozen()
    assert view.record("q-0", 1.0) == b.outcome("q-0") and view.outcome("q-0") == a.outcome("q-0")
    assert [item.id for item in view.sample(6)] == [item.id for item in a.frozen().sample(6)], "paired"


def test_rules_by_name_by_object_and_wrong_ones():
    assert find_rule("weighted") == Weighted() and find_rule(rule := PrioritizedLevelReplay(0.3)) is rule
    with pytest.raises(ValueError, match=r"sampling='random': expected one of \['learnability', 'prioritized'"):
        ArtifactStore("q", sampling="random")
    for wrong in (PrioritizedLevelReplay, 3, None):
        with pytest.raises(TypeError, match=r"expected one of .* or an object with weights"):
            find_rule(wrong)
    for rule, options in (
        (PrioritizedLevelReplay, {"temperature": 0}),
        (PrioritizedLevelReplay, {"staleness": 2}),
        (Learnability, {"uniform": -1}),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            rule(**options)
    with pytest.raises(ValueError, match="window=0: expected at least 1"):
        ArtifactStore("q", window=0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_a_rule_of_ones_own_is_checked(weights):
    class Mine:
        def weights(self, artifacts, outcomes, plays):
            return weights

    store = ArtifactStore("q", sampling=Mine())
    store.add("x")
    store.add("y")
    with pytest.raises(ValueError, match=r"Mine.weights gave .*: expected 2 finite numbers >= 0, or None"):
        store.sample()
