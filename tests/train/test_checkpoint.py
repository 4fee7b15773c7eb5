from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from turnwise.inference.weights.lora import SharedBase
from turnwise.train.checkpoint import files as checkpoint_files
from turnwise.train.checkpoint import progress
from turnwise.train.checkpoint.checkpoint import load_checkpoint, load_weights, save_checkpoint
from turnwise.train.checkpoint.files import CheckpointError, write_manifest
from turnwise.train.checkpoint.listing import ignored_checkpoints, list_checkpoints
from turnwise.train.checkpoint.progress import find_checkpoint
from turnwise.train.config.optimization import KLConfig, LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model.loading import peft_config
from turnwise.train.model.policy import Policy
from turnwise.train.update.update import update_policy

from ..trained import equal

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
    first = fresh_policy(with_reference=True)
    train(first, 3)
    torch.manual_seed(5)
    save_checkpoint(tmp_path, 3, {"default": first}, {"anything": [1, "two"], "by_step": {2: "b", 10: "a"}})
    drawn = torch.rand(3)
    second = fresh_policy(seed=1, with_reference=True)
    step, state = load_checkpoint(list_checkpoints(tmp_path)[-1], {"default": second})
    assert (step, state) == (3, {"anything": [1, "two"], "by_step": {"2": "b", "10": "a"}})
    assert equal(first.reference.state_dict(), second.reference.state_dict())
    assert torch.equal(torch.rand(3), drawn)
    train(second, 2)
    assert equal(dict(whole.weights()), dict(second.weights()))
    assert second.updates == 5
    assert second.learning_rate == whole.learning_rate


def test_old_ones_go_except_for_those_that_are_protected(tmp_path, fresh_policy):
    policy = fresh_policy()
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path, step, {"default": policy}, {}, keep=2, protect=[1])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001", "step_00000003", "step_00000010"]


