"""A policy whose weights a server holds, and its adapter there: passes, updates and saved states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.inference.tinker import TinkerServer, TinkerServerError, datum, tinker_or_raise
from turnwise.train.config.policies import OptimizerConfig
from turnwise.train.config.schedule import RunPlace
from turnwise.train.learner.tinker.wire import ServerLoss, WireRow
from turnwise.train.model.micro_batch import SINGLE_RANK
from turnwise.train.model.policy import Policy
from turnwise.train.model.weights import MasterWeights


class RemotePolicy(Policy):
    """A policy without weights in this process. Its schedule, version and counters are those of :class:`Policy`.

    With ``with_reference`` it has a reference, which is the server's base model.
    """

    def __init__(  # without the parent's, which needs a model
        self,
        name: str,
        config: OptimizerConfig,
        *,
        total_steps: int,
        trainable: bool = True,
        with_reference: bool = False,
    ) -> None:
        self.name, self.trainable = name, trainable
        self.version = self.updates = self.skipped = 0
        self.terms, self.heads, self.reads = None, {}, []
        self.max_grad_norm = config.max_grad_norm
        self._auto_tokens, self._halved = None, False
        self.ranks = SINGLE_RANK
        self.model: Any = None
        self.reference = nn.Identity() if with_reference else None
        self.optimizer = None
        self._config, self._place = config, RunPlace(total_steps)
        self.masters = MasterWeights(())
        self._nothing = nn.Parameter(torch.zeros(()))  # an optimizer, which marks a policy that trains, needs one
        self.build_optimizer()

    def _own_parameters(self) -> list[nn.Parameter]:
        return [self._nothing]

    def adam(self) -> dict[str, float]:
        """Return the settings of the next update, by the API's names. ``eps`` is torch's."""
        config, (beta1, beta2) = self._config, self._config.betas
        return {
            "learning_rate": self.learning_rate,
            "beta1": beta1,
            "beta2": beta2,
            "eps": 1e-8,
            "weight_decay": config.weight_decay,
            "grad_clip_norm": config.max_grad_norm,
        }

    def step(self) -> float:
        """Count an update that the server makes, and move the learning rate on."""
        assert self.optimizer is not None, f"policy {self.name!r} is frozen"
        self.updates += 1
        return 0.0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        raise TypeError(f"policy {self.name!r} has its weights on a server: use its learner, not the policy")

    all_weights = weights


class Passed(NamedTuple):
    """Result of a forward and backward pass: log-probs ``[T - 1]`` of each row's targets, and the server's metrics."""

    logprobs: list[np.ndarray]
    metrics: Mapping[str, float]


class RemoteAdapter:
    """An adapter of ``rank`` over ``base_model``, which ``seed`` initialises.

    ``forward_backward`` and ``optim_step`` send their request at once, in order, and return a function that waits for
    the answer. Raises :class:`TinkerServerError`.
    """

    def __init__(self, server: TinkerServer, base_model: str, rank: int, seed: int) -> None:
        self.server, self.base_model, self.rank = server, base_model, rank
        self._client = server.adapter(base_model, rank, seed)

    def forward_backward(self, rows: Sequence[WireRow], loss: ServerLoss) -> Callable[[], Passed]:
        """Add the gradient of ``rows`` to the gradients of earlier calls since the last update."""
        data = [datum(row.token_ids, {"logprobs": row.logprobs, "advantages": row.advantages}) for row in rows]
        return partial(self._passed, self._client.forward_backward(data, loss.name, loss.settings or None), rows)

    def _passed(self, future: Any, rows: Sequence[WireRow]) -> Passed:
        answer = self.server.wait(future)
        logprobs = [np.asarray(out["logprobs"].data, dtype=np.float32) for out in answer.loss_fn_outputs]
        lengths, expected = [len(each) for each in logprobs], [len(row.advantages) for row in rows]
        if lengths != expected:
            raise TinkerServerError(
                f"{self.server.url} answered log-probs of {lengths[:8]} tokens: expected those of {expected[:8]}"
            )
        return Passed(logprobs, answer.metrics or {})

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
