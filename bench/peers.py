"""Calls other trainers' own functions, from their packages, with the least setup that they need."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _OneProcess:
    """The parts of an accelerator that TRL uses, for a single process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return tensor

    def pad_across_processes(self, tensor: Tensor, dim: int = 0, pad_index: float = 0) -> Tensor:
        return tensor


class TRLLoss:
    """Calls ``GRPOTrainer._compute_loss`` on given log-probabilities ``[B, T]`` instead of a model's.

    One micro-batch is a whole optimizer step. Token ids, which the loss itself never reads, are empty, so that joining
    prompts and completions costs nothing. The trainer's settings come from ``args``, a ``GRPOConfig``, as in
    ``GRPOTrainer.__init__``.
    """

    def __init__(self, args: Any, *, old: Tensor, advantages: Tensor, mask: Tensor, ref: Tensor | None = None) -> None:
        from trl.trainer.grpo_trainer import GRPOTrainer

        self.compute = GRPOTrainer._compute_loss
        self.metrics: dict[str, list[float]] = defaultdict(list)
        self.trainer = object.__new__(GRPOTrainer)
        copied = (
            "loss_type", "beta", "importance_sampling_level", "max_completion_length", "top_entropy_quantile",
            "off_policy_mask_threshold", "entropy_coef", "use_adaptive_entropy", "use_vllm",
            "vllm_importance_sampling_correction",
        )  # fmt: skip
        settings: dict[str, Any] = {
            **{name: getattr(args, name) for name in copied},
            "args": args,
            "epsilon_low": args.epsilon,
            "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
            "_entropy_bonus_enabled": args.entropy_coef != 0.0 or args.use_adaptive_entropy,
            "aux_loss_enabled": False,  # of a model that is no mixture of experts
            "current_gradient_accumulation_steps": args.gradient_accumulation_steps,
            "accelerator": _OneProcess(),
            "model": SimpleNamespace(training=True),
            "_metrics": {"train": self.metrics},
            "_get_per_token_logps_and_entropies": lambda *_, **__: (self.logprobs, self.entropies, None),
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


def trl_config(**options: Any) -> Any:
    """Return TRL's ``GRPOConfig`` with its defaults, and with ``use_cpu`` if there is no GPU."""
    from trl import GRPOConfig

    return GRPOConfig(output_dir="unused", use_cpu=not torch.cuda.is_available(), **options)


def verl_config(**options: Any) -> Any:
    """Return verl's ``ActorConfig``, which its losses read. The three options set here have no defaults."""
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
