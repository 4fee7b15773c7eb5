"""Find DTensors among an op's arguments, and pass the call to the function that computes with their shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
ROUTES: dict[str, Callable[..., Any]] = {}  # by the op's name; ops/parallel/dtensor.py fills it


def is_dtensor(*tensors: Any) -> bool:
    """True if one of the arguments is a ``torch.distributed.tensor.DTensor``, whose module takes seconds to import."""
    return any(type(t) not in _PLAIN and hasattr(type(t), "placements") and hasattr(t, "to_local") for t in tensors)
