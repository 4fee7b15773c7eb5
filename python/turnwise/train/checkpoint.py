"""Checkpoints: safetensors and one JSON manifest, written to a temporary folder and renamed.

A kill at any moment leaves the last whole checkpoint. Layout of ``checkpoints/step_000010/``::

    manifest.json                 step, trainer state, and the size and SHA-256 of every other file
    policy-default.safetensors    weights, tied ones once
    reference-default.safetensors the frozen starting weights, where a KL term needs them
    optimizer-default.safetensors first and second moments and step counts, keyed "<parameter index>.<name>"
    rng.safetensors               torch's generator state
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnwise.state.files import sync_folder
from turnwise.train.policy import Policy, named_weights

FORMAT = 1
_PREFIX = "step_"


class CheckpointError(RuntimeError):
    """A checkpoint that can't be read or doesn't fit the run: the message names the file and the reason."""


def save_checkpoint(
    root: Path,
    step: int,
    policies: Mapping[str, Policy],
    state: Mapping[str, Any],
    keep: int = 2,
    protect: Collection[int] = (),
    attachments: Mapping[str, bytes] | None = None,
) -> Path:
    """Write ``root/step_<step>`` whole or not at all, then delete all but the newest ``keep`` and those of ``protect``.

    A whole checkpoint of that step stays as it is: equal runs reach equal states. ``state`` must be JSON-serialisable;
    ``attachments`` are files of other kinds, by their names.
    Raises ``OSError`` when the disk is full; older checkpoints are then untouched.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = checkpoint_at(root, step)
    if final in list_checkpoints(root):
        return final
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_file({"torch": torch.get_rng_state()}, temporary / "rng.safetensors")
        described: dict[str, Any] = {}
        for name, policy in policies.items():
            described[name] = _save_policy(temporary, name, policy)
        for name, content in (attachments or {}).items():
            (temporary / name).write_bytes(content)
        files = {file.name: _fingerprint(file) for file in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "step": step, "policies": described, "state": state, "files": files}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _sync(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)  # a damaged one, without a manifest
    temporary.rename(final)
    sync_folder(root)
    protected = {checkpoint_at(root, step) for step in protect}
    for old in list_checkpoints(root)[:-keep]:
        if old not in protected:
            shutil.rmtree(old)
    return final


def checkpoint_at(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` stands under ``root``, or would."""
    return root / f"{_PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints under ``root``, oldest first. A folder without a manifest never counts."""
    return sorted(path for path in root.glob(f"{_PREFIX}*") if (path / "manifest.json").is_file())


def load_checkpoint(path: Path, policies: Mapping[str, Policy]) -> tuple[int, dict[str, Any]]:
    """Restore ``policies`` and torch's generator from ``path``; returns ``(step, state)``.

    Everything is read and checked before anything changes. Raises :class:`CheckpointError`.
    """
    manifest, weights = _read_weights(path, policies)
    moments = {name: _read(path / f"optimizer-{name}.safetensors") for name, p in policies.items() if p.optimizer}
    references = {name: _read(path / f"reference-{name}.safetensors") for name, p in policies.items() if p.reference}
    for name, policy in policies.items():
        _copy_into(policy.weights(), weights[name])
        if policy.reference is not None:
            _copy_into(named_weights(policy.reference), references[name])
        _restore_optimizer(policy, moments.get(name), manifest["policies"][name])
    torch.set_rng_state(_read(path / "rng.safetensors")["torch"])
    return manifest["step"], manifest["state"]


def load_weights(path: Path, policies: Mapping[str, Policy]) -> None:
    """Only the weights of a checkpoint, for evaluation. Raises :class:`CheckpointError` and changes nothing then."""
    _, weights = _read_weights(path, policies)
    for name, policy in policies.items():
        _copy_into(policy.weights(), weights[name])


def _read_weights(path: Path, policies: Mapping[str, Policy]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The manifest and the weights of each policy, checked against the models."""
    manifest = _read_manifest(path)
    if set(manifest["policies"]) != set(policies):
        raise CheckpointError(f"{path}: holds policies {sorted(manifest['policies'])}, the run has {sorted(policies)}")
    weights = {name: _read(path / f"policy-{name}.safetensors") for name in policies}
    for name, policy in policies.items():
        _check_fit(path, policy, weights[name])
    return manifest, weights


def _save_policy(folder: Path, name: str, policy: Policy) -> dict[str, Any]:
    save_file({key: tensor.contiguous() for key, tensor in policy.weights()}, folder / f"policy-{name}.safetensors")
    if policy.reference is not None:
        save_file(dict(named_weights(policy.reference)), folder / f"reference-{name}.safetensors")
    described: dict[str, Any] = {"version": policy.version, "updates": policy.updates, "extra": policy.extra_state()}
    if policy.optimizer is not None and policy.schedule is not None:
        saved = policy.optimizer.state_dict()
        moments = {f"{i}.{key}": value for i, slots in saved["state"].items() for key, value in slots.items()}
        save_file(moments, folder / f"optimizer-{name}.safetensors")
        described["param_groups"] = saved["param_groups"]
        described["schedule"] = {k: v for k, v in policy.schedule.state_dict().items() if k != "lr_lambdas"}
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
    policy.optimizer.load_state_dict({"state": state, "param_groups": described["param_groups"]})
    policy.schedule.load_state_dict({**policy.schedule.state_dict(), **described["schedule"]})


def _check_fit(path: Path, policy: Policy, weights: dict[str, Tensor]) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in policy.weights()}
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if own != saved:
        odd = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        first = odd[0]
        raise CheckpointError(
            f"{path}: policy {policy.name!r} doesn't fit the model: {len(odd)} tensors differ, first {first!r}: "
            f"checkpoint {saved.get(first, 'missing')}, model {own.get(first, 'missing')}"
        )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'manifest.json'} can't be read: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {manifest.get('format')!r}; this version reads format {FORMAT}")
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if _fingerprint(file) != expected:
            raise CheckpointError(f"{file} is damaged: its size or SHA-256 differs from the manifest's")
    return manifest


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error


def _fingerprint(file: Path) -> list[Any]:
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)
