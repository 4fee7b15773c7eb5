"""The curriculum of questions: weights, decay, levels and batches ahead, by numbers computed by hand."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest

from turnwise.arena import Arena, Filters
from turnwise.arena.stages import curriculum as curriculum_module
from turnwise.arena.stages.curriculum import Curriculum, CurriculumStage
from turnwise.arena.stores.indexes import IndexedPool
from turnwise.arena.stores.question_rates import SOLVED, UNSOLVED
from turnwise.credit import GRPOCredit
from turnwise.types import EpisodeRequest, GenerateResult, Rollout, RolloutFacts

from ..operations import count_operations
from .helpers import Guess

METRIC = "solved/solver"


def questions(names="abcd", levels=()):
    pool = [EpisodeRequest("guess", name, group_id=name, seed=7) for name in names]
    for request, level in zip(pool, levels, strict=False):
        request.meta["level"] = level
    return pool


def curriculum_of(names="abcd", levels=(), **settings):
    return Curriculum(questions(names, levels), metric=METRIC, **settings)


def judge(rollout):
    raise AssertionError("each rollout has the metric")


def played(curriculum, batch, successes, **rollout):
    """Results of batch ``batch``: ``played(curriculum, 0, {"a": [1, 0]})`` attempts question ``a`` twice."""
    ids = {request.artifact: id for id, request in curriculum.questions.items()}
    results = []
    for name, values in successes.items():
        for value in values:
            facts = RolloutFacts(curriculum={"question": ids[name], "batch": batch})
            metrics = {} if value is None else {METRIC: value}
            results.append(GenerateResult(Rollout("r", "guess", name, metrics=metrics, facts=facts, **rollout)))
            results[-1].group_id = name
    return results


def record(curriculum, batch, successes):
    return curriculum.record(played(curriculum, batch, successes), judge)


def weights(curriculum, batch):
    pool = curriculum.weighted(curriculum.rates_for(batch))
    return {artifact.data.artifact: weight for artifact, weight in zip(pool.artifacts, pool.weights, strict=True)}


def test_questions_are_weighed_by_learnability_with_a_floor():
    """a: p = 1/2, so p(1 - p) = 1/4; b and c: 0; d is new and counts as p = 1/2. Four fifths go by learnability, of
    which a and d get half each; one fifth is shared by all four."""
    curriculum = curriculum_of(uniform=0.2)
    assert weights(curriculum, 0) == pytest.approx(dict.fromkeys("abcd", 0.25))
    metrics = record(curriculum, 0, {"a": [1, 0], "b": [1, 1], "c": [0, 0]})
    assert weights(curriculum, 1) == pytest.approx({"a": 0.45, "b": 0.05, "c": 0.05, "d": 0.45})
    assert metrics == {"curriculum/seen": 3, "curriculum/always": 1, "curriculum/never": 1}
    # a: p = 1/4 after two more failures, 3/16; d: 1/4 and 3/16 as well, if it is solved once in four attempts
    record(curriculum, 1, {"a": [0, 0], "d": [1, 0, 0, 0]})
    assert weights(curriculum, 2) == pytest.approx({"a": 0.45, "b": 0.05, "c": 0.05, "d": 0.45})
    # c: p = 2/4, 4/16; a and d: 3/16 each
    record(curriculum, 2, {"c": [1, 1]})
    expected = {"a": 0.05 + 0.8 * 0.3, "b": 0.05, "c": 0.05 + 0.8 * 0.4, "d": 0.05 + 0.8 * 0.3}
    assert weights(curriculum, 3) == pytest.approx(expected)


def test_draws_follow_the_weights_and_are_different_questions():
    curriculum = curriculum_of(uniform=0.2)
    record(curriculum, 0, {"a": [1, 0], "b": [1, 1], "c": [0, 0], "d": [1, 0]})
    drawn = Counter(curriculum.draw(1, number, 1, 1)[0].artifact for number in range(4000))
    for name, share in {"a": 0.45, "b": 0.05, "c": 0.05, "d": 0.45}.items():
        assert drawn[name] / 4000 == pytest.approx(share, abs=0.03)
    requests = curriculum.draw(1, 9, 3, 2)
    assert len(requests) == 6 and len({request.artifact for request in requests}) == 3
    assert len({request.group_id for request in requests}) == 3 and len({request.seed for request in requests}) == 6
    note = next(request.facts.curriculum for request in requests if request.artifact == "a")
    assert note["batch"] == 1 and note["p"] == 0.5
    assert requests == curriculum.draw(1, 9, 3, 2), "equal draws are equal"
    repeated = curriculum.draw(1, 9, 6, 1)
    assert len({request.group_id for request in repeated}) == 6, "a pool of four gives six, in groups of their own"


def test_a_solve_rate_forgets():
    """With a window of 4: the mean of the first four attempts, then a quarter of the way to each new one. A level's
    window is 8 times as long."""
    curriculum = curriculum_of(window=4)
    rates = []
    for batch, success in enumerate([0, 1, 1, 0, 1]):
        record(curriculum, batch, {"a": [success]})
        rates.append(next(iter(curriculum.rates_for(batch + 1).questions.values())).success)
    assert rates == pytest.approx([0, 1 / 2, 2 / 3, 1 / 2, 1 / 2 + 1 / 8])
    assert curriculum.rates_for(5).levels[0].success == pytest.approx(3 / 5)
    record(curriculum, 5, {"a": [0] * 27, "b": [1]})  # 3 of 32 attempts, and then one thirty-second of the way to 1
    assert curriculum.rates_for(6).levels[0].success == pytest.approx(3 / 32 + (1 - 3 / 32) / 32)


def test_a_new_question_counts_as_its_level():
    """Level 1 is solved, level 2 half of the time: b is not worth a draw, d as much as c. Level 3 counts as 1/2."""
    curriculum = curriculum_of("abcde", levels=[1, 1, 2, 2, 3], uniform=0.1)
    record(curriculum, 0, {"a": [1, 1], "c": [1, 0]})
    expected = {"a": 0.02, "b": 0.02, "c": 0.32, "d": 0.32, "e": 0.32}  # 0.1 / 5, and 0.9 / 3 more
    assert weights(curriculum, 1) == pytest.approx(expected)
    record(curriculum, 1, {"c": [0, 0, 0, 0, 0, 0], "e": [0]})  # level 2: 1 of 8, 7/64; e is unsolved
    expected = {"a": 0.02, "b": 0.02, "c": 0.47, "d": 0.47, "e": 0.02}
    assert weights(curriculum, 2) == pytest.approx(expected)


def test_a_gate_admits_the_next_level_for_good():
    curriculum = curriculum_of(levels=[1, 1, 2, 5], gate=0.6)
    assert set(weights(curriculum, 0)) == {"a", "b"}
    metrics = record(curriculum, 0, {"a": [1, 1], "b": [0, 0]})  # 2 of 4
    assert set(weights(curriculum, 1)) == {"a", "b"} and metrics["curriculum/level"] == 1
    metrics = record(curriculum, 1, {"b": [1, 1]})  # 4 of 6
    assert set(weights(curriculum, 2)) == {"a", "b", "c"} and metrics["curriculum/level"] == 2
    record(curriculum, 2, {"a": [0] * 6, "c": [0]})  # level 1: 4 of 12, below the gate again
    assert set(weights(curriculum, 3)) == {"a", "b", "c"}
    record(curriculum, 3, {"c": [1, 1]})  # level 2: 2 of 3
    assert set(weights(curriculum, 4)) == {"a", "b", "c", "d"}
    with pytest.raises(ValueError, match=r"gate=0.6: all questions have level 0; expected several levels"):
        curriculum_of(gate=0.6)


def test_a_batch_ahead_knows_no_batch_that_may_still_be_missing():
    """With two batches ahead, batch 3 is drawn from the attempts of batch 0, whatever was packed since."""
    curriculum = curriculum_of(ahead=2)
    assert curriculum.rates_for(2).questions == {}
    record(curriculum, 0, {"a": [0, 0, 1]})
    early, drawn = weights(curriculum, 3), curriculum.draw(3, 3, 2, 1)
    record(curriculum, 1, {"b": [1, 1]})
    saved = json.dumps(curriculum.state_dict())
    results = played(curriculum, 2, {"c": [1, 0]})
    curriculum.record(results, judge)
    assert curriculum.draw(3, 3, 2, 1) == drawn and weights(curriculum, 3) == early
    assert weights(curriculum, 4)["b"] == pytest.approx(0.025) and early["b"] > 0.2
    # The update of batch 2 fails, and it is packed again: its attempts count once.
    expected = weights(curriculum, 5)
    curriculum.record(results, judge)
    assert weights(curriculum, 5) == expected != weights(curriculum, 4)
    again = curriculum_of(ahead=2)
    again.load_state_dict(json.loads(saved))
    assert again.draw(3, 3, 2, 1) == drawn
    record(again, 2, {"c": [1, 0]})
    assert json.dumps(again.state_dict()) == json.dumps(curriculum.state_dict())


def test_attempts_that_failed_teach_nothing_and_a_missing_metric_is_judged():
    curriculum = curriculum_of()
    curriculum.record(played(curriculum, 0, {"a": [1]}, error="boom"), judge)
    assert curriculum.rates_for(1).questions == {}
    curriculum.record(played(curriculum, 1, {"a": [None], "b": [7.0]}), lambda rollout: (0.5, 1.0))
    assert [stat.success for stat in curriculum.rates_for(2).questions.values()] == [1.0, 1.0], (
        "a metric is cut to 0..1"
    )


def test_copies_in_a_pool_and_an_empty_pool_are_refused():
    with pytest.raises(ValueError, match="pool: 1 of its 2 questions differ"):
        curriculum_of("aa")
    with pytest.raises(ValueError, match="pool: 0 of its 0 questions differ"):
        curriculum_of("")


class Drawing(Arena):
    """Draws two questions a batch, twice each."""

    draws = 0

    def get_batch(self):
        self.draws += 1
        return self.stages.questions(self, self.draws, 2, 2)


def test_extra_batches_draw_from_the_same_rates_and_are_learned_from(make_arena):
    """Every answer is "1", so no question is informative and each batch is three draws of two questions."""
    arena = make_arena(
        lambda *_: "1",
        arena_class=Drawing,
        credit=GRPOCredit(),
        filters=Filters(dynamic_sampling_rounds=2),
        episodes=[Guess()],
    )
    arena.add_stage(CurriculumStage(curriculum_of("abcdefgh")))
    batch = asyncio.run(arena.step())
    assert batch.metrics["extra_batches"] == 2 and batch.metrics["resampled_groups"] == 4
    notes = [result.rollout.facts.curriculum for result in arena.last_results]
    assert len(notes) == 12 and {note["batch"] for note in notes} == {0} and not any("p" in note for note in notes)
    seen = len({note["question"] for note in notes})
    assert batch.metrics["curriculum/seen"] == batch.metrics["curriculum/always"] == seen
    saved = json.loads(json.dumps(arena.state_dict()))
    second = asyncio.run(arena.step())
    notes = [result.rollout.facts.curriculum for result in arena.last_results]
    drawn = [note["p"] for note in notes if "p" in note]
    assert second.metrics.get("curriculum/drawn_p", 1.0) == 1.0 and set(drawn) <= {1.0}
    assert {note["batch"] for note in notes} == {1}
    state = saved["stages"]["curriculum"]
    assert len(state["questions"]) + len(state["recent"][0][1]) == 12


def test_the_order_of_the_pool_changes_no_draw():
    pool = [EpisodeRequest("sums", number, group_id=f"{number} + 1") for number in range(60)]
    drawn = [
        [request.group_id for request in Curriculum(each, metric="right/solver", seed=3).draw(2, 2, 8, 1)]
        for each in (pool, pool[::-1])
    ]
    assert drawn[0] == drawn[1]


# -- large pools -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", [{}, {"gate": 0.4}, {"uniform": 0.0, "window": 2}, {"ahead": 2, "uniform": 1.0}])
def test_the_index_of_a_large_pool_weighs_what_the_rule_does(settings, monkeypatch):
    """Also where an earlier batch is drawn again, and after a resume with other questions in the pool."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    names = [f"q{number}" for number in range(40)]
    curriculum = curriculum_of(names, [rng.randrange(4) for _ in names], **settings)
    for batch in range(40):
        for again in rng.sample(range(batch + 1), min(2, batch + 1)):
            rates = curriculum.rates_for(rng.choice([batch, again]))
            definition = curriculum.weighted(rates)
            expected = dict(zip((a.id for a in definition.artifacts), definition.weights, strict=True))
            monkeypatch.setattr(curriculum_module, "SMALL", 0)
            pool = curriculum.weighted(rates)
            monkeypatch.undo()
            assert isinstance(pool, IndexedPool) and len(pool) == len(expected) >= pool.at_least
            mass = sum(part.mass for part in pool._parts)
            found = {a.id: sum(part.weight(slot) for part in pool._parts) / mass for slot, a in pool._members}
            assert {id: weight for id, weight in found.items() if weight > 0} == pytest.approx(expected)
            drawn = pool.draw(len(pool), False, rng)
            assert {artifact.id for artifact in drawn} == expected.keys() and len(drawn) == len(expected)
        successes = {name: [rng.choice([0, 1]) for _ in range(rng.randrange(4))] for name in rng.sample(names, 5)}
        metrics = record(curriculum, batch, successes)
        known = [p.success for p in curriculum.rates_for(batch + 9).questions.values()]
        counts = [len(known), sum(p >= SOLVED for p in known), sum(p <= UNSOLVED for p in known)]
        assert [metrics[f"curriculum/{name}"] for name in ("seen", "always", "never")] == counts
        if batch == 20:
            saved, names = curriculum.state_dict(), [*names[3:], "new", "newer"]
            curriculum = curriculum_of(names, [rng.randrange(4) for _ in names], **settings)
            curriculum.load_state_dict(json.loads(json.dumps(saved)))
            kept = {id: rest for id, *rest in saved["questions"]}
            assert {id: rest for id, *rest in curriculum.state_dict()["questions"]} == kept, "also of what is gone"
            curriculum.load_state_dict({**saved, "questions": [], "recent": []})


@pytest.mark.parametrize("levels", [1, 4])
def test_a_step_costs_no_look_at_the_whole_pool(levels):
    counts = []
    for size in (1200, 6000):
        names = [f"q{number}" for number in range(size)]
        curriculum = curriculum_of(names, [number % levels for number in range(size)], ahead=1)
        for batch, successes in enumerate([{name: [1, 0] for name in names[::10]}, {"q1": [1]}, {"q2": [0]}]):
            record(curriculum, batch, successes)
        curriculum.draw(4, 0, 4, 2)
        results = played(curriculum, 3, {"q3": [1, 0], "q20": [0], "q21": [1]})

        def step(curriculum=curriculum, results=results):
            curriculum.record(results, judge)
            curriculum.draw(5, 1, 4, 2)

        counts.append(count_operations(step))
    assert counts[1] < 1.6 * counts[0], f"{counts} operations"
