from __future__ import annotations

import pytest

from turnwise.train.evaluate import evaluate, wilson


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.5, 10, 0.2366, 0.7634), (1.0, 20, 0.8389, 1.0), (0.0, 20, 0.0, 0.1611), (0.9, 200, 0.8506, 0.9343)],
)
def test_wilson_interval(share, n, low, high):
    """Values of R's prop.test(correct=FALSE), by hand from the formula."""
    assert wilson(share, n) == (pytest.approx(low, abs=2e-4), pytest.approx(high, abs=2e-4))


async def test_greedy_evaluation_repeats_and_leaves_training_alone(make_trainer):
    trainer = make_trainer()
    before = trainer.arena.state_dict()
    first = await trainer.evaluate()
    second = await trainer.evaluate()
    assert first == second
    assert (first.episodes, first.failed) == (2, 0)
    assert trainer.arena.state_dict() == before
    # two actors, one call each: evaluation never branches
    assert first.sampled_tokens <= 2 * 2 * 6


async def test_unknown_metric_and_nothing_to_average(make_trainer):
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"metric='succes': expected one of .*success/first"):
        await evaluate(trainer.arena, trainer.validation.requests, "succes")
    with pytest.raises(ValueError, match="evaluation of 0 episodes"):
        await evaluate(trainer.arena, [], "success")


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
