"""Whose weights a run trains: one policy for all, one or an adapter for each actor, mixes of them, teachers."""

from __future__ import annotations

import pytest
import torch

from turnwise.inference.local.models import copy_models
from turnwise.inference.weights.lora import shared_bases
from turnwise.replay.replay import replay
from turnwise.report.credit import compare_credit
from turnwise.run.build import build_run
from turnwise.run.checks import dry_run
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.weights import named_weights

from .test_run import all_weights_of, config_of
from .trained import lines_of, rows_of, save_tiny

pytestmark = pytest.mark.usefixtures("narrow_model")

ACTORS = {"proposer", "reviser"}
LEVELS = {"shared": {"default"}, "lora_per_actor": ACTORS, "model_per_actor": ACTORS}


def moved(run, before):
    """The names of the policies whose own weights differ from ``before``."""
    return {
        name
        for name, policy in run.trainer.policies.items()
        if any(not torch.equal(tensor, before[name][key]) for key, tensor in policy.weights())
    }


@pytest.mark.parametrize("level", list(LEVELS))
def test_one_line_of_the_config_chooses_the_level(tmp_path, level):
    run = build_run(config_of(tmp_path, policy_sharing=level))
    before = all_weights_of(run)
    run.train()
    assert run.trainer.policies.keys() == LEVELS[level] == moved(run, before)
    assert {actor.policy for actor in run.arena.actors.values()} == LEVELS[level]
    assert len(shared_bases(policy.model for policy in run.trainer.policies.values())) == (level == "lora_per_actor")
    for name, policy in run.trainer.policies.items():
        assert run.arena.client.version(name) == policy.version == 2
        held = run.arena.client._policies[name].model.state_dict()
        assert all(torch.equal(tensor, held[key]) for key, tensor in policy.weights())


def test_the_sampler_has_no_second_copy_of_the_weights(tmp_path, monkeypatch):
    """A run whose sampler has copies ends with the same bits. One that samples ahead needs copies."""

    def shared(run):
        served = run.arena.client._policies["default"].model
        weights = dict(named_weights(run.trainer.policies["default"].model)).items()
        return {tensor.data_ptr() == served.state_dict()[name].data_ptr() for name, tensor in weights}

    run = build_run(config_of(tmp_path / "shared"))
    assert shared(run) == {True} and run.arena.client.capabilities.shares_weights
    run.train()
    assert shared(run) == {True}
    assert shared(build_run(config_of(tmp_path / "ahead", loop={"max_staleness": 1}))) == {False}
    monkeypatch.setattr("turnwise.inference.local.client.copy_models", lambda models, live: copy_models(models))
    copied = build_run(config_of(tmp_path / "copied"))
    assert shared(copied) == {False}
    copied.train()
    assert all(
        torch.equal(tensor, all_weights_of(run)["default"][name])
        for name, tensor in all_weights_of(copied)["default"].items()
    )


def test_the_base_of_adapters_is_warm_started_and_then_stays(tmp_path):
    cold = build_run(config_of(tmp_path / "cold", policy_sharing="lora_per_actor", warm_start={"steps": 0}))
    run = build_run(config_of(tmp_path / "warm", policy_sharing="lora_per_actor"))
    (cold_base,) = shared_bases(policy.model for policy in cold.trainer.policies.values())
    (base,) = shared_bases(policy.model for policy in run.trainer.policies.values())
    before = {name: tensor.clone() for name, tensor in base.weights().items()}
    assert not any(torch.equal(tensor, before[name]) for name, tensor in cold_base.weights().items())
    run.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.weights().items())
    (served,) = shared_bases(run.arena.client._policies[name].model for name in run.trainer.policies)
    assert all(torch.equal(tensor, before[name]) for name, tensor in served.weights().items())


def test_a_mix_of_bases_adapters_and_frozen_weights(tmp_path):
    """Per-policy rates, phases and KL references too; what doesn't train stays, bit for bit."""
    one, two = save_tiny(tmp_path / "one"), save_tiny(tmp_path / "two", hidden_size=48)
    config = config_of(
        tmp_path / "run",
        steps=4,
        warm_start={"steps": 0},
        task_options={"actors": ["proposer", "reviser", "solver"]},
        policies={
            "solver": {"path": one, "lora": {"rank": 2}, "optimizer": {"lr": 5e-3, "schedule": "linear"}},
            "proposer": {"path": one, "trainable": False},
            "rival": {"path": two, "reference": one},
        },
        actors={"proposer": "proposer", "solver": "solver", "reviser": "rival"},
        loss={"kl": {"coef": 0.1}},
        phases=[{"train": ["solver"], "steps": 1}, {"train": ["solver", "rival"], "steps": 1}],
    )
    run = build_run(config)
    policies = run.trainer.policies
    assert policies["solver"].base is policies["proposer"].base is not policies["rival"].base
    assert policies["solver"].optimizer.param_groups[0]["lr"] == 5e-3
    assert policies["rival"].optimizer.param_groups[0]["lr"] == 1e-3
    assert policies["solver"].reference.shared is policies["solver"].base and policies["proposer"].reference is None
    assert policies["rival"].reference.config.hidden_size == 32
    before = all_weights_of(run)
    run.train()
    assert moved(run, before) == {"solver", "rival"}
    assert {name: policy.version for name, policy in policies.items()} == {"solver": 4, "proposer": 0, "rival": 2}


@pytest.mark.parametrize("top_k", [0, 8])
def test_an_actor_comes_closer_to_its_teacher(tmp_path, top_k):
    """The KL falls, reverse or forward; the other actor learns from its reward, and the teacher stays."""
    one, two = save_tiny(tmp_path / "one"), save_tiny(tmp_path / "two", hidden_size=48)
    config = config_of(
        tmp_path / "run",
        steps=8,
        warm_start={"steps": 0},
        policy_sharing="model_per_actor",
        policies={"default": {"path": one, "optimizer": {"lr": 3e-3}}, "big": {"path": two}},
        actors={"reviser": {"teacher": "big"}},
        distill={"top_k": top_k},
        eval={"every": 0},
    )
    assert "# actor 'reviser' is taught by policy 'big'\n" in dry_run(config)
    run = build_run(config)
    before = all_weights_of(run)
    run.train()
    assert moved(run, before) >= {"reviser"} and "big" not in moved(run, before)
    name = "reviser/reviser/teacher_forward_kl" if top_k else "teacher_kl/reviser"
    kl = [line[name] for line in lines_of(tmp_path / "run") if name in line]
    assert len(kl) == 8 and kl[-1] < 0.5 * kl[0], kl
    assert not any("teacher_kl/proposer" in line for line in lines_of(tmp_path / "run"))
    row = rows_of(tmp_path / "run", "rollouts.jsonl")[-1]
    assert "equals the record, bit for bit" in str(replay(tmp_path / "run", row["id"]))
    assert compare_credit(tmp_path / "run").notes == [
        "the run set the advantages of reviser to 0: they learned from teachers"
    ]
    with pytest.raises(ConfigError, match=r"'distill.coef' = 2.0: has no effect without a teacher"):
        build_run(config_of(tmp_path / "none", distill={"coef": 2.0}))
