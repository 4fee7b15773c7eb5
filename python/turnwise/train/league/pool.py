"""The pool of past policies: snapshots in files that never change, and the client's slots that hold some of them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from turnwise.train.checkpoint.files import CheckpointError, read_tensors, write_tensors
from turnwise.train.learner.learner import Learner, Weights
from turnwise.types import InferenceClient
from turnwise.utils.files import link_or_copy, replacement

LIVE = "live"
"""Name of the policies that train, in a league's matrix."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of all trained policies after ``step`` steps, with the version of each.

    Example: ``Snapshot(20, {"default": 20})``
    """

    step: int
    versions: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"step {self.step}"

    def file(self, policy: str) -> str:
        """Return the file name of one of its policies."""
        return f"league-{self.step:08d}-{policy}.safetensors"


class Pool:
    """The members, oldest first, at most ``size`` of them. Their weights are in ``folder``."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.members: list[Snapshot] = []
        self._leaving: list[Snapshot] = []  # a batch drawn before they left may still load them

    def add(self, step: int, learner: Learner, policies: Iterable[str]) -> list[Snapshot]:
        """Add a snapshot of the learner's ``policies``, and return the members that leave the pool for it."""
        member = Snapshot(step, {name: learner.policies[name].version for name in policies})
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in member.versions:
            target = self.folder / member.file(name)
            with replacement(target) as partial:
                learner.send(name, functools.partial(_write, partial))
        self.members.append(member)
        self._leaving, self.members = self.members[: -self.size], self.members[-self.size :]
        self._delete_others()
        return self._leaving

    def weights(self, member: Snapshot, policy: str) -> dict[str, Tensor]:
        """Return one policy's own weights; for an adapter only the adapter's."""
        return read_tensors(self.folder / member.file(policy))

    def files(self) -> dict[str, Path]:
        """Return every member's files by their names."""
        return {name: self.folder / name for name in sorted(_files_of(self.members))}

    def state_dict(self) -> dict[str, Any]:
        return {"members": [{"step": member.step, "versions": dict(member.versions)} for member in self.members]}

    def load_state_dict(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Restore the members from ``checkpoint``, and delete all other members' files in the folder."""
        self.members = [Snapshot(entry["step"], entry["versions"]) for entry in state["members"]]
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, target in self.files().items():
            _put_in_place(checkpoint / name, target)
        self._delete_others()

    def _delete_others(self) -> None:
        kept = _files_of([*self._leaving, *self.members])
        for file in self.folder.glob("*league-*"):
            if file.name not in kept:
                file.unlink()


def members_in(folder: Path, policies: Collection[str]) -> dict[int, dict[str, Path]]:
    """Find the members with files in ``folder``, a pool's folder or a checkpoint: each policy's file, by step.

    Only members with a file for each of ``policies``, the trained ones, and no others, are included.
    """
    members: dict[int, dict[str, Path]] = {}
    for file in folder.glob("league-*.safetensors"):
        step, policy = file.stem.removeprefix("league-").split("-", 1)
        members.setdefault(int(step), {})[policy] = file
    return {step: files for step, files in members.items() if files.keys() == set(policies)}


def _write(file: Path, weights: Weights) -> None:
    write_tensors({key: tensor.contiguous() for key, tensor in weights}, file)


def _files_of(members: Iterable[Snapshot]) -> set[str]:
    return {member.file(policy) for member in members for policy in member.versions}


class OpponentSlots:
    """Slots for frozen weights in the client, ``count`` for each of ``policies``, from which a pool's members play."""

    def __init__(self, client: InferenceClient, policies: Iterable[str], count: int) -> None:
        self.client, self.policies = client, tuple(policies)
        self._loaded: list[Snapshot | None] = [None] * count

    def load(self, slot: int, member: Snapshot, pool: Pool) -> None:
        """Load ``member`` into ``slot``, unless it is already there."""
        if self._loaded[slot] != member:
            self._loaded[slot] = None
            for policy in self.policies:
                weights = pool.weights(member, policy)
                self.client.load_weights(slot_name(policy, slot), weights.items(), member.versions[policy])
            self._loaded[slot] = member


def slot_name(policy: str, slot: int) -> str:
    """Return the client's name for a slot of ``policy``'s past; no policy of a config can have this name."""
    return f"{policy}@past{slot}"


def slot_names(policies: Sequence[str], count: int) -> dict[str, str]:
    """Return every slot's name, with the policy whose past weights it holds."""
    return {slot_name(policy, slot): policy for policy in policies for slot in range(count)}


def _put_in_place(source: Path, target: Path) -> None:
    """Make ``target`` a link or copy of ``source``, complete or not at all."""
    if not source.is_file():
        raise CheckpointError(f"{source} is missing")
    if target.exists() and target.samefile(source):
        return
    with replacement(target) as partial:
        partial.unlink()
        link_or_copy(source, partial)
