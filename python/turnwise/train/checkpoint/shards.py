"""Writes and reads the tensors of a checkpoint in shards, one file per rank, with ``torch.distributed.checkpoint``.

Any number of processes can read them: each takes from the files what its own shards need.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.train.checkpoint.files import CheckpointError, write_tensors
from turnwise.train.checkpoint.run_state import generator_states
from turnwise.train.checkpoint.weight_sets import WeightSet, check_fit, weight_sets_of
from turnwise.train.model.policy import Policy

_DESCRIPTION = {
    "torch.distributed.checkpoint.metadata": {"ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"}
    | {"TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
}
"""All names in torch's description of the files, by module. It is a pickle, which could name any other."""

Moments = dict[str, dict[str, Tensor]]
"""Optimizer states by policy, and in it by ``"<parameter index>.<name>"``."""


def write_shards(folder: Path, policies: Mapping[str, Policy], group: Any, rank: int) -> Callable[[], None]:
    """Begin to write weights, optimizers and torch's generators to ``folder``; return a function that waits for it.

    Every ``rank`` calls it and writes its shards of ``policies``, from a copy, in a thread.
    ``group`` is a process group with gloo that nothing else uses. The returned function raises ``OSError`` if any rank
    can't write its part.
    """
    state = _weights(weight_sets_of(policies, references=True))
    for name, policy in policies.items():
        if policy.optimizer is not None:
            for i, slots in policy.optimizer.state_dict()["state"].items():
                state |= {f"optimizer-{name}/{i}.{key}": value for key, value in sorted(slots.items())}
    import torch.distributed.checkpoint as dcp  # takes a second, which a run in one process saves

    # Rank 0 finishes after all other ranks, so every file is there when it continues.
    write_tensors(generator_states(), folder / generators_file(rank))
    with _quiet():
        writing = dcp.async_save(state, checkpoint_id=folder, process_group=group)

    def written() -> None:
        try:
            writing.result()  # type: ignore[union-attr]
        except dcp.CheckpointException as error:
            raise OSError(f"{folder} can't be written: {error}") from error

    return written


def generators_file(rank: int) -> str:
    """Return the name of the file with a rank's generators."""
    return "rng.safetensors" if rank == 0 else f"rng-{rank}.safetensors"


def read_shards(path: Path, policies: Mapping[str, Policy], *, learners: bool) -> Moments:
    """Read the weights of ``policies`` into their models; with ``learners`` also references, and return the moments.

    Names and shapes are checked before anything changes. Raises :class:`CheckpointError`.
    """
    weight_sets = weight_sets_of(policies, references=learners)
    sizes = _sizes(path)
    check_shards(path, weight_sets, sizes)
    state, moments = _weights(weight_sets), dict[str, dict[str, Tensor]]()
    for name, policy in policies.items():
        if not learners or policy.optimizer is None:
            continue
        parameters = policy.optimizer.param_groups[0]["params"]
        moments[name] = {}
        for key in (key for key in sizes if key.startswith(f"optimizer-{name}/")):
            slot = key.partition("/")[2]
            parameter = parameters[int(slot.partition(".")[0])].detach()
            same = sizes[key] == tuple(parameter.shape) and not slot.endswith(".step")
            moments[name][slot] = torch.zeros_like(parameter) if same else torch.zeros(sizes[key])
            state[key] = moments[name][slot]
    import torch.distributed.checkpoint as dcp

    alone = next(iter(policies.values())).ranks.size == 1
    with _quiet(), torch.no_grad():
        dcp.load(state, storage_reader=_reader(path), no_dist=alone)
    for weight_set in weight_sets:
        weight_set.loaded()
    return moments


def read_whole(path: Path, weight_set: WeightSet) -> dict[str, Tensor]:
    """Read one set of weights into new tensors on the CPU, in this process alone. Raises :class:`CheckpointError`."""
    import torch.distributed.checkpoint as dcp

    entries, prefix = _entries(path), _prefix(weight_set)
    check_shards(path, [weight_set], _sizes_of(entries))
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(prefix)
    }
    with _quiet():
        dcp.load(state, storage_reader=_reader(path), no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in state.items()}


def check_shards(path: Path, weight_sets: list[WeightSet], sizes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Raise :class:`CheckpointError` unless the checkpoint has all weights of ``weight_sets``, in their shapes."""
    sizes = _sizes(path) if sizes is None else sizes
    for weight_set in weight_sets:
        prefix = _prefix(weight_set)
        saved = {key.removeprefix(prefix): size for key, size in sizes.items() if key.startswith(prefix)}
        check_fit(path, weight_set, saved)


def _sizes(path: Path) -> dict[str, tuple[int, ...]]:
    return _sizes_of(_entries(path))


def _sizes_of(entries: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(getattr(entry, "size", ())) for key, entry in entries.items()}


def _entries(path: Path) -> Mapping[str, Any]:
    """Return torch's description of each tensor by its key."""
    entries: Mapping[str, Any] = _reader(path).read_metadata().state_dict_metadata
    return entries


class _Description(pickle.Unpickler):
    """Builds only the classes of which torch's description of a checkpoint consists."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _DESCRIPTION.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _reader(path: Path) -> Any:
    """Return torch's reader of the files of ``path``, for tensors alone. Torch itself would unpickle anything."""
    from torch.distributed.checkpoint import filesystem, metadata

    class Reader(filesystem.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
            try:
                with open(path / ".metadata", "rb") as stream:
                    found: metadata.Metadata = _Description(stream).load()
                entries, places = found.state_dict_metadata.values(), found.storage_data.values()
                if not all(isinstance(entry, metadata.TensorStorageMetadata) for entry in entries):
                    raise ValueError("it describes other things than tensors")
                if any(Path(place.relative_path).name != place.relative_path for place in places):
                    raise ValueError("it names files outside of its folder")
            except Exception as error:  # a damaged file may raise anything
                raise CheckpointError(f"{path / '.metadata'} can't be read: {error!r}") from error
            found.storage_meta = found.storage_meta or metadata.StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    return Reader(path)


def _prefix(weight_set: WeightSet) -> str:
    return weight_set.file.removesuffix(".safetensors") + "/"


def _weights(weight_sets: list[WeightSet]) -> dict[str, Any]:
    return {_prefix(each) + name: tensor for each in weight_sets for name, tensor in each.weights()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning that a single process saves or loads without others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
        yield
