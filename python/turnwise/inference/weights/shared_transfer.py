"""One transfer for several clients that send the same weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from turnwise.inference.weights.publish import CollectiveTransfer
from turnwise.inference.weights.weight_block import WeightTransfer, storage_key


class SharedTransfer:
    """Lends one transfer to several clients that send the same weights, so that this host holds them once.

    It is ``closed`` once all clients have closed theirs. Weights that a client sends must not change while others send
    them, as :class:`PoolClient`'s copies don't.
    """

    def __init__(self, transfer: WeightTransfer) -> None:
        self._transfer, self._lent = transfer, 0
        self.closed = False
        self._lock = threading.Lock()
        self._weights: dict[str, Tensor] = {}  # kept, so that no others take their addresses
        self._handle: dict[str, Any] = {}

    def lend(self, joins: bool = False) -> WeightTransfer:
        """Return the transfer for one client. The last client that closes its own closes the shared one.

        A client that ``joins`` others starts with the weights that they were sent last. Its own first weights take no
        room, and do not replace theirs.
        """
        self._lent += 1
        if isinstance(self._transfer, CollectiveTransfer):
            self._transfer.expect(self._lent)
        return _LentTransfer(self, joins)

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Store ``weights``, unless they are stored already, and return their handle."""
        with self._lock:
            keys = {name: storage_key(tensor) for name, tensor in weights.items()}
            if not self._handle or keys != {name: storage_key(tensor) for name, tensor in self._weights.items()}:
                self._handle = {}
                self._handle, self._weights = self._transfer.send(weights), dict(weights)
            return self._handle

    def latest(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the handle of the stored weights. Stores ``weights`` if those have other names or don't exist."""
        with self._lock:
            if self._handle and self._weights.keys() == weights.keys():
                return self._handle
        return self.send(weights)

    def give_back(self) -> None:
        """Count one client fewer."""
        with self._lock:
            self._lent -= 1
            if not self._lent:
                self.closed = True
                self._transfer.close()
                self._handle, self._weights = {}, {}


class _LentTransfer:
    def __init__(self, shared: SharedTransfer, joins: bool) -> None:
        self._shared, self._joins = shared, joins
        self._give_back: Callable[[], None] | None = shared.give_back

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        first, self._joins = self._joins, False
        return self._shared.latest(weights) if first else self._shared.send(weights)

    def close(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
