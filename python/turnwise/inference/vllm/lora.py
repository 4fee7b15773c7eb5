"""Prepare a policy's weights for a vLLM engine: shapes to check against, and adapters as files.

Part of a fused weight (``q_proj`` without ``k_proj``) corrupts it silently (vLLM 0.32). So only whole models pass the
check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwise.inference.weights.lora import AdaptedModel
from turnwise.inference.weights.weight_block import check_memory, storage_key

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of an engine's adapters that vLLM accepts."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of an engine. ``folder`` holds it in peft's format."""

    name: str
    folder: Path
    config: Any

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter's config and ``weights`` (with peft's names) into its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = replace(self.config, inference_mode=True)
        config.save_pretrained(str(self.folder))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, self.folder / "adapter_model.safetensors", metadata={"format": "pt"})


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` as meta tensors, for :func:`check_weights`. Tied ones stay tied."""
    check_memory(weights)
    meta: dict[Any, Tensor] = {}
    for tensor in weights.values():
        if storage_key(tensor) not in meta:
            meta[storage_key(tensor)] = torch.empty_like(tensor, device="meta")
    return {name: meta[storage_key(tensor)] for name, tensor in weights.items()}


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a plain model, or of the base below an adapter, by their names in a checkpoint."""
    weights = model.shared.weights() if isinstance(model, AdaptedModel) else model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in weights.items()}


def largest_rank(ranks: Iterable[int]) -> int:
    """The smallest rank that vLLM accepts and that is at least the largest of ``ranks``."""
    largest = max(ranks)
    if largest > ADAPTER_RANKS[-1]:
        raise ValueError(f"lora.rank={largest}: expected at most {ADAPTER_RANKS[-1]}, which is what vLLM serves")
    return next(rank for rank in ADAPTER_RANKS if rank >= largest)
