"""One policy's adapter on the server: its passes, its updates and its saved states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from turnwise.inference.tinker import TinkerServer, TinkerServerError, datum, tinker_or_raise
from turnwise.train.learner.tinker.wire import Row, ServerLoss


class Passed(NamedTuple):
    """Result of a forward and backward pass: log-probs ``[T - 1]`` of each row's targets, and the server's metrics."""

    logprobs: list[np.ndarray]
    metrics: Mapping[str, float]


class Adapter:
    """An adapter of ``rank`` over ``base_model``, which ``seed`` initialises.

    ``forward_backward`` and ``optim_step`` send their request at once, in order, and return a function that waits for
    the answer. Raises :class:`TinkerServerError`.
    """

    def __init__(self, server: TinkerServer, base_model: str, rank: int, seed: int) -> None:
        self.server, self.base_model, self.rank = server, base_model, rank
        self._client = server.adapter(base_model, rank, seed)

    def forward_backward(self, rows: Sequence[Row], loss: ServerLoss) -> Callable[[], Passed]:
        """Add the gradient of ``rows`` to that of earlier calls since the last update."""
        data = [datum(row.token_ids, {"logprobs": row.logprobs, "advantages": row.advantages}) for row in rows]
        return partial(self._passed, self._client.forward_backward(data, loss.name, loss.settings or None), rows)

    def _passed(self, future: Any, rows: Sequence[Row]) -> Passed:
        answer = self.server.wait(future)
        found = [np.asarray(out["logprobs"].data, dtype=np.float32) for out in answer.loss_fn_outputs]
        expected = [len(row.advantages) for row in rows]
        if [len(logprobs) for logprobs in found] != expected:
            raise TinkerServerError(
                f"{self.server.url} answered log-probs of {[len(one) for one in found][:8]} tokens: expected those of "
                f"{expected[:8]}"
            )
        return Passed(found, answer.metrics or {})

    def optim_step(self, adam: Mapping[str, float]) -> Callable[[], Mapping[str, float]]:
        """Update the adapter by AdamW, and forget the gradient. The answer is the server's metrics."""
        future = self._client.optim_step(tinker_or_raise().types.AdamParams(**adam))
        return lambda: self.server.wait(future).metrics or {}

    def save_for_sampler(self, name: str) -> str:
        """Save the weights for sampling, and return their path on the server."""
        return str(self.server.wait(self._client.save_weights_for_sampler(name)).path)

    def save_state(self, name: str) -> Callable[[], str]:
        """Save weights and optimizer. The answer is their path on the server."""
        future = self._client.save_state(name)
        return lambda: str(self.server.wait(future).path)

    def load_state(self, path: str) -> None:
        """Restore weights and optimizer."""
        self.server.wait(self._client.load_state_with_optimizer(path))
