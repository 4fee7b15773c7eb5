"""The sets of weights in a checkpoint: each policy's own, and the bases and references that policies share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from turnwise.inference.weights.lora import AdaptedModel, SharedBase
from turnwise.train.checkpoint.files import CheckpointMismatch
from turnwise.train.model.master_weights import MasterWeights
from turnwise.train.model.policy import Policy, named_weights


@dataclass(frozen=True, slots=True)
class Part:
    """One set of weights. ``file`` has it whole; ``label`` names it in messages; a ``frozen`` part never changes."""

    file: str
    label: str
    model: nn.Module | SharedBase
    frozen: bool
    masters: MasterWeights | None = None

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` in the dtype that trains; :meth:`loaded` follows a change of them."""
        return named_weights(self.model, self.masters)

    def loaded(self) -> None:
        """Give the model the weights that a checkpoint was read into."""
        if self.masters is not None:
            self.masters.write()


def parts_of(policies: Mapping[str, Policy], *, references: bool) -> list[Part]:
    """Return each policy's own weights, and the shared bases and references once each."""
    named = sorted(policies.items())  # the order of a config file must not matter
    own = [replace(own_part(name, p.model, frozen=not p.trainable), masters=p.masters) for name, p in named]
    shared = base_parts({name: policy.model for name, policy in named})
    for name, policy in named if references else ():
        reference = policy.reference
        # an adapter's reference is its base with adapters off
        if reference is not None and not isinstance(reference, AdaptedModel):
            file = f"reference-{name}.safetensors"
            shared.setdefault(id(reference), Part(file, f"the reference of {name!r}", reference, True))
    return [*own, *shared.values()]


def own_part(name: str, model: nn.Module, *, frozen: bool) -> Part:
    """Return the part of policy ``name``, which for an adapter has no base."""
    return Part(f"policy-{name}.safetensors", f"policy {name!r}", model, frozen)


def base_parts(models: Mapping[str, nn.Module]) -> dict[int, Part]:
    """Return the part of each base under the policies' ``models``, by its ``id``; the first policy names it."""
    parts: dict[int, Part] = {}
    for name, model in sorted(models.items()):
        if isinstance(model, AdaptedModel):
            file = f"base-{name}.safetensors"
            parts.setdefault(id(model.shared), Part(file, f"the base of {name!r}", model.shared, True))
    return parts


def check_fit(path: Path, part: Part, saved: Mapping[str, tuple[int, ...]]) -> None:
    """Raise :class:`CheckpointMismatch` unless ``saved`` are the names and shapes of the part's weights."""
    own = {name: tuple(tensor.shape) for name, tensor in part.weights()}
    if own != saved:
        odd = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        first = odd[0]
        raise CheckpointMismatch(
            f"{path}: {part.label} doesn't fit the model: {len(odd)} tensors differ, first {first!r}: "
            f"checkpoint {saved.get(first, 'missing')}, model {own.get(first, 'missing')}"
        )


def placed(tensor: Tensor, like: Any) -> Tensor:
    """Return the whole ``tensor`` sharded as ``like`` is, from this rank's own copy; itself if ``like`` is whole."""
    if not hasattr(like, "device_mesh") or hasattr(tensor, "device_mesh") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
