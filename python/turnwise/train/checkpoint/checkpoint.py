"""Checkpoints: safetensors and one JSON manifest, written to a temporary folder and renamed.

A kill at any moment leaves the last complete checkpoint. Layout of ``checkpoints/step_00000010/``::

    manifest.json                 step, trainer state, the size and SHA-256 of every other file, and its own
    policy-default.safetensors    a policy's own weights, tied ones once, float32 if they train in bfloat16; for an
                                  adapter without its base
    base-default.safetensors      the base that adapters share, named after the first of them
    reference-default.safetensors the frozen model of a KL term
    critic-default.safetensors    the value head of a policy, if critics train
    optimizer-default.safetensors first and second moments and step counts, keyed "<parameter index>.<name>"
    rng.safetensors               the states of torch's generators

If several processes train, weights and optimizers are in the files of ``torch.distributed.checkpoint`` instead, which
:mod:`turnwise.train.checkpoint.shards` reads in any number of processes::

    .metadata, __0_0.distcp, ...  the tensors, one file per rank; frozen weights in each checkpoint
    rng.safetensors, rng-1...     the states of torch's generators, one file per rank

If a server trains (:mod:`turnwise.train.learner.tinker`), it holds the tensors, and ``tinker.json`` has their paths.

Each checkpoint is complete, but frozen weights (bases, references, policies that don't train) are on the disk only
once: they are hard-linked from the previous checkpoint (see :mod:`turnwise.train.checkpoint.files`).
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.train.checkpoint.files import (
    CheckpointMismatch,
    FrozenFiles,
    delete_unless_held,
    fingerprint,
    read_manifest,
    read_tensors,
    sync_files,
    write_manifest,
    write_tensors,
)
from turnwise.train.checkpoint.listing import PREFIX, checkpoint_at, list_checkpoints
from turnwise.train.checkpoint.run_state import generator_states, set_generator_states
from turnwise.train.checkpoint.shards import check_shards, read_shards, read_whole
from turnwise.train.checkpoint.weight_sets import WeightSet, check_fit, shard_like, weight_sets_of
from turnwise.train.model.policy import Policy
from turnwise.train.terms.registry import terms_of
from turnwise.utils.files import sync_folder

FORMAT, SHARDED_FORMAT = 4, 5
"""Formats of checkpoints with whole tensors, and with shards."""
FORMATS = (FORMAT, SHARDED_FORMAT)


def save_checkpoint(
    root: Path,
    step: int,
    policies: Mapping[str, Policy],
    state: Mapping[str, Any],
    keep: int = 2,
    protect: Collection[int] = (),
    attachments: Mapping[str, bytes] | None = None,
    links: Mapping[str, Path] | None = None,
    write: Callable[[Path], Callable[[], None]] | None = None,
    later: Callable[[Callable[[], None]], object] | None = None,
    kind: int = SHARDED_FORMAT,
) -> Path:
    """Write ``root/step_<step>`` completely or not at all, then delete all but the newest ``keep`` and ``protect``.

    ``protect`` holds the steps of checkpoints that stay. An existing checkpoint of this step is kept, because equal
    runs reach equal states. ``state`` must be JSON-serialisable. ``attachments`` are the bytes of other files by name;
    ``links`` are existing files that never change, by their names in the checkpoint. Raises ``OSError`` if the disk is
    full; older checkpoints then stay as they are.

    ``write(folder)`` begins to write the tensors in shards, and returns a function that waits until they are written
    (:func:`~turnwise.train.checkpoint.shards.write_shards`); by default they are whole. ``kind`` is the
    format of what it writes. ``later(finish)`` may call ``finish`` in another thread, which completes the checkpoint;
    by default it is called at once.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = checkpoint_at(root, step)
    complete = list_checkpoints(root)
    if final in complete:
        return final
    for incomplete in root.glob(f".{PREFIX}*.tmp"):  # left by a kill during writing or deleting
        shutil.rmtree(incomplete, ignore_errors=True)
    # Write all files to a temporary folder, and rename it at the end.
    temporary = root / f".{final.name}.tmp"
    temporary.mkdir()
    frozen = FrozenFiles(complete[-1] if complete else None)
    try:
        for name, source in (links or {}).items():
            frozen.take(source, temporary / name)
        written = (write or partial(_write_whole, policies=policies, frozen=frozen))(temporary)
        for name, content in (attachments or {}).items():
            (temporary / name).write_bytes(content)
        manifest = {
            "format": kind if write else FORMAT,
            "world_size": max(policy.ranks.size for policy in policies.values()),
            "policies": {name: describe_progress(policy) for name, policy in policies.items()},
            "frozen": frozen.digests,
            "step": step,
            "state": json.loads(json.dumps(state)),  # a copy, as the run changes it before finish()
        }
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise

    def finish() -> None:
        try:
            written()
            files = sorted(temporary.iterdir())
            manifest["files"] = {file.name: frozen.fingerprints.get(file.name) or fingerprint(file) for file in files}
            write_manifest(manifest, temporary)
            sync_files(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _rename_and_prune(temporary, final, keep, protect)

    if later is None:
        finish()
    else:
        later(finish)
    return final


def _rename_and_prune(temporary: Path, final: Path, keep: int, protect: Collection[int]) -> None:
    """Rename the complete checkpoint to its own name, then delete old ones."""
    root = final.parent
    if final.exists():  # not a complete checkpoint; keep its files under a free name
        names = (final.with_name(f"{final.name}.old{number or ''}") for number in itertools.count())
        final.rename(next(name for name in names if not name.exists()))
    temporary.rename(final)
    sync_folder(root)
    protected = {checkpoint_at(root, step) for step in protect}
    for old in list_checkpoints(root)[:-keep]:
        if old not in protected:
            delete_unless_held(old, root / f".{old.name}.tmp")


def load_checkpoint(path: Path, policies: Mapping[str, Policy]) -> tuple[int, dict[str, Any]]:
    """Restore ``policies`` and torch's generators from ``path``; returns ``(step, state)``.

    All files are checked before anything changes. Raises :class:`CheckpointError`.
    """
    step, state = load_learners(path, policies)
    set_generator_states(read_tensors(path / "rng.safetensors", 1))
    return step, state


def load_learners(path: Path, policies: Mapping[str, Policy], *, checked: bool = False) -> tuple[int, dict[str, Any]]:
    """Load as :func:`load_checkpoint` does, but leave the random generators unchanged.

    Pass ``checked`` if :func:`check_checkpoint` has checked the files, in this process or another.
    """
    manifest = read_manifest(path, FORMATS, files=False) if checked else check_checkpoint(path, policies)
    if manifest["format"] == SHARDED_FORMAT:
        moments = read_shards(path, policies, learners=True)
    else:
        # Read and check everything before any weight changes.
        contents = _read_weight_sets(path, weight_sets_of(policies, references=True), manifest)
        trained = [name for name, policy in policies.items() if policy.optimizer]
        moments = {name: _read_moments(path, name, policies[name]) for name in trained}
        for weight_set, saved in contents:
            _copy_into(weight_set, saved)
    for name, policy in policies.items():
        _restore_optimizer(policy, moments.get(name), manifest["policies"][name])
    return manifest["step"], manifest["state"]


def check_checkpoint(path: Path, policies: Mapping[str, Policy]) -> dict[str, Any]:
    """Return the manifest, after a check of all files and of their fit to ``policies``: names, kinds, weights."""
    manifest = _checked_manifest(path, policies)
    _check_learners(path, policies, manifest)
    if manifest["format"] == SHARDED_FORMAT:
        check_shards(path, weight_sets_of(policies, references=True))
    return manifest


def load_weights(path: Path, policies: Mapping[str, Policy]) -> None:
    """Load only the weights of a checkpoint, for evaluation. Raises :class:`CheckpointError` before any change."""
    manifest = _checked_manifest(path, policies)
    if manifest["format"] == SHARDED_FORMAT:
        read_shards(path, policies, learners=False)
        return
    for weight_set, saved in _read_weight_sets(path, weight_sets_of(policies, references=False), manifest):
        _copy_into(weight_set, saved)


def read_weight_set(path: Path, weight_set: WeightSet, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the saved tensors, whole and in their saved dtypes; the model may be on the meta device.

    ``manifest`` is what :func:`read_manifest` returned for ``path``. Raises :class:`CheckpointError`.
    """
    if manifest["format"] == SHARDED_FORMAT:
        return read_whole(path, weight_set)
    return _read_weight_sets(path, [weight_set], manifest)[0][1]


# -- Contents of a checkpoint ------------------------------------------------------------------------------------------
def _write_whole(folder: Path, policies: Mapping[str, Policy], frozen: FrozenFiles) -> Callable[[], None]:
    """Write generators, weights and optimizers, and return a function that has nothing to wait for."""
    write_tensors(generator_states(), folder / "rng.safetensors")
    for weight_set in weight_sets_of(policies, references=True):
        weights = {key: tensor.contiguous() for key, tensor in weight_set.weights()}
        if not (weight_set.frozen and frozen.link(folder / weight_set.file, weights)):
            write_tensors(weights, folder / weight_set.file)
    for name, policy in policies.items():
        if policy.optimizer is not None:
            saved = policy.optimizer.state_dict()
            moments = {f"{i}.{key}": value for i, slots in saved["state"].items() for key, value in slots.items()}
            write_tensors(moments, folder / f"optimizer-{name}.safetensors")
    return lambda: None


def _kind(policy: Policy) -> str:
    return "full" if policy.base is None else "lora" if policy.trained_parameters() else "base of adapters"


def describe_progress(policy: Policy) -> dict[str, Any]:
    """Return a policy's entry in the manifest."""
    return {
        "kind": _kind(policy),
        "trainable": policy.trainable,
        "version": policy.version,
        "updates": policy.updates,
        "extra": policy.extra_state() | terms_of(policy).state_dict(),
    }


def _copy_into(weight_set: WeightSet, saved: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in weight_set.weights():
            tensor.copy_(shard_like(saved[name], tensor))
    weight_set.loaded()


def restore_progress(policy: Policy, described: dict[str, Any]) -> None:
    """Restore a policy's entry in the manifest: version, updates, and extra state."""
    policy.version, policy.updates = described["version"], described["updates"]
    policy.load_extra_state(described["extra"])
    terms_of(policy).load_state_dict(described["extra"])


def _read_moments(path: Path, name: str, policy: Policy) -> dict[str, Tensor]:
    assert policy.optimizer is not None
    parameters = sum(len(group["params"]) for group in policy.optimizer.param_groups)
    return read_tensors(path / f"optimizer-{name}.safetensors", 3 * parameters)


def _restore_optimizer(policy: Policy, moments: dict[str, Tensor] | None, described: dict[str, Any]) -> None:
    restore_progress(policy, described)
    if moments is None or policy.optimizer is None:
        return
    parameters = [parameter for group in policy.optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        index, slot = key.split(".", 1)
        state.setdefault(int(index), {})[slot] = shard_like(tensor, parameters[int(index)])
    policy.optimizer.load_state_dict({"state": state, "param_groups": policy.optimizer.state_dict()["param_groups"]})


# -- Checks ------------------------------------------------------------------------------------------------------------
def _checked_manifest(path: Path, policies: Mapping[str, Policy]) -> dict[str, Any]:
    """Return the manifest, after a check of its files and of its policies' names and kinds."""
    manifest = read_manifest(path, FORMATS)
    if set(manifest["policies"]) != set(policies):
        raise CheckpointMismatch(f"{path}: policies {sorted(manifest['policies'])}, the run has {sorted(policies)}")
    for name, policy in policies.items():
        if (kind := manifest["policies"][name]["kind"]) != _kind(policy):
            raise CheckpointMismatch(
                f"{path}: policy {name!r} was saved as {kind!r}, in this run it is {_kind(policy)!r}"
            )
    return manifest


def _check_learners(path: Path, policies: Mapping[str, Policy], manifest: dict[str, Any]) -> None:
    """Require the same trainable policies, because a frozen policy saved no optimizer state to resume from."""
    words = {True: "trainable", False: "frozen"}
    for name, policy in policies.items():
        trained = manifest["policies"][name]["trainable"]
        if trained != policy.trainable:
            raise CheckpointMismatch(
                f"{path}: policy {name!r} was saved as {words[trained]}, in this run it is {words[policy.trainable]}"
            )


def _read_weight_sets(
    path: Path, weight_sets: Iterable[WeightSet], manifest: Mapping[str, Any]
) -> list[tuple[WeightSet, dict[str, Tensor]]]:
    """Read the saved tensors of each set, and check them against its model by name and shape."""
    contents = []
    for weight_set in weight_sets:
        if weight_set.file not in manifest["files"]:
            raise CheckpointMismatch(f"{path}: {weight_set.label} was not saved: there is no {weight_set.file}")
        saved = read_tensors(path / weight_set.file, sum(1 for _ in weight_set.weights()))
        check_fit(path, weight_set, {name: tuple(tensor.shape) for name, tensor in saved.items()})
        contents.append((weight_set, saved))
    return contents
