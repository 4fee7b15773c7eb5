from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from turnwise.inference.weights.lora import SharedBase
from turnwise.train.checkpoint import files as checkpoint_files
from turnwise.train.checkpoint.checkpoint import (
    CheckpointError,
    ignored_checkpoints,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from turnwise.train.checkpoint.files import write_manifest
from turnwise.train.config.optimization import KLConfig, LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model.loading import peft_config
from turnwise.train.model.policy import Policy
from turnwise.train.update.update import update_policy

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


@pytest.mark.parametrize("copy", ["step_00000002 (copy)", "step_00000002.bak", "step_00000003", "step_2"])
def test_a_copied_folder_is_no_checkpoint_and_stays(tmp_path, fresh_policy, copy):
    """``step_00000002 (copy)`` was the newest, and a folder of a later step's name was deleted when that step came."""
    policy = fresh_policy()
    two = save_checkpoint(tmp_path, 2, {"default": policy}, {})
    shutil.copytree(two, tmp_path / copy)
    (tmp_path / copy / "notes.txt").write_text("mine")
    assert list_checkpoints(tmp_path) == [two]
    why = "its manifest is that of step 2" if copy == "step_00000003" else "its name is not 'step_' and eight digits"
    assert ignored_checkpoints(tmp_path) == {tmp_path / copy: why}
    three = save_checkpoint(tmp_path, 3, {"default": policy}, {})
    assert list_checkpoints(tmp_path) == [two, three] and load_checkpoint(three, {"default": policy})[0] == 3
    assert [path.read_text() for path in tmp_path.glob("*/notes.txt")] == ["mine"]


def test_a_folder_without_a_manifest_gives_way_but_stays(tmp_path, fresh_policy):
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "policy-default.safetensors").write_bytes(b"mine")
    assert ignored_checkpoints(tmp_path) == {tmp_path / "step_00000001": "it has no manifest.json"}
    path = save_checkpoint(tmp_path, 1, {"default": fresh_policy()}, {})
    assert list_checkpoints(tmp_path) == [path]
    assert (tmp_path / "step_00000001.old" / "policy-default.safetensors").read_bytes() == b"mine"


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


def test_pruning_spares_what_is_protected(tmp_path, fresh_policy):
    policy = fresh_policy()
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, {"default": policy}, {}, keep=1, protect=[2])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002", "step_00000004"]


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


def test_a_full_disk_leaves_the_last_whole_one(tmp_path, fresh_policy):
    """A real one, of a few hundred kilobytes, where this process may mount it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can't be mounted here")
    try:
        policy = fresh_policy()
        size = sum(tensor.nbytes for _, tensor in policy.weights())
        assert 2 * size > 200_000, "two checkpoints must not fit"
        path = save_checkpoint(disk, 1, {"default": policy}, {}, attachments={"filler": bytes(400_000 - size)})
        with pytest.raises(OSError, match=r"No space left|os error 28"):
            save_checkpoint(disk, 2, {"default": policy}, {}, attachments={"filler": bytes(200_000)})
        assert list(disk.iterdir()) == [path]
        load_checkpoint(path, {"default": policy})
    finally:
        subprocess.run(["umount", str(disk)], check=True)


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
    assert all(torch.equal(tensor, expected[key]) for key, tensor in all_weights(second).items())
    fresh = all_weights(fresh_team())
    moved = {name for (name, key), tensor in fresh.items() if not torch.equal(tensor, expected[name, key])}
    assert moved == {"a", "b"}
    fresh = fresh_team(seed=1)
    load_weights(list_checkpoints(tmp_path)[-1], fresh)
    assert all(torch.equal(t, all_weights(first)[key]) for key, t in all_weights(fresh).items())


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


def test_a_damaged_checkpoint_is_no_obstacle_to_the_next(tmp_path, fresh_team):
    team = fresh_team()
    (save_checkpoint(tmp_path, 1, team, {}) / "manifest.json").write_text("[")
    load_checkpoint(save_checkpoint(tmp_path, 2, team, {}), team)


def test_another_run_is_refused_by_name_and_nothing_changes(tmp_path, fresh_team, small_model):
    path = save_checkpoint(tmp_path, 1, fresh_team(), {})
    content = {file.name: file.read_bytes() for file in path.iterdir()}
    full, thawed, wider, unheld = fresh_team(seed=1), fresh_team(seed=1), fresh_team(seed=1, rank=3), fresh_team(seed=1)
    full["a"] = Policy("a", small_model(1)[0], UPDATE, total_steps=8)
    thawed["rival"] = Policy("rival", small_model(1)[0], UPDATE, total_steps=8)
    unheld["rival"].reference = small_model(1)[0]
    for team, message in (
        (full, "policy 'a' was saved as 'lora', the run has it as 'full'"),
        (thawed, "policy 'rival' was frozen when it was saved, in this run it is trainable"),
        (wider, r"policy 'a' doesn't fit the model: .*lora_A"),
        (unheld, "the reference of 'rival' was not saved"),
    ):
        before = all_weights(team)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, team)
        assert all(torch.equal(tensor, before[key]) for key, tensor in all_weights(team).items())
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    write_manifest({**manifest, "format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99; this version reads format 4 and 5"):
        load_checkpoint(path, fresh_team())
    del content["manifest.json"]
    assert all((path / name).read_bytes() == bytes_ for name, bytes_ in content.items())


@pytest.mark.parametrize("file", ["base-a", "policy-a", "optimizer-b", "policy-rival", "rng"])
def test_a_flipped_byte_anywhere_is_found(tmp_path, fresh_team, file):
    path = save_checkpoint(tmp_path, 1, fresh_team(), {}) / f"{file}.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    team = fresh_team(seed=1)
    before = all_weights(team)
    with pytest.raises(CheckpointError, match=rf"{file}.safetensors is damaged"):
        load_checkpoint(path.parent, team)
    assert all(torch.equal(tensor, before[key]) for key, tensor in all_weights(team).items())


def test_a_changed_digit_of_the_manifest_is_found(tmp_path, fresh_policy):
    path = save_checkpoint(tmp_path, 1, {"default": fresh_policy()}, {"seconds": {"1": 17, "10": 2.5}})
    assert load_checkpoint(path, {"default": fresh_policy()})[1] == {"seconds": {"1": 17, "10": 2.5}}
    file = path / "manifest.json"
    file.write_text(file.read_text().replace("17", "18"))
    policy = fresh_policy(seed=1)
    before = [tensor.clone() for _, tensor in policy.weights()]
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        load_checkpoint(path, {"default": policy})
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, policy.weights(), strict=True))


def test_a_manifest_with_numbered_keys_is_read_back(tmp_path, fresh_policy):
    path = save_checkpoint(tmp_path, 1, {"default": fresh_policy()}, {"by_step": {2: "b", 10: "a"}})
    assert load_checkpoint(path, {"default": fresh_policy()})[1] == {"by_step": {"2": "b", "10": "a"}}
