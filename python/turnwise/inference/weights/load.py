"""Copy new weights into a module. All names and shapes are checked before anything is copied."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.inference.weights.lora import AdaptedModel
from turnwise.inference.weights.weight_block import check_memory, has_memory, storage_key


def copy_weights(module: nn.Module, weights: Iterable[tuple[str, Any]], policy: str) -> None:
    """Copy ``weights``, pairs of name and tensor as ``state_dict().items()`` gives them, into ``module``.

    One name is enough for tied tensors (an ``lm_head`` that is the embedding). Tensors are cast to the module's dtype
    and device. An :class:`AdaptedModel` takes only its adapter, or its adapter and the whole shared base. Raises
    ``ValueError`` for names that are missing, unknown or given twice and for wrong shapes, and ``TypeError`` for a
    value that is not a tensor. After an error the module is unchanged.
    """
    targets = module.state_dict(keep_vars=True)
    sources = collect_weights(weights, policy)
    if isinstance(module, AdaptedModel) and sources.keys() & (base := module.shared.weights()).keys():
        targets |= base
    check_weights(sources, targets, policy)
    with torch.no_grad():
        for name, source in sources.items():
            target = targets[name].data
            if storage_key(source) != storage_key(target):  # a shared module already holds its weights
                target.copy_(source)


def collect_weights(weights: Iterable[tuple[str, Any]], policy: str) -> dict[str, Tensor]:
    """Collect ``weights`` by name, detached.

    Raises ``ValueError`` for a name given twice, and ``TypeError`` for a value that is not a tensor.
    """
    sources: dict[str, Tensor] = {}
    for name, tensor in weights:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"weight {name!r} for policy {policy!r} is a {type(tensor).__name__}: expected a tensor")
        if name in sources:
            raise ValueError(f"weight {name!r} for policy {policy!r} is given twice")
        sources[name] = tensor.detach()
    return sources


def check_weights(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], policy: str) -> None:
    """Raise ``ValueError`` unless ``sources`` has all of ``targets``, nothing else, and each in its shape."""
    if unknown := [name for name in sources if name not in targets]:
        close = difflib.get_close_matches(unknown[0], targets, n=1, cutoff=0.0)
        nearest = f"; nearest to {unknown[0]!r} is {close[0]!r}" if close else ": it has no weights of its own"
        raise ValueError(f"weights for policy {policy!r}: {_first_names(unknown)} unknown{nearest}")
    # Tied tensors share their storage, so one of their names is enough for all.
    given = {storage_key(targets[name]) for name in sources}
    if missing := [name for name, target in targets.items() if storage_key(target) not in given]:
        raise ValueError(f"weights for policy {policy!r}: {_first_names(missing)} missing, {len(sources)} given")
    for name, source in sources.items():
        if source.shape != targets[name].shape:
            raise ValueError(
                f"weight {name!r} for policy {policy!r} has shape {tuple(source.shape)}: "
                f"expected {tuple(targets[name].shape)}"
            )
        if has_memory(targets[name]) and not has_memory(source):
            check_memory({name: source})


def as_meta(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` as meta tensors, for :func:`check_weights`. Tied ones stay tied."""
    check_memory(weights)
    meta: dict[Any, Tensor] = {}
    for tensor in weights.values():
        if storage_key(tensor) not in meta:
            meta[storage_key(tensor)] = torch.empty_like(tensor, device="meta")
    return {name: meta[storage_key(tensor)] for name, tensor in weights.items()}


def _first_names(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return (
        f"{shown} and {len(names) - 3} more are" if len(names) > 3 else f"{shown} {'is' if len(names) == 1 else 'are'}"
    )
