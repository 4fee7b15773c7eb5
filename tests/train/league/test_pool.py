from __future__ import annotations

import json

import pytest
import torch

from turnwise.train.checkpoint.files import CheckpointError
from turnwise.train.league.pool import OpponentSlots, Pool, Snapshot, slot_name, slot_names


class Weights:
    """As much of a policy as a pool asks for."""

    def __init__(self, value, version=0):
        self.value, self.version = value, version

    def weights(self):
        return [("w", torch.full((3,), float(self.value)))]


class Learner:
    """As much of a learner as a pool asks for."""

    def __init__(self, **policies):
        self.policies = policies

    def send(self, name, receive):
        return receive(self.policies[name].weights())


def add(pool, step, **policies):
    return pool.add(step, Learner(**policies), policies)


class Client:
    def __init__(self):
        self.loads = []

    def load_weights(self, policy, weights, version):
        self.loads.append((policy, float(dict(weights)["w"][0]), version))


def filled(folder, size, steps):
    pool = Pool(folder, size)
    gone = [add(pool, step, a=Weights(step, version=step + 1), b=Weights(-step)) for step in steps]
    return pool, gone


def test_the_newest_stay_and_files_outlast_their_members_by_one_snapshot(tmp_path):
    """A batch that was drawn before a member went may still load it."""
    pool, gone = filled(tmp_path, 2, (0, 5, 10))
    assert [member.step for member in pool.members] == [5, 10] and [m.step for m in gone[-1]] == [0]
    assert pool.members[0] == Snapshot(5, {"a": 6, "b": 0})
    assert (tmp_path / Snapshot(0, {}).file("a")).exists() and Snapshot(0, {}).file("a") not in pool.files()
    add(pool, 15, a=Weights(15), b=Weights(0))
    assert not (tmp_path / Snapshot(0, {}).file("a")).exists() and (tmp_path / Snapshot(5, {}).file("b")).exists()
    assert pool.weights(pool.members[-1], "a")["w"].tolist() == [15.0] * 3
    assert slot_names(["a", "b"], 2) == {"a@past0": "a", "a@past1": "a", "b@past0": "b", "b@past1": "b"}
    assert slot_name("a", 1) == "a@past1"


def test_a_checkpoint_brings_back_what_is_missing(tmp_path):
    pool, _ = filled(tmp_path / "pool", 4, (0, 5))
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    for name, file in pool.files().items():
        (saved / name).write_bytes(file.read_bytes())
    state = json.loads(json.dumps(pool.state_dict()))
    add(pool, 10, a=Weights(10), b=Weights(10))
    lost = next(iter(pool.files().values()))
    content = lost.read_bytes()
    lost.write_bytes(b"cut off")
    again = Pool(tmp_path / "pool", 4)
    again.load_state_dict(state, saved)
    assert [member.step for member in again.members] == [0, 5] and lost.read_bytes() == content
    assert sorted(path.name for path in (tmp_path / "pool").iterdir()) == sorted(again.files())
    (saved / lost.name).unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} is missing"):
        again.load_state_dict(state, saved)


def test_slots_load_what_they_do_not_hold(tmp_path):
    pool, _ = filled(tmp_path, 4, (1, 2))
    client = Client()
    slots = OpponentSlots(client, ["a", "b"], 2)
    first, second = pool.members
    for slot, member in ((0, first), (0, first), (1, second), (0, second)):
        slots.load(slot, member, pool)
    assert client.loads == [
        ("a@past0", 1.0, 2), ("b@past0", -1.0, 0), ("a@past1", 2.0, 3), ("b@past1", -2.0, 0),
        ("a@past0", 2.0, 3), ("b@past0", -2.0, 0),
    ]  # fmt: skip


def test_a_slot_whose_load_failed_is_loaded_again(tmp_path):
    """Of two policies one may be another member's by then."""
    pool, _ = filled(tmp_path, 4, (1, 2))
    client = Client()
    slots, load = OpponentSlots(client, ["a", "b"], 1), client.load_weights
    first, second = pool.members
    slots.load(0, first, pool)

    def fails_for_b(policy, weights, version):
        if policy == "b@past0":
            raise OSError("gone")
        load(policy, weights, version)

    client.load_weights = fails_for_b
    with pytest.raises(OSError, match="gone"):
        slots.load(0, second, pool)
    client.load_weights = load
    slots.load(0, first, pool)
    assert client.loads[-2:] == [("a@past0", 1.0, 2), ("b@past0", -1.0, 0)]
