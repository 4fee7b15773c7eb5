"""Steps that the log-probability ops share. The compiled module runs each one on a tile of logits.

A tile holds the logits of some tokens. Scan it, then finish; once the upstream gradients are known, turn it into its
gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core, stream_of

IGNORE_NONE = -(2**63)  # kIgnoreNone of csrc/ops/logprob.h


class Softmax(NamedTuple):
    """The options that turn logits into probabilities.

    The softmax is over ``softcap * tanh(logits / softcap) / temperature``, or ``logits / temperature`` without
    ``softcap``. Rows whose target is ``ignore_index`` are left out.
    """

    temperature: float = 1.0
    softcap: float | None = None
    ignore_index: int | None = None

    @property
    def columns(self) -> tuple[float, float, int]:
        """``scale``, ``cap`` and ``ignore`` of a :class:`Tile`."""
        return (
            1.0 / self.temperature,
            0.0 if self.softcap is None else self.softcap,
            IGNORE_NONE if self.ignore_index is None else self.ignore_index,
        )

    def ignored(self, targets: Tensor) -> Tensor | None:
        """Mark the rows to leave out, bool in the shape of ``targets``; ``None`` without ``ignore_index``."""
        return None if self.ignore_index is None else targets == self.ignore_index


class Tile(NamedTuple):
    """Logits ``[n, v]`` of ``n`` tokens.

    ``bias [v]`` is float32. ``targets [n]`` are columns, or beyond them if another rank has the column. The softmax is
    over ``(logits + bias) * scale``, with ``cap`` (0: none) applied before the scale. Rows with target ``ignore`` are
    not read.
    """

    logits: Tensor
    bias: Tensor | None
    targets: Tensor
    scale: float
    cap: float = 0.0
    ignore: int = IGNORE_NONE


class Upstream(NamedTuple):
    """Inputs of a tile's gradient, ``[n]`` float32 each. Entropy and its gradient are both given or both ``None``."""

    lse: Tensor
    grad_logprob: Tensor
    entropy: Tensor | None
    grad_entropy: Tensor | None

    def rows(self, rows: slice | Tensor) -> Upstream:
        return Upstream(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


def scan(tile: Tile, entropy: bool) -> Tensor:
    """Compute the states ``[1, 4, n]`` float64 of a tile's rows: see ``logprob_scan`` of csrc/ops/logprob.h."""
    state = torch.empty((1, 4, tile.logits.shape[0]), dtype=torch.float64, device=tile.logits.device)
    device, core = native_core(tile.logits)
    if device == "cpu":
        core.logprob_scan(*tile, state[0], entropy, torch.get_num_threads())
    else:
        core.cuda_logprob_scan(*tile, state[0], entropy, stream_of(tile.logits))
    return state


def finish(states: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy [n]`` (``[0]`` if not requested), float32, from ``[1, 4, n]``."""
    tokens = states.shape[2]
    logprob, lse, entropies = (
        torch.empty(size, dtype=torch.float32, device=states.device)
        for size in (tokens, tokens, tokens if entropy else 0)
    )
    device, core = native_core(states)
    arguments = states[0], logprob, lse, entropies if entropy else None
    if device == "cpu":
        core.logprob_finish(*arguments)
    else:
        core.cuda_logprob_finish(*arguments, stream_of(states))
    return logprob, lse, entropies


def log_softmax(tile: Tile, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy`` of a tile that holds whole rows."""
    return finish(scan(tile, entropy), entropy)


def grad(tile: Tile, upstream: Upstream, out: Tensor) -> None:
    """Write the gradient of a tile's logits into ``out``, which may be the logits, or the first half of their rows."""
    device, core = native_core(tile.logits)
    if device == "cpu":
        core.logprob_grad(*tile, *upstream, out, torch.get_num_threads())
    else:
        core.cuda_logprob_grad(*tile, *upstream, out, stream_of(tile.logits))


def add_narrow(total: Tensor, part: Tensor) -> None:
    """Add ``part`` (any float) to ``total`` (float32). Torch's own addition is slow for different types."""
    device, core = native_core(total)
    if device == "cpu" and part.dtype is not torch.float32:
        core.add_narrow(total, part, torch.get_num_threads())
    else:
        total.add_(part)
