"""Metrics by name, taken out of their table when they are first asked for: many a step logs none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


class Metrics(Mapping[str, Tensor]):
    """The columns of ``table[rows]`` under their ``names``. Reads like a dict; ``dict(metrics)`` makes one, and so
    does ``metrics | more``."""

    __slots__ = ("_names", "_rows", "_table", "_values")

    def __init__(self, names: tuple[str, ...], table: Tensor, rows: int | slice) -> None:
        self._names = names
        self._table = table
        self._rows = rows
        self._values: dict[str, Tensor] | None = None

    def _all(self) -> dict[str, Tensor]:
        if self._values is None:
            self._values = dict(zip(self._names, self._table[self._rows].unbind(-1), strict=True))
        return self._values

    def __getitem__(self, name: str) -> Tensor:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other} if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._all())
