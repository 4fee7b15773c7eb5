"""A policy that never succeeds does not train; the check of the start leaves no trace."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from turnwise.run.build import build_run, train_from_config
from turnwise.run.start import starting_questions
from turnwise.train.config.toml import ConfigError
from turnwise.train.health.start import Attempts, check_start
from turnwise.train.validate import config_from_dict
from turnwise.types import GenerateResult, Rollout

from ...test_run import SMALL
from ...trained import equal, lines_of, notes_of, rows_of, weights_of

pytestmark = pytest.mark.usefixtures("narrow_model")


def config_of(folder, questions=4, samples=6, **changes):
    health = {"start_questions": questions, "start_samples": samples}
    return config_from_dict({**SMALL, "run_dir": str(folder), "health": health, **changes})


def solved_at(run, *places):
    """Score the run's evaluated episodes: those at ``places``, in the order of play, are solved.

    Returns the list of their questions and seeds.
    """
    played, evaluation = [], run.arena.evaluation

    def view(*arguments, **named):
        made = evaluation(*arguments, **named)
        generate = made.generate_rollouts

        async def scored(requests):
            results = await generate(requests)
            for result in results:
                result.rollout.metrics[run.task.success_metric] = float(len(played) in places)
                played.append((result.group_id, result.rollout.seed))
            return results

        made.generate_rollouts = scored
        return made

    run.arena.evaluation = view
    return played


def check(run):
    asked = starting_questions(run.config, run.task)
    asyncio.run(check_start(run.trainer, asked, run.task.success_metric))


def test_a_start_without_success_is_refused_and_leaves_nothing_to_resume(tmp_path):
    run = build_run(config_of(tmp_path))
    played = solved_at(run)
    with pytest.raises(ConfigError, match=r"health.start_questions' = 4: expected .* solved/proposer was 0") as refused:
        run.train()
    told = str(refused.value)
    assert "all 24 (6 samples of each of 4 questions)" in told and "health.start_questions = 0 skips this" in told
    assert "valid_format/proposer" in told and "warm_start.steps" in told
    # four questions: once, once more, twice more, and the last two; no sample has the seed of another
    assert [len(played), len(set(played)), len({group for group, _ in played})] == [24, 24, 4]
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "metrics.jsonl").exists()
    # Without the metric the check says nothing.
    notes = notes_of(run.trainer)
    asked = starting_questions(run.config, run.task)
    asyncio.run(check_start(run.trainer, asked, "unknown/metric"))
    assert notes == []


@pytest.mark.parametrize(("place", "episodes"), [(2, 4), (5, 8), (9, 16), (23, 24)])
def test_the_round_of_the_first_success_is_the_last(tmp_path, place, episodes):
    run = build_run(config_of(tmp_path))
    notes, played = notes_of(run.trainer), solved_at(run, place)
    check(run)
    assert notes == [f"the starting policy succeeds in 1 of {episodes} samples (solved/proposer)"]
    assert len(played) == episodes


def test_a_checked_run_is_the_same_run(tmp_path):
    """Metrics, episodes and weights, bit for bit; the check itself writes nothing."""
    runs = {}
    for name, questions in (("checked", 8), ("plain", 0)):
        run = build_run(config_of(tmp_path / name, questions, eval={"every": 1, "num_prompts": 3}))
        played = solved_at(run, *range(10_000))
        run.train()
        assert len([group for group, _ in played if "0/" in group]) >= questions
        runs[name] = run
    assert lines_of(tmp_path / "checked") == lines_of(tmp_path / "plain")
    episodes = [rows_of(tmp_path / name, "rollouts.jsonl") for name in runs]
    assert [row["id"] for row in episodes[0]] == ["e0", "e2"]
    for key in ("id", "seed", "steps", "rewards"):
        assert [row[key] for row in episodes[0]] == [row[key] for row in episodes[1]]
    assert equal(*(weights_of(run.trainer) for run in runs.values()))


def test_generators_that_episodes_use_are_put_back(tmp_path):
    run = build_run(config_of(tmp_path))
    generate = run.arena.client.generate

    async def noisy(requests):
        torch.rand(3), np.random.rand(3), run.trainer.rng.random(3)
        return await generate(requests)

    run.arena.client.generate = noisy
    solved_at(run, 0)
    states = [torch.get_rng_state(), np.random.get_state()[1].tolist(), run.trainer.rng.bit_generator.state]
    check(run)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1] and run.trainer.rng.bit_generator.state == states[2]


def test_only_a_run_that_begins_is_checked(tmp_path):
    """Not with steps = 0, which is a warm start alone, and not after a resume."""
    train_from_config(config_of(tmp_path, steps=0))
    resumed = build_run(config_of(tmp_path, steps=1))
    played = solved_at(resumed)
    resumed.train()
    assert played == []


def test_a_task_with_few_questions_is_asked_those_of_a_step(tmp_path):
    config = config_of(tmp_path, questions=64)
    run = build_run(config)
    draw = run.task.requests

    def few(step, questions, copies):
        if questions > 2:
            raise ValueError(f"n={questions}: there are two questions")
        return draw(step, questions, copies)

    run.task.requests = few
    asked = starting_questions(config, run.task)
    assert len(asked) == config.rollout.prompts_per_step == 2
    assert {request.group_id for request in asked}.isdisjoint(request.group_id for request in draw(1, 64, 1))
    assert starting_questions(config_of(tmp_path, questions=0), run.task) == []


def test_attempts_count_nested_episodes_and_equal_rewards():
    """Two questions, two samples each: the first question's rewards differ, the second's success is in a child."""
    attempts = Attempts("right/solver")
    for group, reward, nested in (("a", 0.0, 0.0), ("a", 0.5, 0.0), ("b", 1.0, 0.0), ("b", 1.0, 1.0)):
        top = Rollout(group, "outer", None, rewards={"solver": reward})
        inner = Rollout("x", "inner", None, metrics={"right/solver": nested})
        attempts.add(GenerateResult(top, [GenerateResult(inner, group_id="x")], group_id=group))
    assert (attempts.episodes, attempts.successes, attempts.measured) == (4, 1, True)
    assert {group: len(earned) for group, earned in attempts.rewards.items()} == {"a": 2, "b": 1}
    assert attempts.means() == "reward/solver 0.625, right/solver 0.25"