@pytest.mark.parametrize("which", ["newest", "step_00000001"])
def test_one_that_is_being_read_stays_until_its_reader_has_ended(tmp_path, fresh_policy, monkeypatch, which):
    monkeypatch.setattr(checkpoint_files, "_held", {})
    policy = {"default": fresh_policy()}
    save_checkpoint(tmp_path, 1, policy, {}, keep=1)
    read = find_checkpoint(tmp_path, which)
    for step in (2, 3):
        save_checkpoint(tmp_path, step, policy, {}, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001", "step_00000003"]
    load_weights(read, policy)
    os.close(checkpoint_files._held.pop(read))  # as at the end of the reader's process
    save_checkpoint(tmp_path, 4, policy, {}, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000004"]
    assert not checkpoint_files.hold(read)


def test_one_that_goes_between_its_listing_and_its_reading_is_not_chosen(tmp_path, fresh_policy, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_held", {})
    policy = {"default": fresh_policy()}
    save_checkpoint(tmp_path, 1, policy, {}, keep=1)

    def hold(path):
        if path.name == "step_00000001":
            save_checkpoint(tmp_path, 2, policy, {}, keep=1)
        return checkpoint_files.hold(path)

    monkeypatch.setattr(progress, "hold", hold)
    assert find_checkpoint(tmp_path, "newest").name == "step_00000002"


def test_a_folder_that_is_no_checkpoint_is_ignored_and_stays(tmp_path, fresh_policy):
    """``step_00000002 (copy)`` was the newest, and a folder of a later step's name was deleted when that step came."""
    policy = fresh_policy()
    two = save_checkpoint(tmp_path, 2, {"default": policy}, {})
    copies = ("step_00000002 (copy)", "step_00000002.bak", "step_2")
    why = dict.fromkeys(copies, "its name is not 'step_' and eight digits")
    why |= {"step_00000003": "its manifest is that of step 2", "step_00000001": "it has no manifest.json"}
    for name in (*why, ".step_00000004.tmp"):
        if name == "step_00000001":
            (tmp_path / name).mkdir()
        else:
            shutil.copytree(two, tmp_path / name)
        (tmp_path / name / "notes.txt").write_text("mine")
    assert list_checkpoints(tmp_path) == [two]
    assert ignored_checkpoints(tmp_path) == {tmp_path / name: reason for name, reason in why.items()}
    one, three = (save_checkpoint(tmp_path, step, {"default": policy}, {}, keep=9) for step in (1, 3))
    assert list_checkpoints(tmp_path) == [one, two, three] and load_checkpoint(three, {"default": policy})[0] == 3
    assert sum(path.read_text() == "mine" for path in tmp_path.glob("step_*/notes.txt")) == len(why)
    assert (tmp_path / "step_00000001.old" / "notes.txt").exists()


def test_a_kill_while_pruning_leaves_nothing_that_looks_whole(tmp_path, fresh_policy, monkeypatch):
    policy = fresh_policy()
    save_checkpoint(tmp_path, 1, {"default": policy}, {}, keep=1)

    def killed(folder, **options):
        if folder.name == ".step_00000001.tmp":
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, {"default": policy}, {}, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002"]
    monkeypatch.undo()
    save_checkpoint(tmp_path, 3, {"default": policy}, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"], "what the kill left goes with the next"


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")],
    ids=["os", "safetensors"],
)
def test_failure_while_writing_leaves_the_last_whole_one(tmp_path, monkeypatch, fresh_policy, error):
    policy = fresh_policy()
    save_checkpoint(tmp_path, 1, {"default": policy}, {})

    write, written = checkpoint_files.save_file, []

    def full(tensors, file):
        write(tensors, file)
        written.append(file)
        if len(written) == 2:
            raise error

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, {"default": policy}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    load_checkpoint(list_checkpoints(tmp_path)[-1], {"default": policy})


def test_another_model_or_policy_is_refused(tmp_path, fresh_policy):
    path = save_checkpoint(tmp_path, 1, {"default": fresh_policy()}, {})
    with pytest.raises(CheckpointError, match=r"policies \['default'\], the run has \['coder'\]"):
        load_checkpoint(path, {"coder": fresh_policy()})
    other = fresh_policy()
    other.model.model.norm.weight = torch.nn.Parameter(torch.ones(7))
    with pytest.raises(
        CheckpointError, match=r"1 tensors differ, first 'model.norm.weight': checkpoint \(32,\), model"
    ):
        load_weights(path, {"default": other})


# ---------------------------------------------------------------------------------------------------------------------
# Adapters, and what stands on the disk once
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def fresh_team(small_model):
    """An adapter that trains, one that doesn't, their plain base, and a frozen model with a path of its own."""

    def build(seed=0, rank=2):
        models = {name: small_model(seed)[0] for name in ("base", "rival")}
        shared = SharedBase(models["base"])
        lora = {name: shared.add_adapter(name, peft_config(LoraConfig(rank=rank)), seed) for name in ("a", "b")}
        trained = {
            name: Policy(name, model, UPDATE, total_steps=8, with_reference=True) for name, model in lora.items()
        }
        frozen = {
            name: Policy(name, model, UPDATE, total_steps=8, trainable=False)
            for name, model in {"plain": shared.plain(), "rival": models["rival"]}.items()
        }
        return {**trained, **frozen}

    return build


def train_team(team, batch, seed):
    loss = LossConfig(kl=KLConfig(coef=0.1))
    for policy in team.values():
        rows = batch(seed, rows=24, policies=tuple(team))
        update_policy(policy, rows, UPDATE, loss, np.random.default_rng(0))


def all_weights(team):
    return {(name, key): tensor.clone() for name, policy in team.items() for key, tensor in policy.all_weights()}


def test_a_team_of_adapters_goes_on_bit_for_bit(tmp_path, fresh_team, random_batch):
    whole, first = fresh_team(), fresh_team()
    for seed in range(2):
        train_team(whole, random_batch, seed)
        train_team(first, random_batch, seed)
    save_checkpoint(tmp_path, 2, first, {})
    second = fresh_team(seed=1)
    load_checkpoint(list_checkpoints(tmp_path)[-1], second)
    for team in (whole, second):
        train_team(team, random_batch, 2)
    expected = all_weights(whole)
    assert equal(all_weights(second), expected)
    fresh = all_weights(fresh_team())
    moved = {name for (name, key), tensor in fresh.items() if not torch.equal(tensor, expected[name, key])}
    assert moved == {"a", "b"}
    fresh = fresh_team(seed=1)
    load_weights(list_checkpoints(tmp_path)[-1], fresh)
    assert equal(all_weights(fresh), all_weights(first))


def test_what_is_frozen_is_linked_and_all_else_written(tmp_path, fresh_team, random_batch):
    team = fresh_team()
    paths = []
    for step in (1, 2, 3):
        paths.append(save_checkpoint(tmp_path, step, team, {}, keep=2))
        train_team(team, random_batch, step)
    assert not paths[0].exists()
    names = {file.name for file in paths[2].iterdir()}
    assert names == {
        "manifest.json", "rng.safetensors", "base-a.safetensors", "optimizer-a.safetensors", "optimizer-b.safetensors",
        "policy-a.safetensors", "policy-b.safetensors", "policy-plain.safetensors", "policy-rival.safetensors",
    }  # fmt: skip
    shared = {name for name in names if (paths[1] / name).samefile(paths[2] / name)}
    assert shared == {"base-a.safetensors", "policy-plain.safetensors", "policy-rival.safetensors"}
    assert load_file(paths[2] / "policy-a.safetensors").keys() == dict(team["a"].weights()).keys()
    load_checkpoint(paths[2], fresh_team(seed=1))
    # one that is not what it was is written anew
    with torch.no_grad():
        team["rival"].model.model.norm.weight[0] += 1e-6
    last = save_checkpoint(tmp_path, 4, team, {})
    assert not (last / "policy-rival.safetensors").samefile(paths[2] / "policy-rival.safetensors")
    assert (last / "base-a.safetensors").samefile(paths[2] / "base-a.safetensors")
    load_checkpoint(last, team)


def test_without_links_what_is_frozen_is_copied(tmp_path, fresh_team, monkeypatch):
    def refuse(*args):
        raise PermissionError("no links here")

    team = fresh_team()
    first = save_checkpoint(tmp_path, 1, team, {})
    monkeypatch.setattr(checkpoint_files.os, "link", refuse)
    second = save_checkpoint(tmp_path, 2, team, {})
    assert not (first / "base-a.safetensors").samefile(second / "base-a.safetensors")
    load_checkpoint(second, fresh_team(seed=1))


DAMAGES = {
    **{f"{file}.safetensors": None for file in ("base-a", "policy-a", "optimizer-b", "policy-rival", "rng")},
    "policy-a.safetensors, cut off": lambda content: content[:100],
    "policy-a.safetensors, gone": None,
    "manifest.json, no JSON": lambda content: b"{",
    # Also of the digest of a file that the next checkpoint would link.
    "manifest.json, a digit": lambda content: content.replace(b"17", b"18"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_and_changes_nothing(tmp_path, fresh_team, damage):
    """Nor is it in the way of the next checkpoint."""
    path = save_checkpoint(tmp_path, 1, fresh_team(), {"seconds": {"1": 17, "10": 2.5}})
    file = path / damage.partition(",")[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes((DAMAGES[damage] or bytes)(file.read_bytes() if DAMAGES[damage] else content))
    if damage.endswith("gone"):
        file.unlink()
    team = fresh_team(seed=1)
    before = all_weights(team)
    with pytest.raises(CheckpointError, match=file.name + ("" if damage.endswith(("gone", "JSON")) else " is damaged")):
        load_checkpoint(path, team)
    assert equal(all_weights(team), before)
    load_checkpoint(save_checkpoint(tmp_path, 2, team, {}), team)


def test_another_run_is_refused_by_name_and_nothing_changes(tmp_path, fresh_team, small_model):
    path = save_checkpoint(tmp_path, 1, fresh_team(), {})
    content = {file.name: file.read_bytes() for file in path.iterdir()}
    full, thawed, wider, unheld = fresh_team(seed=1), fresh_team(seed=1), fresh_team(seed=1, rank=3), fresh_team(seed=1)
    full["a"] = Policy("a", small_model(1)[0], UPDATE, total_steps=8)
    thawed["rival"] = Policy("rival", small_model(1)[0], UPDATE, total_steps=8)
    unheld["rival"].reference = small_model(1)[0]
    for team, message in (
        (full, "policy 'a' was saved as 'lora', in this run it is 'full'"),
        (thawed, "policy 'rival' was saved as frozen, in this run it is trainable"),
        (wider, r"policy 'a' doesn't fit the model: .*lora_A"),
        (unheld, "the reference of 'rival' was not saved"),
    ):
        before = all_weights(team)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, team)
        assert equal(all_weights(team), before)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    write_manifest({**manifest, "format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99; expected format 4 or 5"):
        load_checkpoint(path, fresh_team())
    del content["manifest.json"]
    assert all((path / name).read_bytes() == bytes_ for name, bytes_ in content.items())
