"""Translates a minibatch for a server: the name of the loss there, and rows with scaled advantages.

A server sums or averages the losses of tokens in its own way. All its losses are linear in a token's advantage for
positive factors. So each token's advantage is multiplied by the weight that turnwise's aggregation gives the token,
and divided by the server's weight. Masked tokens have advantage 0, as the hosted service takes no mask. Loss and
gradient are then turnwise's, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from turnwise.ops import CISPO, GPG, Clip, Reinforce, Variant
from turnwise.settings.section import RunFacts, trial
from turnwise.train.config.cluster import ServerKind
from turnwise.train.model.micro_batch import MicroBatch
from turnwise.train.terms.loss_types import make_variant
from turnwise.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class ServerLoss:
    """A loss of the API with its settings. Example: ``ServerLoss("ppo", {"clip_low_threshold": 0.8, ...})``"""

    name: str
    settings: dict[str, float]


def _bounds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": 1.0 - low, "clip_high_threshold": 1.0 + high}


_LOSSES: dict[type[Variant], Callable[[Any], ServerLoss]] = {
    Clip: lambda variant: ServerLoss("ppo", _bounds(variant.low, variant.high)),
    CISPO: lambda variant: ServerLoss("cispo", _bounds(variant.low, variant.high)),
    # A ratio that is clipped to 1 and carries no gradient leaves -A * lp.
    Reinforce: lambda variant: ServerLoss("cispo", _bounds(0.0, 0.0)),
    GPG: lambda variant: ServerLoss("cispo", _bounds(0.0, 0.0)),
}

SERVED = "'clip-higher', 'ppo', 'cispo', 'reinforce' or 'gpg'"


def server_loss(variant: Variant) -> ServerLoss:
    """Return the API's loss that equals ``variant``. Raises ``ValueError`` naming the config key if there is none."""
    if type(variant) not in _LOSSES:
        raise ValueError(f"a Tinker server has no loss {type(variant).__name__}: expected {SERVED}")
    if isinstance(variant, Clip) and variant.dual_clip is not None:
        raise ValueError(f"loss.options.dual_clip = {variant.dual_clip}: expected none: servers have no dual clip")
    return _LOSSES[type(variant)](variant)


def unserved_loss(run: RunFacts) -> Iterator[str]:
    """Yield a line if a server is to train with a loss that it doesn't have."""
    loss = run.config.loss
    if run.server is not None:
        yield from trial("loss.type", loss.type, lambda: server_loss(make_variant(loss)))


@dataclass(frozen=True, slots=True)
class WireRow:
    """One row of ``T`` tokens as it is sent. ``logprobs`` and ``advantages [T - 1]`` float32 belong to its targets,
    the tokens after the first; both are 0 on tokens that don't train.

    Example: ``WireRow(np.array([1, 17, 20]), np.array([0, -0.1]), np.array([0, 0.5]))``
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray


def wire_rows(
    batch: TrainingBatch, rows: np.ndarray, micro: MicroBatch, weights_N: Tensor, kind: ServerKind
) -> list[WireRow]:
    """Return ``rows`` of ``batch``, one minibatch, which is packed as ``micro``.

    ``weights_N`` are :meth:`~turnwise.train.terms.policy_loss.PolicyLossTerm.token_weights`.
    """
    scaled = np.zeros(len(batch.targets), dtype=np.float32)
    scaled[micro.token_N.numpy()] = (micro.advantages_N * weights_N).numpy()
    logprobs = np.where(scaled != 0, batch.target_logprobs, np.float32(0))
    sent = []
    for row in rows.tolist():
        token_ids = batch.tokens_of(np.array([row]))
        divisor = np.float32((len(token_ids) - 1) * len(rows) if kind.means else 1)  # of the server's own mean
        targets = slice(batch.cu_targets[row], batch.cu_targets[row + 1])
        columns = np.zeros((2, len(token_ids)), np.float32)
        columns[:, len(token_ids) - (targets.stop - targets.start) :] = logprobs[targets], scaled[targets] * divisor
        sent.append(WireRow(token_ids, columns[0, 1:], columns[1, 1:]))
    return sent


def stream_of(batch: TrainingBatch, rows: np.ndarray, values: list[np.ndarray]) -> np.ndarray:
    """Return values ``[T - 1]`` of each of ``rows`` as values ``[N]`` float32 per target of the batch."""
    stream = np.zeros(len(batch.targets), dtype=np.float32)
    for row, row_values in zip(rows.tolist(), values, strict=True):
        start, end = int(batch.cu_targets[row]), int(batch.cu_targets[row + 1])
        count = min(end - start, len(row_values))
        stream[end - count : end] = row_values[len(row_values) - count :]
    return stream
