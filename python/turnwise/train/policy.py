"""A policy: named weights, their optimizer and schedule, and the log-probabilities that they give."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.train.batch import MicroBatch
from turnwise.train.config import UpdateConfig
from turnwise.train.forward import Forward


class Policy:
    """Weights behind one or more actors.

    ``model`` is a Hugging Face causal LM. ``trainable=False`` builds no optimizer. ``with_reference`` keeps a frozen
    copy of the starting weights for a KL term. ``total_steps`` is the length of the learning-rate schedule in updates.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: UpdateConfig,
        *,
        total_steps: int,
        trainable: bool = True,
        with_reference: bool = False,
    ) -> None:
        self.name = name
        self.model = model
        self.trainable = trainable
        self.version = 0
        self.updates = 0
        self.skipped = 0  # updates in a row that were not finite
        self.kl_coef: float | None = None  # the adaptive coefficient, once it has moved
        self.max_grad_norm = config.max_grad_norm
        self.reference = copy.deepcopy(model).requires_grad_(False).eval() if with_reference else None
        self.model.requires_grad_(trainable)
        self.forward = Forward(model)
        self.reference_forward = None if self.reference is None else Forward(self.reference)
        self.optimizer: torch.optim.AdamW | None = None
        self.schedule: torch.optim.lr_scheduler.LambdaLR | None = None
        if trainable:
            self.optimizer = torch.optim.AdamW(
                model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
            )
            self.schedule = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: _warmup_cosine(step, total_steps, config.warmup, config.min_lr_ratio)
            )

    def logprobs(self, micro: MicroBatch, entropy: bool = False) -> Any:
        """Log-probs ``[N]`` float32 of the packed completion tokens, of ``log_softmax(logits / temperature)``.

        With ``entropy`` the pair of them and the entropies ``[N]`` of the distributions, both with gradients.
        """
        logprobs_N, entropies_N = self.forward(micro, entropy=entropy)
        return (logprobs_N, entropies_N) if entropy else logprobs_N

    @torch.no_grad()
    def reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        """Log-probs ``[N]`` under the frozen starting weights; ``None`` where the policy keeps none."""
        return None if self.reference_forward is None else self.reference_forward(micro)[0]

    def step(self) -> float:
        """Clip the gradient, take one optimizer step, and return the norm before clipping.

        Raises ``FloatingPointError`` for a gradient that is not finite; the weights are then as before.
        """
        assert self.optimizer is not None and self.schedule is not None, f"policy {self.name!r} is frozen"
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"policy {self.name!r}: gradient norm is {norm} at update {self.updates}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.updates += 1
        return norm

    def discard_gradient(self) -> None:
        """Leave an update out: weights, optimizer and schedule stay as they are."""
        assert self.optimizer is not None, f"policy {self.name!r} is frozen"
        self.optimizer.zero_grad(set_to_none=True)

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside weights and optimizer, fit for JSON."""
        return {"skipped": self.skipped, "kl_coef": self.kl_coef}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`extra_state` gave."""
        self.skipped, self.kl_coef = state["skipped"], state["kl_coef"]

    def fingerprint(self) -> tuple[float, ...]:
        """A number per tensor that tells whether it changed."""
        with torch.no_grad():
            return tuple(float(tensor.double().square().sum() + tensor.double().sum()) for _, tensor in self.weights())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """``(name, tensor)`` of all weights, as the publish stage sends them."""
        return named_weights(self.model)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)`` of each parameter and persistent buffer of ``model``, detached, tied ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            yield name, tensor.detach()


def _warmup_cosine(step: int, total: int, warmup: int, floor: float) -> float:
    """Linear warm-up over ``warmup`` updates, then a cosine from 1 to ``floor`` at ``total``."""
    if step < warmup:
        return (step + 1) / warmup
    if floor >= 1 or total <= warmup:
        return 1.0
    progress = min(1.0, (step - warmup) / (total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
