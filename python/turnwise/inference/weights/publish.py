"""The sender's side of a collective transfer. ``hub`` serves its receivers.

vLLM 0.32 has its own weight transfer over NCCL, which turnwise does not use. Its ranks meet in a ``TCPStore`` without a
key and unpickle what they find there. Its broadcast has no deadline, so an engine that dies stops all others. It
also loads bucket by bucket, before any sums are checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from turnwise.inference.weights.hub import Hub, TransferLimits
from turnwise.inference.weights.weight_block import BlockWriter, TransferError, new_block
from turnwise.inference.weights.wire import LOOPBACK, sender_key

BUCKET_MIB = 512.0
"""MiB of one broadcast."""

DEADLINE = 60.0
"""Seconds that the receivers may take for one bucket; a slower one is dropped."""

GATHER = 5.0
"""Seconds that the first receiver of a round waits for those that took the previous weights."""


class CollectiveTransfer:
    """Sends weights to all processes that open their handle, in one broadcast by ``backend`` (``gloo`` or ``nccl``).

    - ``host``: the address of this machine at which receivers reach it. It listens only there.
    - ``bucket_mib``: MiB of one broadcast; each block of weights is sent in buckets of this size.
    - ``deadline``: seconds that all receivers together may take for one bucket. One that dies or hangs delays the
      others no longer; they get the weights in another group.
    - ``gather``: seconds that receivers wait for others that took the previous weights.

    Receivers need the key: the one in the environment variable ``TURNWISE_CLUSTER_KEY``, or else one that this transfer
    makes and puts into its handles. Nothing is encrypted. The last weights stay in a separate block, for ``nccl`` on
    their GPU. So training can continue, and a restarted engine gets the same weights as the others.

    Example::

        transfer = CollectiveTransfer("gloo", host="10.0.0.2")
        handle = transfer.send(model.state_dict())  # each receiver: with open_weights(handle) as weights: ...
    """

    def __init__(
        self,
        backend: str,
        host: str = LOOPBACK,
        *,
        bucket_mib: float = BUCKET_MIB,
        deadline: float = DEADLINE,
        gather: float = GATHER,
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r}: expected 'gloo' or 'nccl'")
        if not getattr(distributed, f"is_{backend}_available")():
            raise ValueError(f"transfer={backend!r}: this PyTorch ({torch.__version__}) was built without it")
        if backend == "nccl" and not torch.cuda.is_available():
            raise ValueError("transfer='nccl' needs a CUDA GPU, and PyTorch sees none here")
        for name, value in (("bucket_mib", bucket_mib), ("deadline", deadline)):
            if not value > 0:
                raise ValueError(f"{name}={value!r}: expected a number > 0")
        if not gather >= 0:
            raise ValueError(f"gather={gather!r}: expected seconds >= 0")
        self._writer = BlockWriter()
        self._block: Tensor | None = None
        self._key, self._key_in_handle = sender_key()
        limits = TransferLimits(max(1, int(bucket_mib * 2**20)), deadline, gather)
        self._hub: Hub | None = Hub(backend, host, self._key, self._writer.mark, limits)
        self._backend, self._host, self._port = backend, host, self._hub.port
        self._end = weakref.finalize(self, self._hub.close)

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Store ``weights``, and return their handle. Receivers of the previous weights must ask for the new ones."""
        device = next(iter(weights.values())).device if self._backend == "nccl" else torch.device("cpu")
        if self._hub is None:
            raise TransferError("the transfer is closed")
        with self._hub.replacing() as offer:
            written = self._writer.write(weights, lambda size: self._room(size, device))
            assert self._block is not None
            offer(self._block[: written["bytes"]], written["sequence"])
        where = {"host": self._host, "port": self._port, "key": self._key_in_handle}
        return {"kind": self._backend, **where, **written}

    def expect(self, count: int) -> None:
        """Let the first round wait for ``count`` receivers, at most ``gather`` seconds. Later rounds know theirs."""
        if self._hub is not None:
            self._hub.expect(count)

    def stats(self) -> dict[str, int]:
        """Totals: ``epoch`` (groups made), ``in_groups`` and ``alone`` (weights that receivers took), ``lost``."""
        return dict(self._hub.counts) if self._hub is not None else {}

    def close(self) -> None:
        self._end()
        self._hub = self._block = None

    def _room(self, size: int, device: torch.device) -> Tensor:
        if self._block is None or self._block.numel() < size or self._block.device != device:
            self._block = None  # freed before the next block, as there may be no room for both
            self._block = new_block(size, device)
        return self._block
