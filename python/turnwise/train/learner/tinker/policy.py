"""A policy whose weights a server holds: here are its name, its version and its learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.train.config.policies import OptimizerConfig
from turnwise.train.model.master_weights import MasterWeights
from turnwise.train.model.policy import Policy
from turnwise.train.model.ranks import SINGLE_RANK


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
        self.kl_coef, self.rate_scale, self.run_share = None, 1.0, 0.0
        self.max_grad_norm = config.max_grad_norm
        self._auto_tokens, self._halved = None, False
        self.ranks = SINGLE_RANK
        self.model: Any = None
        self.reference = nn.Identity() if with_reference else None
        self.optimizer, self.schedule = None, None
        self._config, self._total_steps = config, total_steps
        self.masters = MasterWeights(())
        self._nothing = nn.Parameter(torch.zeros(()))  # torch's schedule wants an optimizer, and that a parameter
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
        assert self.optimizer is not None and self.schedule is not None, f"policy {self.name!r} is frozen"
        self.optimizer.step()
        self.schedule.step()
        self.updates += 1
        return 0.0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        raise TypeError(f"policy {self.name!r} has its weights on a server: ask its learner, not the policy")

    all_weights = weights
