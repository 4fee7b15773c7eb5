"""Sets of weights in a checkpoint: each policy's own, and the bases and references that policies share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from turnwise.inference.weights.lora import AdaptedModel, SharedBase
from turnwise.train.checkpoint.files import CheckpointMismatch
from turnwise.train.model.policy import Policy
from turnwise.train.model.weights import MasterWeights, named_weights


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One set of weights. ``file`` has it whole; ``label`` names it in messages. A ``frozen`` one has no optimizer: its
    file is linked to that of the checkpoint before while its bits are the same."""

    file: str
    label: str
    model: nn.Module | SharedBase
    frozen: bool
    masters: MasterWeights | None = None

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` in the dtype that trains; call :meth:`loaded` after changing them."""
        return named_weights(self.model, self.masters)

    def loaded(self) -> None:
        """Give the model the weights that a checkpoint was read into."""
        if self.masters is not None:
            self.masters.write()


def weight_sets_of(policies: Mapping[str, Policy], *, references: bool) -> list[WeightSet]:
    """Return each policy's own weights and, once each, the shared bases; with ``references`` these and the heads."""
    in_order = sorted(policies.items())  # the order of a config file must not matter
    own = [replace(own_weight_set(name, p.model, frozen=not p.trainable), masters=p.masters) for name, p in in_order]
    shared = base_weight_sets({name: policy.model for name, policy in in_order})
    for name, policy in in_order if references else ():
        reference = policy.reference
        # an adapter's reference is its base with adapters off
        if reference is not None and not isinstance(reference, AdaptedModel):
            file = f"reference-{name}.safetensors"
            shared.setdefault(id(reference), WeightSet(file, f"the reference of {name!r}", reference, True))
        for kind, head in policy.heads.items():
            own.append(WeightSet(f"{kind}-{name}.safetensors", f"the {kind} of {name!r}", head.module, False))
    return [*own, *shared.values()]


def own_weight_set(name: str, model: nn.Module, *, frozen: bool) -> WeightSet:
    """Return the weights of policy ``name``; for an adapter without its base."""
    return WeightSet(f"policy-{name}.safetensors", f"policy {name!r}", model, frozen)


def base_weight_sets(models: Mapping[str, nn.Module]) -> dict[int, WeightSet]:
    """Return the weights of each base under the policies' ``models``, by its ``id``; the first policy names it."""
    bases: dict[int, WeightSet] = {}
    for name, model in sorted(models.items()):
        if isinstance(model, AdaptedModel):
            file = f"base-{name}.safetensors"
            bases.setdefault(id(model.shared), WeightSet(file, f"the base of {name!r}", model.shared, True))
    return bases


def check_fit(path: Path, weight_set: WeightSet, saved: Mapping[str, tuple[int, ...]]) -> None:
    """Raise :class:`CheckpointMismatch` unless ``saved`` are the names and shapes of the model's weights."""
    expected = {name: tuple(tensor.shape) for name, tensor in weight_set.weights()}
    if expected != saved:
        odd = sorted(name for name in expected.keys() | saved.keys() if expected.get(name) != saved.get(name))
        first = odd[0]
        raise CheckpointMismatch(
            f"{path}: {weight_set.label} doesn't fit the model: {len(odd)} tensors differ, first {first!r}: "
            f"checkpoint {saved.get(first, 'missing')}, model {expected.get(first, 'missing')}"
        )


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Return the whole ``tensor`` sharded as ``like`` is, from this rank's own copy; itself if ``like`` is whole."""
    if not hasattr(like, "device_mesh") or hasattr(tensor, "device_mesh") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
