"""rLLM calls turnwise's rules once per role, and writes their advantages on every step."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.credit import RAECredit, credit_columns, registry
from turnwise.integrations.trainers import rllm as adapter

from .record import assert_close, read, record_rllm, rllm_groups

RECORDED = read("rllm")


def group(group_id, trajectories):
    """What an estimator reads of rLLM's ``TrajectoryGroup``."""
    steps = [[SimpleNamespace(response_ids=[0] * length) for length in each["lengths"]] for each in trajectories]
    return SimpleNamespace(
        group_id=group_id,
        group_role=group_id.split(":")[1],
        trajectories=[SimpleNamespace(steps=each) for each in steps],
    )


@pytest.mark.parametrize(
    "batches", [RECORDED[i : i + 2] for i in range(0, len(RECORDED), 2)], ids=lambda b: b[0]["rule"]
)
def test_recorded_calls(batches):
    """rLLM's calls over two batches, repeated: the estimator returns what rLLM then wrote on each step."""
    rule = registry[batches[0]["rule"]](**batches[0]["options"])
    estimate = adapter.estimator(rule)
    for record in batches:
        written = record["advantages"]
        assert (
            sorted(name for names in record["calls"] for name in names) == sorted(written) and len(record["calls"]) == 2
        )
        for names in record["calls"]:
            groups = [group(name, record["batch"][name]) for name in names]
            rewards = [np.array([each["reward"] for each in record["batch"][name]]) for name in names]
            advantages, returns = estimate(rewards=rewards, algorithm_config=None, traj_groups=groups)
            assert returns is advantages
            for name, values in zip(names, advantages, strict=True):
                assert len(values) == len(written[name])
                for value, steps in zip(values, written[name], strict=True):
                    assert steps == pytest.approx([value] * len(steps), abs=1e-6) and steps


def test_every_step_has_dr_mas():
    """Each role of each task against its own mean and deviation, in float64; a group of one gets 0."""
    records = [record for record in RECORDED if record["rule"] == "dr_mas"]
    assert len(records) == 2
    for seed, record in enumerate(records):
        assert record["batch"] == rllm_groups(seed)
        for name, trajectories in record["batch"].items():
            rewards = np.array([each["reward"] for each in trajectories])
            expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if len(rewards) > 1 else [0.0]
            for value, steps in zip(expected, record["advantages"][name], strict=True):
                assert steps == pytest.approx([value] * len(steps), abs=1e-6)


def test_roles_share_a_rule_but_no_baseline():
    """The first batch of RAE has baseline 0; the second half of the first mean of the role's rewards."""
    first, second = (record for record in RECORDED if record["rule"] == "rae")
    for role in ("solver", "verifier"):
        names = [f"{task}:{role}" for task in (0, 1)]
        rewards = [each["reward"] for name in names for each in first["batch"][name]]
        for record, baseline in ((first, 0.0), (second, np.mean(rewards) / 2)):
            written = [steps[0] for name in names for steps in record["advantages"][name]]
            expected = [each["reward"] - baseline for name in names for each in record["batch"][name]]
            assert written == pytest.approx(expected, abs=1e-6)


def test_rules_see_token_counts_of_whole_trajectories():
    record = next(record for record in RECORDED if record["rule"] == "opo")
    for name, trajectories in record["batch"].items():
        expected = credit_columns(
            "opo",
            [each["reward"] for each in trajectories],
            questions=[0] * len(trajectories),
            lengths=[sum(each["lengths"]) for each in trajectories],
        )
        assert [steps[0] for steps in record["advantages"][name]] == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.needs("rllm")
def test_recording_is_what_rllm_does():
    assert_close(record_rllm(), RECORDED)


def test_registration_and_what_it_refuses(monkeypatch):
    """With a stand-in for rLLM's registry, a decorator for each name."""
    registered = {}
    registry = SimpleNamespace(register_rllm_adv_estimator=lambda name: lambda made: registered.update({name: made}))
    monkeypatch.setitem(sys.modules, "rllm.trainer.algorithms.advantage", registry)
    assert adapter.register_credit("dr_mas") == "turnwise_dr_mas" and callable(registered["turnwise_dr_mas"])
    with pytest.raises(ValueError, match="it compares single calls"):
        adapter.register_credit("at_grpo")
    with pytest.raises(ValueError, match="whole trees"):
        adapter.register_credit("vine")
    with pytest.raises(ValueError, match="name=None: expected the name to register RAECredit by"):
        adapter.register_credit(RAECredit())
    assert len(registered) == 1


@pytest.mark.skipif(importlib.util.find_spec("rllm") is not None, reason="rLLM is installed here")
def test_rllm_is_missing():
    with pytest.raises(ModuleNotFoundError, match="rLLM is not installed here"):
        adapter.register_credit("dr_mas")
