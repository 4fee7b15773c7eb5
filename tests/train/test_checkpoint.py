from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from turnwise.train import checkpoint
from turnwise.train.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, load_weights, save_checkpoint
from turnwise.train.config import LossConfig, UpdateConfig
from turnwise.train.policy import Policy
from turnwise.train.update import update_policy

UPDATE = UpdateConfig(lr=1e-3, warmup=2, min_lr_ratio=0.5)


@pytest.fixture
def fresh_policy(small_model):
    return lambda seed=0, **options: Policy("default", small_model(seed)[0], UPDATE, total_steps=8, **options)


@pytest.fixture
def train(random_batch):
    def run(policy, updates):
        for _ in range(updates):
            batch = random_batch(policy.updates, rows=4)
            update_policy(policy, batch, UPDATE, LossConfig(), np.random.default_rng(0))

    return run


def test_round_trip_goes_on_bit_for_bit(tmp_path, fresh_policy, train):
    whole = fresh_policy()
    train(whole, 5)
    first = fresh_policy()
    train(first, 3)
    torch.manual_seed(5)
    save_checkpoint(tmp_path, 3, {"default": first}, {"anything": [1, "two"]})
    drawn = torch.rand(3)
    second = fresh_policy(seed=1)
    step, state = load_checkpoint(list_checkpoints(tmp_path)[-1], {"default": second})
    assert (step, state) == (3, {"anything": [1, "two"]})
    assert torch.equal(torch.rand(3), drawn)
    train(second, 2)
    for (name, expected), (_, got) in zip(whole.weights(), second.weights(), strict=True):
        assert torch.equal(expected, got), name
    assert second.updates == 5
    assert second.schedule.get_last_lr() == whole.schedule.get_last_lr()


def test_reference_weights_come_back(tmp_path, fresh_policy, train):
    first = fresh_policy(with_reference=True)
    train(first, 1)
    save_checkpoint(tmp_path, 1, {"default": first}, {})
    second = fresh_policy(seed=1, with_reference=True)
    load_checkpoint(list_checkpoints(tmp_path)[0], {"default": second})
    for expected, got in zip(first.reference.parameters(), second.reference.parameters(), strict=True):
        assert torch.equal(expected, got)


def test_keeps_the_newest(tmp_path, fresh_policy):
    policy = fresh_policy()
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, {"default": policy}, {}, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002", "step_00000010"]


def test_pruning_spares_what_is_protected(tmp_path, fresh_policy):
    policy = fresh_policy()
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, {"default": policy}, {}, keep=1, protect=[2])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002", "step_00000004"]


def test_failure_while_writing_leaves_the_last_whole_one(tmp_path, monkeypatch, fresh_policy):
    policy = fresh_policy()
    save_checkpoint(tmp_path, 1, {"default": policy}, {})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, {"default": policy}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    load_checkpoint(list_checkpoints(tmp_path)[-1], {"default": policy})


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "format"])
def test_damage_is_told_and_changes_nothing(tmp_path, damage, fresh_policy):
    path = save_checkpoint(tmp_path, 1, {"default": fresh_policy()}, {})
    file = path / "policy-default.safetensors"
    content = file.read_bytes()
    match damage:
        case "flip":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "truncate":
            file.write_bytes(content[:100])
        case "remove":
            file.unlink()
        case "manifest":
            (path / "manifest.json").write_text("{")
        case "format":
            manifest = json.loads((path / "manifest.json").read_text())
            (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    policy = fresh_policy(seed=1)
    before = [tensor.clone() for _, tensor in policy.weights()]
    named = "manifest.json" if damage == "manifest" else "format 99" if damage == "format" else "policy-default"
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(path, {"default": policy})
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, policy.weights(), strict=True))


def test_another_model_or_policy_is_refused(tmp_path, fresh_policy):
    path = save_checkpoint(tmp_path, 1, {"default": fresh_policy()}, {})
    with pytest.raises(CheckpointError, match=r"holds policies \['default'\], the run has \['coder'\]"):
        load_checkpoint(path, {"coder": fresh_policy()})
    other = fresh_policy()
    other.model.model.norm.weight = torch.nn.Parameter(torch.ones(7))
    with pytest.raises(
        CheckpointError, match=r"1 tensors differ, first 'model.norm.weight': checkpoint \(32,\), model"
    ):
        load_weights(path, {"default": other})


def test_a_folder_half_written_never_counts(tmp_path, fresh_policy):
    path = save_checkpoint(tmp_path, 1, {"default": fresh_policy()}, {})
    shutil.copytree(path, tmp_path / ".step_00000002.tmp")
    (tmp_path / "step_00000003").mkdir()
    assert list_checkpoints(tmp_path) == [path]
