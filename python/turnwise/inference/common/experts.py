"""Finds out whether a model is a mixture of experts, and writes a record of the chosen ones as text.

:mod:`turnwise.inference.common.routed_experts` makes such records, and replays them.
"""

from __future__ import annotations

import base64
import io
import math
import re
from typing import Any, Literal

import numpy as np

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a model's configuration that say it is a mixture of experts."""

NO_RECORD = -1
"""In an array of experts: the token has no record, so the model chooses."""


def find_experts(config: Any) -> tuple[str, int] | None:
    """Return the field of a ``config`` (its text part) that counts experts, and their number; ``None`` if dense."""
    return next(((name, getattr(config, name)) for name in EXPERTS if getattr(config, name, 0)), None)


def experts_to_text(ids: np.ndarray) -> str:
    """Return ``ids`` as vLLM writes them: the base64 of an ``.npy`` file."""
    file = io.BytesIO()
    np.save(file, ids, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(\|u1|<u2|<i2)', 'fortran_order': (False|True), "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)


def experts_from_text(text: str) -> np.ndarray:
    """Return the array of :func:`experts_to_text`. Raises ``ValueError`` for a text that holds none.

    ``np.load`` would allocate what the header says before it looks for the bytes.
    """
    data = base64.b64decode(text, validate=True)
    header = _HEADER.match(data)
    if header is None or header.end() != 10 + int.from_bytes(data[8:10], "little"):
        raise ValueError("it is no array [tokens, layers, experts] of 8 or 16 bits")
    dtype, shape = np.dtype(header[1].decode()), tuple(int(size) for size in header.groups()[2:])
    if math.prod(shape) * dtype.itemsize != len(data) - header.end():
        raise ValueError(f"it is an array of {shape}, with {len(data) - header.end()} bytes")
    order: Literal["C", "F"] = "F" if header[2] == b"True" else "C"
    return np.frombuffer(data, dtype, offset=header.end()).reshape(shape, order=order).copy()
