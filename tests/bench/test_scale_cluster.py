"""The real loop on a virtual cluster: it agrees with the formula where that is exact, and goes on after deaths."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scale.cluster import Perturbations, _ClusterClient, simulate_cluster
from scale.constants import GPUS, Constants
from scale.formula import Split, engine_speed, predict
from scale.workload import ModelSize, Workload

H100 = GPUS["h100"]
MODELS = {"7B": ModelSize(7e9, 57_344, 28, 4), "70B": ModelSize(70e9, 327_680, 64, 8)}
CONSTANTS = replace(Constants(), tail=Constants().tail.measured(1.0, "constant lengths"))


def workload(model="7B", **changes):
    return replace(Workload(MODELS[model], 64, 16, 1024, 4096), **changes)


@pytest.mark.parametrize(
    ("model", "groups", "split", "bottleneck"),
    [
        ("7B", 64, Split(1, 1, 7, 64, 0), "sampling"),
        ("7B", 64, Split(2, 1, 6, 128, 1), "sampling"),
        ("7B", 64, Split(2, 1, 6, 128, 3), "sampling"),
        ("7B", 64, Split(16, 1, 2, 128, 1), "training"),
        ("7B", 64, Split(32, 1, 32, 128, 0), "sampling"),
        ("7B", 64, Split(32, 1, 32, 128, 1), "latency of a batch"),
        ("7B", 64, Split(32, 1, 32, 128, 2), "latency of a batch"),
        ("70B", 64, Split(8, 4, 32, 64, 1), "sampling"),
        ("70B", 128, Split(128, 4, 512, 128, 0), "sampling"),
        ("7B", 512, Split(512, 1, 512, 128, 0), "sampling"),
    ],
)
def test_equal_calls_take_the_seconds_of_the_formula(model, groups, split, bottleneck):
    """Up to 1,024 GPUs, with engines that get equal numbers of rows."""
    work = workload(model, groups=groups)
    found = predict(work, split, H100, CONSTANTS)
    result = simulate_cluster(work, split, H100, CONSTANTS, rounds=2, skipped_rounds=1 + split.max_staleness)
    assert found.bottleneck == bottleneck
    assert result.step == pytest.approx(found.step, rel=0.05)
    assert result.tokens_per_second == pytest.approx(found.tokens_per_second, rel=0.05)
    assert result.training_busy == pytest.approx(found.training / found.step, rel=0.05)
    assert result.staleness_max <= split.max_staleness


@pytest.mark.parametrize("split", [Split(32, 1, 32, 128, 0), Split(32, 1, 32, 128, 1), Split(32, 1, 32, 128, 3)])
def test_the_longest_call_takes_about_as_long_as_the_formula_says(split):
    """About: in the simulation fewer and fewer rows run beside the longest one."""
    perturbations = Perturbations(length_sigma=0.5, longest=3)
    found = predict(workload(longest=3 * 4096), split, H100, CONSTANTS)
    result = simulate_cluster(workload(), split, H100, CONSTANTS, perturbations, rounds=2, skipped_rounds=2)
    assert found.bottleneck == "latency of a batch"
    assert result.step == pytest.approx(found.step, rel=0.2)


def test_a_worked_example():
    """Two prompts of two calls on one engine of two slots: 20 tokens with two rows each, twice, one after the other."""
    work, split = workload(groups=2, group_size=2, response=20), Split(1, 1, 1, 2, 0)
    token = engine_speed(work, 1, H100, CONSTANTS).seconds(2)
    found = predict(work, split, H100, CONSTANTS)
    result = simulate_cluster(work, split, H100, CONSTANTS, rounds=1, skipped_rounds=1)
    assert result.step == pytest.approx(40 * token + found.training + found.sync)
    assert result.rows_per_engine == pytest.approx(2 * 40 * token / result.step)
    assert result.tokens_per_second == pytest.approx(80 / result.step)
    assert len(result.ends) == 2 and result.repeated_rows == 0


def test_an_engine_is_faster_once_short_calls_have_ended():
    """The rows of one prompt start together, so the time is that of the tokens with 4, 3, 2 and 1 rows left."""
    work, split = workload(groups=1, group_size=4, response=1000), Split(1, 1, 1, 8, 0)
    perturbations = Perturbations(length_sigma=1.0)
    seen = []

    class Router:
        def choose(self, request, outstanding):
            seen.append(request.sampling.seed)
            return next(iter(outstanding))

    result = simulate_cluster(work, split, H100, CONSTANTS, perturbations, rounds=1, skipped_rounds=1, router=Router())
    lengths = sorted(_ClusterClient(split, None, work, perturbations, None)._lengths(seen[-1]))
    assert len(set(lengths)) > 1 and max(lengths) <= 4000
    speed, before, seconds = engine_speed(work, 1, H100, CONSTANTS), 0, 0.0
    for left, length in zip((4, 3, 2, 1), lengths, strict=True):
        seconds += (length - before) * speed.seconds(left)
        before = length
    found = predict(work, split, H100, CONSTANTS)
    per_token = found.training / work.trained_tokens
    training = per_token * (sum(lengths) + 4 * work.prompt)
    assert result.step == pytest.approx(seconds + training + found.sync)


def test_lengths_keep_their_mean():
    work, perturbations = workload(group_size=4000), Perturbations(length_sigma=0.5, longest=100)
    lengths = _ClusterClient(Split(1, 1, 1), None, work, perturbations, None)._lengths(7)
    logs = [math.log(length) for length in lengths]
    middle = sum(logs) / len(logs)
    spread = math.sqrt(sum((value - middle) ** 2 for value in logs) / len(logs))
    assert sum(lengths) / len(lengths) == pytest.approx(4096, rel=0.05)
    assert spread == pytest.approx(0.5, rel=0.05)


def test_equal_seeds_give_equal_results():
    split, perturbations = Split(8, 1, 8, 32, 1), Perturbations(length_sigma=0.7, mtbf_hours=5)
    first, again, other = (
        simulate_cluster(workload(groups=24), split, H100, CONSTANTS, perturbations, rounds=3, seed=seed)
        for seed in (3, 3, 4)
    )
    assert first == again and first.ends != other.ends
    assert sum(first.deaths.values()) > 0


def test_a_dead_engine_loses_no_call():
    """Three of four engines are down nearly always; all calls are still answered, by those that are left."""
    perturbations = Perturbations(mtbf_hours=0.02, engine_restart=200, training_restart=0)
    result = simulate_cluster(workload(groups=8), Split(4, 1, 1, 64, 0), H100, CONSTANTS, perturbations, rounds=4)
    assert result.deaths["engine"] > 5 and result.repeated_rows > 0
    calm = simulate_cluster(workload(groups=8), Split(4, 1, 1, 64, 0), H100, CONSTANTS, rounds=4)
    assert result.step > calm.step


def test_the_ranks_repeat_the_updates_since_their_checkpoint():
    """With a checkpoint of each step a death costs its restart and the update under way; else more."""
    work, split = workload(groups=16, response=512), Split(16, 1, 1, 128, 1)
    how = {"rounds": 25, "seed": 2}
    steps = {
        every: simulate_cluster(
            work,
            split,
            H100,
            CONSTANTS,
            Perturbations(mtbf_hours=4, training_restart=60, checkpoint_every=every),
            **how,
        ).ends[-1]
        for every in (1, 1000)
    }
    assert steps[1000] > steps[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": Split(1, 1, 1)}, "max_staleness=None: expected a count"),
        ({"rounds": 0}, "rounds=0: expected at least 1"),
        ({"workload": workload(calls=1.5)}, "calls=1.5: expected a whole number"),
        ({"length_sigma": -1}, "length_sigma=-1: expected a number >= 0"),
        ({"mtbf_hours": 0}, "mtbf_hours=0: expected"),
    ],
)
def test_impossible_simulations_are_rejected(change, message):
    given = {"workload": workload(), "split": Split(1, 1, 1, 8, 0), "gpu": H100, "constants": CONSTANTS}
    with pytest.raises(ValueError, match=message):
        if change.keys() <= given.keys() | {"rounds"}:
            simulate_cluster(**{**given, **change})
        else:
            Perturbations(**change)
