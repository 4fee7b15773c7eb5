"""The steps that the log-probability ops share, each on a tile of logits, by the compiled module.

A tile holds some columns of the logits of some tokens: scan every tile, finish, and with the gradients at hand turn
each tile into its gradient. What is kept between the tiles is one ``state`` per block of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core, stream_of


class Tile(NamedTuple):
    """``logits [n, v]``, the columns from ``first`` on; ``bias [v]`` float32; ``targets [n]`` of the whole vocabulary.

    The softmax is over ``(logits + bias) * scale``.
    """

    logits: Tensor
    bias: Tensor | None
    targets: Tensor
    first: int
    scale: float


class Upstream(NamedTuple):
    """Inputs of a tile's gradient, ``[n]`` float32 each; entropy and its gradient come together or not at all."""

    lse: Tensor
    grad_logprob: Tensor
    entropy: Tensor | None
    grad_entropy: Tensor | None

    def rows(self, rows: slice) -> Upstream:
        return Upstream(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


def new_state(tokens: int, like: Tensor) -> Tensor:
    """Begun by the tile whose ``first`` is 0."""
    return torch.empty((4, tokens), dtype=torch.float64, device=like.device)


def scan(tile: Tile, state: Tensor, entropy: bool) -> None:
    """Adds a tile to ``state``."""
    device, core = native_core(tile.logits)
    if device == "cpu":
        core.logprob_scan(*tile, state, entropy, torch.get_num_threads())
    else:
        core.cuda_logprob_scan(*tile, state, entropy, stream_of(tile.logits))


def finish(state: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``logprob``, ``lse`` and ``entropy [n]`` (``[0]`` if not asked for), float32."""
    tokens = state.shape[1]
    logprob, lse, entropies = (
        torch.empty(size, dtype=torch.float32, device=state.device)
        for size in (tokens, tokens, tokens if entropy else 0)
    )
    device, core = native_core(state)
    arguments = state, logprob, lse, entropies if entropy else None
    if device == "cpu":
        core.logprob_finish(*arguments)
    else:
        core.cuda_logprob_finish(*arguments, stream_of(state))
    return logprob, lse, entropies


def log_softmax(tile: Tile, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same of rows that one tile holds whole."""
    state = new_state(tile.logits.shape[0], tile.logits)
    scan(tile, state, entropy)
    return finish(state, entropy)


def grad(tile: Tile, upstream: Upstream, out: Tensor) -> None:
    """Writes the gradient of a tile's logits; ``out`` may be the logits themselves."""
    device, core = native_core(tile.logits)
    if device == "cpu":
        core.logprob_grad(*tile, *upstream, out, torch.get_num_threads())
    else:
        core.cuda_logprob_grad(*tile, *upstream, out, stream_of(tile.logits))


def add_narrow(total: Tensor, part: Tensor) -> None:
    """``total += part``, float32 and any float: torch's own is slow where the types differ."""
    device, core = native_core(total)
    if device == "cpu" and part.dtype is not torch.float32:
        core.add_narrow(total, part, torch.get_num_threads())
    else:
        total.add_(part)
