"""The workload of a training step: the size of its model, its model calls and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.run.models import ModelSize, model_of
from turnwise.train.config.schema import TrainConfig
from turnwise.train.model.loading import Tiny
from turnwise.types import Actor

PROMPT_TOKENS = 1024
"""Tokens of a prompt, if neither the user nor a run says how many."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step.

    Example: ``Workload(ModelSize(7e9, 57344, 28, 4), groups=1024, group_size=16, prompt=1024, response=4096)``
    """

    model: ModelSize
    groups: int
    """Prompts of a step."""
    group_size: int
    """Model calls that share a prompt."""
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a completion."""
    longest: float | None = None
    """Tokens of the longest completion of a step; ``None``: all have the mean."""
    calls: float = 1.0
    """Model calls of an episode, one after the other."""
    train_flops: float = 8.0
    """FLOPs of the update per weight and token: 2 a forward pass, 4 a backward pass, 2 without weight gradients."""
    reference: bool = False
    """Whether the trainer also holds a copy of the starting weights, for a KL term."""

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "prompt", "response", "calls", "train_flops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number > 0")
        if self.longest is not None and self.longest < self.response:
            raise ValueError(
                f"longest={self.longest:g}: expected at least the mean completion, response={self.response:g}"
            )

    @property
    def episodes(self) -> int:
        """Episodes of a step, which run beside each other."""
        return self.groups * self.group_size

    @property
    def rows(self) -> float:
        """Model calls of a step, each a row of the update."""
        return self.episodes * self.calls

    @property
    def sampled_tokens(self) -> float:
        """Tokens that a step samples."""
        return self.rows * self.response

    @property
    def trained_tokens(self) -> float:
        """Tokens that a step trains on, with those of the prompts."""
        return self.rows * (self.prompt + self.response)


def workload_of(
    config: TrainConfig,
    tiny: Tiny,
    actors: Sequence[Actor] = (),
    *,
    prompt: float | None = None,
    response: float | None = None,
    calls: float | None = None,
) -> tuple[Workload, dict[str, str]]:
    """Return the workload of ``config``, and the source of each number that the config doesn't say exactly.

    ``config`` and ``actors`` are resolved (:func:`turnwise.run.policy_sharing.resolve_policies`); ``tiny`` builds the
    tiny model. ``prompt``, ``response`` and ``calls`` are means: tokens of a prompt and of a completion, and model
    calls of an episode. By default each actor makes one call and its completion reaches the token limit, which is also
    the longest completion of a step. Reads the models' configurations, no weights. Raises :class:`ConfigError` for
    policies with several bases, for a mixture of experts, and if no policy is trainable; ``ValueError`` for a number
    that is not above 0.
    """
    sources = {
        "prompt": "assumed, as the config doesn't say it" if prompt is None else "given",
        "response": "assumed: each completion reaches its limit" if response is None else "given",
        "calls": "assumed: each actor makes one" if calls is None else "given",
    }
    limits = [actor.max_tokens or config.rollout.max_tokens for actor in actors] or [config.rollout.max_tokens]
    adapters = all(policy.lora is not None for policy in config.policies.values() if policy.trainable)
    return Workload(
        model_of(config, tiny),
        groups=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size * config.rollout.branches,
        prompt=PROMPT_TOKENS if prompt is None else prompt,
        response=sum(limits) / len(limits) if response is None else response,
        longest=max(limits) if response is None else max(response, *limits),
        calls=float(len(limits)) if calls is None else calls,
        train_flops=_train_flops(config),
        reference=config.loss.kl.coef > 0 and not adapters,  # an adapter's reference is its base
    ), sources


def _train_flops(config: TrainConfig) -> float:
    """Return the FLOPs of an update per weight and token: forward and backward passes, and further forward passes."""
    trained = [policy for policy in config.policies.values() if policy.trainable]
    adapters = all(policy.lora is not None for policy in trained)
    checkpointed = any(policy.gradient_checkpointing for policy in trained)
    passes = 2 + (2 if adapters else 4) + 2 * checkpointed
    recomputed = config.update.old_logprobs == "recompute"
    return config.update.ppo_epochs * passes + 2 * recomputed + 2 * (config.loss.kl.coef > 0)
