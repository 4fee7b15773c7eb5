"""Checkpoints: safetensors and one JSON manifest, written to a temporary folder and renamed.

A kill at any moment leaves the last whole checkpoint. Layout of ``checkpoints/step_00000010/``::

    manifest.json                 step, trainer state, the size and SHA-256 of every other file, and its own
    policy-default.safetensors    a policy's own weights, tied ones once; for an adapter only the adapter's
    base-default.safetensors      the base that adapters share, named after the first of them
    reference-default.safetensors the frozen model of a KL term
    optimizer-default.safetensors first and second moments and step counts, keyed "<parameter index>.<name>"
    rng.safetensors               the states of torch's generators

Each checkpoint is complete, but frozen weights (bases, references, policies that don't train) are on the disk only
once: they are hard-linked from the previous checkpoint (see :mod:`turnwise.train.checkpoint.files`).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.inference.weights.lora import AdaptedModel, SharedBase
from turnwise.train.checkpoint.files import (
    CheckpointError,
    CheckpointMismatch,
    FrozenFiles,
    fingerprint,
    read_manifest,
    read_tensors,
    sync_files,
    write_manifest,
    write_tensors,
)
from turnwise.train.checkpoint.run_state import generator_states, set_generator_states
from turnwise.train.model.policy import Policy, named_weights
from turnwise.utils.files import sync_folder

FORMAT = 4
WORLD_SIZE = 1
"""Number of processes that train; loading a checkpoint takes as many as wrote it."""
_PREFIX = "step_"

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "checkpoint_at",
    "ignored_checkpoints",
    "list_checkpoints",
    "load_checkpoint",
    "load_learners",
    "load_weights",
    "save_checkpoint",
]


def save_checkpoint(
    root: Path,
    step: int,
    policies: Mapping[str, Policy],
    state: Mapping[str, Any],
    keep: int = 2,
    protect: Collection[int] = (),
    attachments: Mapping[str, bytes] | None = None,
    links: Mapping[str, Path] | None = None,
) -> Path:
    """Write ``root/step_<step>`` completely or not at all, then delete all but the newest ``keep`` and ``protect``.

    ``protect`` holds the steps of checkpoints that stay. An existing checkpoint of this step is kept, because equal
    runs reach equal states. ``state`` must be JSON-serialisable. ``attachments`` are the bytes of other files by name;
    ``links`` are existing files that never change, by their names in the checkpoint. Raises ``OSError`` if the disk is
    full; older checkpoints then stay as they are.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = checkpoint_at(root, step)
    found = list_checkpoints(root)
    if final in found:
        return final
    for left in root.glob(f".{_PREFIX}*.tmp"):  # left by a kill during writing or deleting
        shutil.rmtree(left, ignore_errors=True)
    # Write all files to a temporary folder, and rename it at the end.
    temporary = root / f".{final.name}.tmp"
    temporary.mkdir()
    try:
        frozen = FrozenFiles(found[-1] if found else None)
        for name, source in (links or {}).items():
            frozen.take(source, temporary / name)
        manifest = _write_all(temporary, policies, attachments or {}, frozen)
        manifest |= {"step": step, "state": state}
        write_manifest(manifest, temporary)
        sync_files(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # Put the folder in place, then delete old checkpoints.
    if final.exists():
        _set_aside(final)
    temporary.rename(final)
    sync_folder(root)
    protected = {checkpoint_at(root, step) for step in protect}
    for old in list_checkpoints(root)[:-keep]:
        if old not in protected:
            doomed = old.rename(root / f".{old.name}.tmp")  # a kill in between leaves nothing that looks complete
            shutil.rmtree(doomed)
    return final


def _set_aside(folder: Path) -> None:
    """Rename ``folder``, which is not a checkpoint, to a free name: its files are kept, and its name becomes free."""
    names = (folder.with_name(f"{folder.name}.old{number or ''}") for number in itertools.count())
    folder.rename(next(name for name in names if not name.exists()))


def checkpoint_at(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step`` under ``root``, which may not exist."""
    return root / f"{_PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """List the checkpoints under ``root``, oldest first, without those of :func:`ignored_checkpoints`.

    A checkpoint with an unreadable manifest is included; loading it raises an error.
    """
    return sorted(path for path in root.glob(f"{_PREFIX}*") if _why_ignored(path) is None)


def ignored_checkpoints(root: Path) -> dict[Path, str]:
    """List folders under ``root`` that look like checkpoints but are not (copies, for example), with the reasons."""
    found = {path: _why_ignored(path) for path in sorted(root.glob(f"{_PREFIX}*"))}
    return {path: why for path, why in found.items() if why is not None}


def _why_ignored(path: Path) -> str | None:
    if not re.fullmatch(rf"{_PREFIX}\d{{8}}", path.name):
        return f"its name is not {_PREFIX!r} and eight digits"
    manifest = path / "manifest.json"
    try:
        about = manifest.stat()
    except OSError:
        return "it has no manifest.json"
    step = _step_of(manifest, about.st_mtime_ns, about.st_size)
    return f"its manifest is that of step {step}" if step not in (None, int(path.name.removeprefix(_PREFIX))) else None


@lru_cache(maxsize=1024)
def _step_of(manifest: Path, changed: int, size: int) -> int | None:
    """Return the step in a manifest, ``None`` if it is damaged. The cache avoids reading an unchanged file again."""
    try:
        return int(json.loads(manifest.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_checkpoint(path: Path, policies: Mapping[str, Policy]) -> tuple[int, dict[str, Any]]:
    """Restore ``policies`` and torch's generators from ``path``; returns ``(step, state)``.

    All files are checked before anything changes. Raises :class:`CheckpointError`.
    """
    step, state = load_learners(path, policies)
    set_generator_states(read_tensors(path / "rng.safetensors"))
    return step, state


def load_learners(path: Path, policies: Mapping[str, Policy]) -> tuple[int, dict[str, Any]]:
    """Load as :func:`load_checkpoint` does, but leave the random generators unchanged."""
    # Read and check everything before any weight changes.
    manifest = _checked_manifest(path, policies)
    _check_learners(path, policies, manifest)
    contents = _read_parts(path, _parts(policies, references=True), manifest)
    moments = {
        name: read_tensors(path / f"optimizer-{name}.safetensors") for name, p in policies.items() if p.optimizer
    }
    for part, saved in contents:
        _copy_into(part.weights(), saved)
    for name, policy in policies.items():
        _restore_optimizer(policy, moments.get(name), manifest["policies"][name])
    return manifest["step"], manifest["state"]


def load_weights(path: Path, policies: Mapping[str, Policy]) -> None:
    """Load only the weights of a checkpoint, for evaluation. Raises :class:`CheckpointError` before any change."""
    manifest = _checked_manifest(path, policies)
    for part, saved in _read_parts(path, _parts(policies, references=False), manifest):
        _copy_into(part.weights(), saved)


# ---------------------------------------------------------------------------------------------------------------------
# Contents of a checkpoint
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Part:
    """One file of weights. ``label`` names it in messages; a ``frozen`` part never changes in a run."""

    file: str
    label: str
    model: nn.Module | SharedBase
    frozen: bool

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return named_weights(self.model)


def _parts(policies: Mapping[str, Policy], *, references: bool) -> list[Part]:
    """Return each policy's own weights, and the shared bases and references once each."""
    named = sorted(policies.items())  # the order of a config file must not matter
    own = [Part(f"policy-{name}.safetensors", f"policy {name!r}", p.model, not p.trainable) for name, p in named]
    shared: dict[int, Part] = {}
    for name, policy in named:
        base, reference = policy.base, policy.reference
        if base is not None:
            shared.setdefault(id(base), Part(f"base-{name}.safetensors", f"the base of {name!r}", base, True))
        # an adapter's reference is its base with adapters off
        if references and reference is not None and not isinstance(reference, AdaptedModel):
            file = f"reference-{name}.safetensors"
            shared.setdefault(id(reference), Part(file, f"the reference of {name!r}", reference, True))
    return [*own, *shared.values()]


def _write_all(
    folder: Path, policies: Mapping[str, Policy], attachments: Mapping[str, bytes], frozen: FrozenFiles
) -> dict[str, Any]:
    """Write every file except the manifest, and return the manifest's entries for them."""
    write_tensors(generator_states(), folder / "rng.safetensors")
    for part in _parts(policies, references=True):
        weights = {key: tensor.contiguous() for key, tensor in part.weights()}
        if not (part.frozen and frozen.link(folder / part.file, weights)):
            write_tensors(weights, folder / part.file)
    for name, content in attachments.items():
        (folder / name).write_bytes(content)
    described = {name: _describe(policy, folder / f"optimizer-{name}.safetensors") for name, policy in policies.items()}
    files = {file.name: frozen.known.get(file.name) or fingerprint(file) for file in sorted(folder.iterdir())}
    return {
        "format": FORMAT,
        "world_size": WORLD_SIZE,
        "policies": described,
        "files": files,
        "frozen": frozen.digests,
    }


def _kind(policy: Policy) -> str:
    return "full" if policy.base is None else "lora" if policy.trained_parameters() else "base of adapters"


def _describe(policy: Policy, optimizer_file: Path) -> dict[str, Any]:
    """Write the moments of ``policy``'s optimizer to ``optimizer_file``, and return its entry in the manifest."""
    described: dict[str, Any] = {
        "kind": _kind(policy),
        "trainable": policy.trainable,
        "version": policy.version,
        "updates": policy.updates,
        "extra": policy.extra_state(),
    }
    if policy.optimizer is not None and policy.schedule is not None:
        saved = policy.optimizer.state_dict()
        moments = {f"{i}.{key}": value for i, slots in saved["state"].items() for key, value in slots.items()}
        write_tensors(moments, optimizer_file)
        described["schedule"] = {"last_epoch": policy.schedule.last_epoch}
    return described


def _copy_into(own: Iterable[tuple[str, Tensor]], saved: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in own:
            tensor.copy_(saved[name])


def _restore_optimizer(policy: Policy, moments: dict[str, Tensor] | None, described: dict[str, Any]) -> None:
    policy.version, policy.updates = described["version"], described["updates"]
    policy.load_extra_state(described["extra"])
    if moments is None or policy.optimizer is None or policy.schedule is None:
        return
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        index, slot = key.split(".", 1)
        state.setdefault(int(index), {})[slot] = tensor
    policy.optimizer.load_state_dict({"state": state, "param_groups": policy.optimizer.state_dict()["param_groups"]})
    policy.seek_schedule(described["schedule"]["last_epoch"])


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------
def _checked_manifest(path: Path, policies: Mapping[str, Policy]) -> dict[str, Any]:
    """Return the manifest after checks: its files are complete, and its processes and policies equal this run's."""
    manifest = read_manifest(path, FORMAT)
    if manifest["world_size"] != WORLD_SIZE:
        raise CheckpointMismatch(f"{path}: written by {manifest['world_size']} processes, this run has {WORLD_SIZE}")
    if set(manifest["policies"]) != set(policies):
        raise CheckpointMismatch(
            f"{path}: holds policies {sorted(manifest['policies'])}, the run has {sorted(policies)}"
        )
    for name, policy in policies.items():
        if (kind := manifest["policies"][name]["kind"]) != _kind(policy):
            raise CheckpointMismatch(
                f"{path}: policy {name!r} was saved as {kind!r}, the run has it as {_kind(policy)!r}"
            )
    return manifest


def _check_learners(path: Path, policies: Mapping[str, Policy], manifest: dict[str, Any]) -> None:
    """Require the same trainable policies, because a frozen policy saved no optimizer state to resume from."""
    words = {True: "trainable", False: "frozen"}
    for name, policy in policies.items():
        was = manifest["policies"][name]["trainable"]
        if was != policy.trainable:
            raise CheckpointMismatch(
                f"{path}: policy {name!r} was {words[was]} when it was saved, in this run it is "
                f"{words[policy.trainable]}"
            )


def _read_parts(path: Path, parts: Iterable[Part], manifest: dict[str, Any]) -> list[tuple[Part, dict[str, Tensor]]]:
    """Read the saved tensors of each part, and check them against its model by name and shape."""
    contents = []
    for part in parts:
        if part.file not in manifest["files"]:
            raise CheckpointMismatch(f"{path}: {part.label} was not saved: there is no {part.file}")
        saved = read_tensors(path / part.file)
        _check_fit(path, part, saved)
        contents.append((part, saved))
    return contents


def _check_fit(path: Path, part: Part, weights: dict[str, Tensor]) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in part.weights()}
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if own != saved:
        odd = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        first = odd[0]
        raise CheckpointMismatch(
            f"{path}: {part.label} doesn't fit the model: {len(odd)} tensors differ, first {first!r}: "
            f"checkpoint {saved.get(first, 'missing')}, model {own.get(first, 'missing')}"
        )
