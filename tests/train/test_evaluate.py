from __future__ import annotations

import math
from dataclasses import replace

import pytest

from turnwise.samples.step_metrics import metric_value
from turnwise.train.eval.evaluate import Evaluation, compare, describe, evaluate, plain_evaluation
from turnwise.train.eval.statistics import estimate


async def test_greedy_evaluation(make_trainer):
    trainer = make_trainer()
    before = trainer.arena.state_dict()
    first = await trainer.evaluate()
    found = await trainer.evaluate()
    assert first == found
    assert (first.episodes, first.failed) == (2, 0)
    assert trainer.arena.state_dict() == before
    # two actors, one call each: evaluation never branches
    assert first.sampled_tokens <= 2 * 2 * 6
    # A metric that no episode has is a gap, which compares with nothing; without an actor it is that of all.
    gap = await evaluate(trainer.arena, trainer.validation.requests, "succes")
    assert gap.gap.startswith("metric='succes': no finished episode has it, expected one of ")
    assert "success/first" in gap.gap and gap.unmeasured == 2 and math.isnan(gap.success) and not gap.by_task
    assert describe(gap) == f"success unknown (2 questions): {gap.gap}" and plain_evaluation(gap)["success"] is None
    assert compare(gap, found) is None and compare(found, gap) is None
    team = await evaluate(trainer.arena, trainer.validation.requests, "success")
    both = [found.metrics["success/first"], found.metrics["success/second"]]
    assert team.success == pytest.approx(sum(both) / 2)
    with pytest.raises(ValueError, match="requests is empty: expected at least one question"):
        await evaluate(trainer.arena, [], "success")
    # Every metric and each actor's reward has an interval, and only the same questions compare.
    assert {name for name in found.estimates if not name.startswith("reward/")} == set(found.metrics)
    assert {"reward/first", "reward/second"} <= set(found.estimates)
    for name, mean in found.metrics.items():
        at = found.estimates[name]
        assert at.mean == mean and at.low <= mean <= at.high and at.count == found.episodes
    assert compare(found, found).difference.mean == 0
    other = await evaluate(trainer.arena, trainer.validation.requests[:1], trainer.validation.metric)
    with pytest.raises(ValueError, match="different questions"):
        compare(found, other)


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (estimate([0.5]), "success 50.0% (95% interval 5.5%–94.5%, 1 question)"),
        (estimate([2.0]), "success 200.0% (1 question: no 95% interval)"),
        (estimate([0.0, 1.0]), "success 50.0% (95% interval 9.5%–90.5%, 2 questions)"),
    ],
)
def test_one_question_has_an_interval_or_none(at, told):
    """It was printed as −inf%."""
    assert describe(Evaluation(at.mean, at.low, at.high, at.count, 0, 0, {})) == told


async def test_a_failed_episode_counts_as_no_success(make_trainer):
    trainer = make_trainer()
    episode = trainer.arena.episodes["letters"]
    answer = episode.env_response

    def fail_on_question_1(state, arena, artifact):
        answer(state, arena, artifact)
        state.data["share"] = 1.0
        if artifact == 1:
            raise RuntimeError("the board fell over")

    episode.env_response = fail_on_question_1
    result = await trainer.evaluate()
    assert (result.success, result.episodes, result.failed) == (0.5, 2, 1)
    assert result.metrics["success/first"] == 1.0


async def test_samples_give_pass_at_k_and_questions_are_the_trials(make_trainer):
    trainer = make_trainer()
    sampling = trainer.arena.sampling.with_(temperature=1.0)
    requests, metric = trainer.validation.requests, trainer.validation.metric
    found = await evaluate(trainer.arena, requests, metric, sampling, samples=3)
    assert (found.episodes, found.samples, len(found.values)) == (3 * len(requests), 3, 3 * len(requests))
    assert len(set(found.clusters)) == len(requests) and found.clusters[0] == found.clusters[2] != found.clusters[3]
    if set(found.values) <= {0.0, 1.0}:
        assert sorted(found.pass_at) == [1, 2, 3]
        assert found.pass_at[1].mean == pytest.approx(found.success)
    assert found == await evaluate(trainer.arena, requests, metric, sampling, samples=3), "paired seeds"
    with pytest.raises(ValueError, match="samples=0: expected at least 1"):
        await evaluate(trainer.arena, requests, metric, samples=0)


def test_a_metric_without_an_actor_is_the_mean_of_those_that_have_it():
    metrics = {"right/solver": 1.0, "right/checker": 0.0, "rightly/solver": 7.0}
    assert metric_value(metrics, "right") == 0.5 and metric_value(metrics, "right/solver") == 1.0
    assert metric_value(metrics | {"right": 0.25}, "right") == 0.25, "its own value"
    assert metric_value(metrics, "wrong") is None and metric_value(metrics, "right/judge") is None


async def test_a_validation_without_the_metric_is_a_gap_that_ends_no_run(make_trainer, monkeypatch):
    trainer = make_trainer()
    warned = []
    monkeypatch.setattr(trainer.log, "warn", lambda step, text: warned.append(text))
    known = trainer.validation.metric
    for metric in ("success/nobody", known):
        trainer.validation = replace(trainer.validation, metric=metric)
        measured = await trainer.validate()
        assert ("validation" in measured) == (metric == known)
        assert bool(trainer.progress.evaluations) == (metric == known)
    [text] = warned
    assert "metric='success/nobody': no finished episode has it" in text
