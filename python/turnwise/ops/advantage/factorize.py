"""Turn any keys into dense ids, in order of first appearance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.ops.common.dispatch import extension, forced_backend

Key = Sequence[Hashable] | np.ndarray | Tensor


def _columns(keys: tuple[Any, ...]) -> list[Any]:
    """Convert each key to an int64 array or a list of hashable objects, all of one length."""
    if not keys:
        raise TypeError("factorize() needs at least one key, for example factorize(uids)")
    columns: list[Any] = []
    for index, key in enumerate(keys):
        if isinstance(key, str | bytes | Set | Mapping) or not hasattr(key, "__len__"):
            raise TypeError(
                f"keys[{index}]: expected a sequence, array or tensor, got {type(key).__name__} {key!r:.60}"
            )
        column = key
        if isinstance(key, Tensor):
            column = key.detach().cpu()
            if column.is_floating_point() and column.dtype not in (torch.float64, torch.float32, torch.float16):
                column = column.float()  # NumPy has no such type; equal values stay equal
            column = column.numpy()
        if isinstance(column, np.ndarray):
            if column.ndim != 1:
                raise ValueError(f"keys[{index}] has shape {column.shape}: expected one dimension")
            integral = column.dtype.kind in "iub" and column.dtype != np.uint64
            column = np.ascontiguousarray(column, dtype=np.int64) if integral else column.tolist()
        elif not isinstance(column, list | tuple):
            column = list(column)
        if len(column) and isinstance(column[0], Tensor):  # a tensor hashes by identity, so all ids would differ
            raise TypeError(f"keys[{index}][0] is a tensor: expected one tensor for all entries, or their .tolist()")
        if columns and len(column) != len(columns[0]):
            raise ValueError(f"keys[{index}] has {len(column)} entries: expected {len(columns[0])}, as keys[0]")
        columns.append(column)
    return columns


def _unhashable(columns: list[Any], error: TypeError) -> TypeError:
    """Name the entry that can't be hashed in the error. Returns ``error`` itself if there is none."""
    for index, column in enumerate(columns):
        for row, entry in enumerate(column):
            try:
                hash(entry)
            except TypeError:
                return TypeError(f"keys[{index}][{row}]={entry!r:.60}: expected an entry that can be hashed ({error})")
    return error


def reference(columns: list[Any]) -> tuple[Tensor, int]:
    """Number the keys with a dictionary loop. The C++ version gives the same result."""
    table: dict[tuple[Hashable, ...], int] = {}
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
    ids = [table.setdefault(key, len(table)) for key in zip(*lists, strict=True)]
    return torch.tensor(ids, dtype=torch.int64, device="cpu"), len(table)


def factorize(*keys: Key) -> tuple[Tensor, int]:
    """Number the distinct keys ``0, 1, 2, ...`` in order of first appearance.

    A key is a sequence of ``B`` hashable entries: ints, strings, UUIDs, tuples, ``None``, a numpy array or a tensor
    (copied from a GPU). Several keys together act as a tuple. Entries are the same when they compare equal.

    Returns ``(group_ids [B] int64 on the CPU, num_groups)``.

    Raises ``TypeError`` for a call without keys, a key that is not a sequence (a set has no order), and an entry that
    can't be hashed or is a tensor. Raises ``ValueError`` for different lengths.

    Example: ``factorize(["a", "b", "a"], [0, 0, 0])`` gives ``(tensor([0, 1, 0]), 2)``.
    """
    columns = _columns(keys)
    try:
        if extension is None or forced_backend() == "torch":  # keys are always on the host
            return reference(columns)
        ids = torch.empty(len(columns[0]), dtype=torch.int64, device="cpu")
        return ids, extension.factorize(columns, ids)
    except TypeError as error:
        raise _unhashable(columns, error) from None
