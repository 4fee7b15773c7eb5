"""The numbers behind the throughput model, each with its unit and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Self

Mark = Literal["measured", "assumed"]
"""``measured``: by turnwise, on this project's machine or in the named run. Everything else is ``assumed``."""


class Constant(float):
    """A number of the model.

    Example: ``Constant(3.35e12, "byte/s", "assumed", "vendor's figure")``
    """

    unit: str
    mark: Mark
    source: str

    def __new__(cls, value: float, unit: str, mark: Mark, source: str) -> Self:
        constant = super().__new__(cls, value)
        constant.unit, constant.mark, constant.source = unit, mark, source
        return constant

    def measured(self, value: float, source: str) -> Constant:
        """Return the constant with a measured value."""
        return Constant(value, self.unit, "measured", source)


def _of_vendor(value: float, unit: str) -> Constant:
    return Constant(value, unit, "assumed", "vendor's figure")


@dataclass(frozen=True, slots=True)
class GPU:
    """A kind of GPU."""

    name: str
    memory: Constant
    memory_bandwidth: Constant
    flops: Constant
    """Peak of dense bfloat16 products."""


GPUS = {
    name: GPU(name, _of_vendor(memory, "byte"), _of_vendor(bandwidth, "byte/s"), _of_vendor(flops, "FLOP/s"))
    for name, memory, bandwidth, flops in (
        ("a100", 80e9, 2.039e12, 312e12),
        ("h100", 80e9, 3.35e12, 989e12),
        ("h200", 141e9, 4.8e12, 989e12),
        ("b200", 180e9, 8.0e12, 2250e12),
    )
}
"""The GPUs that the model knows: the SXM modules, the A100 with 80 GB."""

_DESIGN = "the design's choice"


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the model that don't depend on the GPU.

    A fit to a run (:mod:`scale.refit`) replaces ``sampling_efficiency``, ``train_flops_share``,
    ``unique_token_share`` and ``sync_scale``.
    """

    token_overhead: Constant = field(default=Constant(4e-3, "s", "assumed", _DESIGN))
    """Time of an engine's step besides reading and computing: launches, scheduler, sampler."""
    decode_flops_share: Constant = field(default=Constant(0.5, "share of peak", "assumed", _DESIGN))
    """Speed of an engine's matrix products."""
    sampling_efficiency: Constant = field(default=Constant(1.0, "factor", "assumed", "1 until a run measured it"))
    """Tokens per second of a real engine over those of the formula."""
    tail: Constant = field(default=Constant(1.35, "factor", "assumed", _DESIGN))
    """Seconds of sampling over those of calls that all have the mean length."""
    train_flops_share: Constant = field(default=Constant(0.35, "share of peak", "assumed", _DESIGN))
    """Speed of the update's useful products (MFU)."""
    unique_token_share: Constant = field(default=Constant(0.7, "share", "assumed", _DESIGN))
    """Tokens that a trie of shared prefixes computes, over all tokens."""
    sync_bandwidth: Constant = field(
        default=Constant(8.25e9, "byte/s", "assumed", "verl's published NCCL figure, 4x8 H100")
    )
    """Speed of one collective from the first rank to all engines, and of one transfer to one engine."""
    load_bandwidth: Constant = field(default=Constant(20e9, "byte/s", "assumed", _DESIGN))
    """Speed at which a GPU of an engine loads received weights."""
    sync_overhead: Constant = field(default=Constant(0.5, "s", "assumed", _DESIGN))
    """Time of a sync that doesn't depend on the size."""
    sync_scale: Constant = field(default=Constant(1.0, "factor", "assumed", "1 until a run measured it"))
    """Seconds of a real sync over those of the formula."""
    sync_hidden: Constant = field(default=Constant(0.0, "share", "assumed", "train/loop.py waits for the transfer"))
    """Share of a sync that passes beside the next batch, with ``max_staleness`` > 0. The design aims at 0.85."""
    engine_memory_share: Constant = field(
        default=Constant(0.9, "share", "assumed", "vLLM's default gpu_memory_utilization")
    )
    """Memory of a GPU that weights, keys and values of an engine may fill."""
    activation_memory: Constant = field(default=Constant(10e9, "byte", "assumed", _DESIGN))
    """Memory of a training GPU for activations, the gathered layer and the allocator."""
    seconds_per_call: Constant = field(
        default=Constant(0.5e-3, "s", "measured", "the design: 1,932 calls/s of one CPU core")
    )
    """Time of one core for one model call: requests, rewards, credit, packing."""

    def rows(self) -> Iterator[tuple[str, Constant]]:
        """Yield each constant with its name."""
        for each in fields(self):
            yield each.name, getattr(self, each.name)


DESIGN = replace(Constants(), sync_hidden=Constant(0.85, "share", "assumed", _DESIGN))
"""The constants of the design page's table."""
