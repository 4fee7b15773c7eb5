from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest

from turnwise.arena import Arena, Rubric, SingleTurnEpisode
from turnwise.arena.runtime.concurrency import BatchFailedError
from turnwise.inference import ScriptedClient
from turnwise.samples.outcomes import metric_value
from turnwise.train.eval.evaluate import Evaluation, compare, describe, evaluate, plain_evaluation
from turnwise.train.eval.statistics import estimate
from turnwise.types import Actor, EpisodeRequest


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
        (estimate([0.5], bounds=(0, 1)), "success 50.0% (95% interval 5.5%–94.5%, 1 question)"),
        (estimate([2.0]), "success 200.0% (1 question: no 95% interval)"),
        (estimate([0.0, 1.0], bounds=(0, 1)), "success 50.0% (95% interval 9.5%–90.5%, 2 questions)"),
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
    assert sorted(found.pass_at) == [1, 2, 3]
    assert found.pass_at[1].mean == pytest.approx(sum(value == 1 for value in found.values) / len(found.values))
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


@pytest.mark.parametrize(
    ("ranges", "says", "bounds", "method"),
    [
        ({}, ["0", "1"], (0, 1), "wilson"),
        ({}, ["1", "1"], (0, 1), "wilson"),
        ({}, ["0.5", "1"], (0, 1), "wilson"),
        ({}, ["0", "3"], None, "bootstrap"),
        ({"paid": (0, 10)}, ["0", "3"], (0, 10), "wilson"),
        ({"paid": (0, 10)}, ["1", "1"], (0, 10), "wilson"),
        ({"paid": (-math.inf, math.inf)}, ["0", "1"], None, "bootstrap"),
    ],
)
async def test_an_interval_follows_from_the_declared_range(ranges, says, bounds, method):
    def paid(completion):
        return float(completion)

    def other(completion):
        return float(completion)

    class Said(SingleTurnEpisode):
        episode_type = "said"
        rubric = Rubric([paid, other], ranges=dict(zip([paid] * len(ranges), ranges.values(), strict=True)))

        def get_prompt(self, artifact):
            return "say"

    client = ScriptedClient(list(says))
    arena = Arena(client, client.tokenizer)
    arena.add_actor(Actor("agent"))
    arena.add_episode(Said())
    requests = [EpisodeRequest("said", number, group_id=number) for number in range(len(says))]
    beyond = not ranges and says[1] == "3"
    with pytest.warns(UserWarning, match="expected a success of 0 to 1") if beyond else nullcontext():
        found = await evaluate(arena, requests, "paid")
    assert found.bounds == bounds and found.estimates["paid/agent"].method == method
    assert (found.low, found.high) == (found.estimates["paid/agent"].low, found.estimates["paid/agent"].high)
    assert found.estimates["other/agent"].method == found.estimates["reward/agent"].method == "bootstrap"
    if ranges and bounds:
        client = ScriptedClient(["11"])
        arena.client = client
        with pytest.raises(BatchFailedError, match=r"'paid', actor 'agent': got 11.0, expected 0 to 10"):
            await evaluate(arena, requests[:1], "paid")
