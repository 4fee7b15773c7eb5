"""Find the steps of a backend: ``scan``, ``finish`` and ``grad`` of rows of logits."""

from __future__ import annotations

from typing import Any

from turnwise.ops.logprob import reference, tiles


def kernels(backend: str) -> Any:
    """The module with the steps of a backend."""
    if backend == "triton":
        from turnwise.ops.logprob import triton

        return triton
    return tiles if backend == "native" else reference
