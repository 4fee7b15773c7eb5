"""Dense ids from any keys, in order of first appearance."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .backends import extension, forced_backend

Key = Sequence[Hashable] | np.ndarray | Tensor


def _columns(keys: tuple[Any, ...]) -> list[Any]:
    """Each key as an int64 array or a list of hashable objects, all of one length."""
    if not keys:
        raise TypeError("factorize() needs at least one key, for example factorize(uids)")
    columns: list[Any] = []
    for index, key in enumerate(keys):
        if isinstance(key, str | bytes) or not hasattr(key, "__len__"):
            raise TypeError(
                f"keys[{index}]: expected a sequence, array or tensor, got {type(key).__name__} {key!r:.60}"
            )
        column = key.detach().cpu().numpy() if isinstance(key, Tensor) else key
        if isinstance(column, np.ndarray):
            if column.ndim != 1:
                raise ValueError(f"keys[{index}] has shape {column.shape}: expected one dimension")
            integral = column.dtype.kind in "iub" and column.dtype != np.uint64
            column = np.ascontiguousarray(column, dtype=np.int64) if integral else column.tolist()
        elif not isinstance(column, list | tuple):
            column = list(column)
        if columns and len(column) != len(columns[0]):
            raise ValueError(f"keys[{index}] has {len(column)} entries: expected {len(columns[0])}, as keys[0]")
        columns.append(column)
    return columns


def reference(columns: list[Any]) -> tuple[Tensor, int]:
    """The dictionary loop that the C++ version equals."""
    table: dict[tuple[Hashable, ...], int] = {}
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
    ids = [table.setdefault(key, len(table)) for key in zip(*lists, strict=True)]
    return torch.tensor(ids, dtype=torch.int64), len(table)


def factorize(*keys: Key) -> tuple[Tensor, int]:
    """Number the distinct keys ``0, 1, 2, ...`` in order of first appearance.

    A key is a sequence of ``B`` hashable entries: ints, strings, UUIDs, tuples, ``None``, a numpy array or a tensor
    (copied from a GPU). Several keys together act as a tuple. Entries are the same when they compare equal.

    Returns ``(group_ids [B] int64 on the CPU, num_groups)``.

    Raises ``TypeError`` for no key, a key that is no sequence or an entry that can't be hashed, ``ValueError`` for
    different lengths.

    Example: ``factorize(["a", "b", "a"], [0, 0, 0])`` gives ``(tensor([0, 1, 0]), 2)``.
    """
    columns = _columns(keys)
    if extension is None or forced_backend() == "torch":  # keys live on the host, whatever else a backend serves
        return reference(columns)
    ids = torch.empty(len(columns[0]), dtype=torch.int64)
    return ids, extension.factorize(columns, ids)
