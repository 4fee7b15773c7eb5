"""Other trainers' own functions, with as little around them as they need to run. Nothing of them is retyped here."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _OneProcess:
    """What TRL asks of an accelerator, for a single process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return tensor


class TRLLoss:
    """``GRPOTrainer._compute_loss`` on given log-probabilities ``[B, T]``, which stand in the place of a model's.

    One micro-batch that is a whole optimizer step. Token ids, which the loss itself never reads, are left empty, so
    that joining prompts and completions costs nothing. ``options`` are attributes of the trainer, ``delta`` one of its
    arguments.
    """

    def __init__(
        self,
        loss_type: str,
        *,
        old: Tensor,
        advantages: Tensor,
        mask: Tensor,
        ref: Tensor | None = None,
        max_completion_length: int = 1,
        delta: float | None = None,
        **options: Any,
    ) -> None:
        from trl.trainer.grpo_trainer import GRPOTrainer

        self.compute = GRPOTrainer._compute_loss
        self.metrics: dict[str, list[float]] = defaultdict(list)
        self.trainer = object.__new__(GRPOTrainer)
        arguments = SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        )
        settings: dict[str, Any] = {
            "loss_type": loss_type,
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "importance_sampling_level": "token",
            "max_completion_length": max_completion_length,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "aux_loss_enabled": False,
            "_entropy_bonus_enabled": False,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "current_gradient_accumulation_steps": 1,
            "accelerator": _OneProcess(),
            "model": SimpleNamespace(training=True),
            "_metrics": {"train": self.metrics},
            "_get_per_token_logps_and_entropies": lambda *_, **__: (self.logprobs, self.entropies, None),
            "args": arguments,
            **options,
        }
        for name, value in settings.items():
            object.__setattr__(self.trainer, name, value)
        none = torch.zeros(0, 1, dtype=torch.int64, device=mask.device)
        self.entropies = torch.zeros((), device=mask.device).expand(mask.shape)
        self.inputs = {
            "prompt_ids": none,
            "completion_ids": none.expand(0, mask.shape[1]),
            "prompt_mask": mask[:, :0],
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
            "num_items_in_batch": mask.sum(),
        }

    def __call__(self, logprobs: Tensor) -> Tensor:
        self.logprobs = logprobs
        return self.compute(self.trainer, None, self.inputs)


def verl_config(**options: Any) -> Any:
    """verl's own ``ActorConfig``, which its losses read."""
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
