"""Sections of the update: loss, KL term, importance correction, minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.settings.section import APPLIES, SERVER_DECIDES, Change, Effect, Effects, RunFacts, Section, refused
from turnwise.train.config.cluster import ITS_OWN
from turnwise.train.config.features import with_features
from turnwise.train.config.policies import OptimizerConfig
from turnwise.types import CreditCapabilities, capabilities_of
from turnwise.utils.values import problem


def _other_coefficient(change: Change) -> Effect:
    """Refuse a KL term for whole models whose reference the checkpoint doesn't have."""
    whole = [name for name, policy in change.run.policies.items() if policy.trainable and policy.lora is None]
    if change.before or not whole:
        return APPLIES
    return refused(f"the checkpoint has no reference of policy {whole[0]!r}")


class KLConfig(Section):
    """A KL term to the reference policy."""

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the term; 0 builds no reference model."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of the KL divergence: see ``turnwise.ops.KL``."""
    importance_weighted: bool = False
    """Multiply a term in the loss by the importance ratio."""
    apply_to: Literal["loss", "reward"] = "loss"
    """Place of the term: in the loss, or, as the k1 estimate of each token, in the reward before credit."""
    target: float | None = Field(default=None, gt=0)
    """KL per token, in nats, that the coefficient adapts to (https://arxiv.org/abs/1909.08593, section 2.2)."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples over which the coefficient grows by ``clip(kl / target - 1, ±0.2)``."""
    refresh_every: int | None = Field(default=None, ge=1)
    """Steps of a policy after which its reference takes its weights; by default the reference never changes."""

    at_resume: ClassVar[Effects] = {"coef": _other_coefficient}

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        if self.importance_weighted and self.apply_to == "reward":
            why = "the policy that sampled earned the reward, so there is no ratio"
            yield problem(f"{key}.importance_weighted", f"expected false with {key}.apply_to = 'reward': {why}", True)
        for alone in run.each if self.coef and self.apply_to == "reward" else ():
            if not capabilities_of(alone.credit, CreditCapabilities).mixed_rewards:
                why = f"has no effect, as advantages of the rule {alone.config.credit.rule!r} don't depend on the"
                yield alone.within + problem(f"{key}.apply_to", f"{why} rewards of calls: expected 'loss'", "reward")


class CorrectionConfig(Section):
    """Truncated importance weights against a mismatch of sampler and trainer: ``turnwise.ops.ImportanceCorrection``."""

    level: Literal["token", "sequence"] = "token"
    """Unit of a weight."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight; larger ones are truncated."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest weight of samples that train; others are rejected."""


class MasksConfig(Section):
    """Tokens that don't train. ``rejection`` drops them from the loss, the others drop their policy gradient alone."""

    rejection: dict[str, float | tuple[float, float]] = Field(default_factory=dict)
    """Bounds on the mismatch of sampler and trainer, such as ``{seq-mean-k1 = [0.99, 1.01], seq-max-k2 = 2.5}``."""
    off_policy: float | None = Field(default=None, ge=0)
    """Most drift from the sampler, a mean over the row, of rows with a negative advantage."""
    second_moment: float | None = Field(default=None, ge=0)
    """Most drift of a minibatch, the mean of squares; the tokens that drifted most are dropped until it holds."""
    top_entropy: float | None = Field(default=None, gt=0, le=1)
    """Share of a minibatch's tokens that train: those with the largest entropies."""


class CriticConfig(Section):
    """A value head for each policy that trains: advantages per token by GAE of the rewards that credit gives."""

    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate of the value heads."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 1 has no bias, less has less variance."""


@with_features("loss")
class LossConfig(Section):
    """The policy loss, its aggregation, KL term, entropy bonus, importance weights and masks."""

    type: str = "clip-higher"
    """Name in ``turnwise.train.terms.loss_types``, or ``module:Class``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss's class, such as ``{low = 0.2, high = 0.28}``."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "agent-mean"
    ] = "token-mean"
    """Unit of the loss's average: tokens, sequences, or first the tokens of each actor."""
    max_length: int | None = Field(default=None, ge=1)
    """Divisor of ``seq-mean-token-sum-norm``, which needs it."""
    kl: KLConfig = Field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    """Coefficient of an entropy bonus."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Entropy per token, in nats, that the coefficient adapts to (https://arxiv.org/abs/2505.22312)."""
    entropy_step: float = Field(default=0.005, gt=0)
    """Change of an adaptive coefficient per step."""
    importance_correction: CorrectionConfig | None = None
    """Truncated importance weights; needs ``update.old_logprobs = "recompute"``."""
    masks: MasksConfig = Field(default_factory=MasksConfig)
    critic: CriticConfig | None = None
    """A trained critic; by default there is none."""

    at_resume: ClassVar[Effects] = {"critic": refused("critics train from the start of a run")}

    @model_validator(mode="after")
    def _check_max_length(self) -> Self:
        if self.aggregation == "seq-mean-token-sum-norm" and self.max_length is None:
            raise ValueError("aggregation 'seq-mean-token-sum-norm' needs max_length, the constant to divide by")
        return self


@with_features("distill")
class DistillConfig(Section):
    """On-policy distillation of actors with a ``teacher``: reverse KL of their own tokens, as an advantage."""

    coef: float = Field(default=1.0, gt=0)
    """Factor of a token's advantage, the teacher's log-probability minus the sampler's."""
    add_to_reward: bool = False
    """Add these advantages to those of the reward; without it taught actors learn from their teachers alone."""
    hint: Literal["none", "best", "episode"] = "none"
    """Text in the teacher's prompt alone: ``best``, a better answer of the group, or ``episode``, ``Episode.hint``."""
    top_k: int = Field(default=0, ge=0)
    """Teacher's likeliest tokens at each position whose forward KL is in the loss; 0 takes samples' reverse KL."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        teachers, rollout, rounds = run.config.teachers(), run.config.rollout, run.config.filter.dynamic_sampling_rounds
        if not teachers:
            for name, value in self.model_dump(exclude_defaults=True).items():
                yield problem(f"{key}.{name}", "has no effect without a teacher: expected actors.<name>.teacher", value)
            return
        if rollout.client == "vllm" and rollout.temperature != 1 and not self.top_k:
            yield problem(
                "rollout.temperature",
                f"expected 1 with actors.{next(iter(teachers))}.teacher, as vLLM scores tokens at temperature 1",
                rollout.temperature,
            )
        if self.top_k and self.hint != "none":
            why = "the loss reads the actor's own prompts: expected 0 with distill.hint"
            yield problem(f"{key}.top_k", why, self.top_k)
        if self.top_k and run.config.learner.type == "tinker":
            why = "expected 0 with learner.type = 'tinker', whose losses have no such term"
            yield problem(f"{key}.top_k", why, self.top_k)
        if rounds and not self.add_to_reward:
            yield problem(
                "filter.dynamic_sampling_rounds",
                "expected 0, or distill.add_to_reward = true: a taught actor learns from every question",
                rounds,
            )


class UpdateConfig(OptimizerConfig):
    """Optimizer steps on one batch: epochs, minibatches, sequence layout and AdamW."""

    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    micro_batch_tokens: Literal["auto"] | int = "auto"
    """Most tokens of one forward pass, ``auto`` by the machine's memory; it changes gradients by rounding alone."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Denominator of the ratio: the sampler's log-probs, or the trainer's before its first update of the batch."""
    head_memory: int | None = Field(default=None, ge=1)
    """Most bytes of the head's logits at a time; by default 256 MiB, and on a GPU a 64th of its memory up to 1 GiB."""
    sequence_layout: Literal["auto", "trie", "packed", "padded"] = "auto"
    """Rows in the forward pass: ``trie`` shares prefixes; ``auto`` tries trie, packed and padded, in this order."""
    max_nonfinite_updates: int = Field(default=3, ge=0)
    """Most non-finite updates in a row that are skipped; one more stops the run."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        default = UpdateConfig()
        if run.server is None:
            return
        if self.old_logprobs != "rollout":
            why = "expected 'rollout': the sampler's log-probs are sent"
            yield problem(f"{key}.old_logprobs", why, self.old_logprobs)
        for name in ("sequence_layout", "micro_batch_tokens", "head_memory", "max_nonfinite_updates"):
            if (value := getattr(self, name)) != getattr(default, name):
                yield problem(f"{key}.{name}", SERVER_DECIDES, value)
        for policy in run.config.policies:
            with suppress(ValueError):  # a wrong key of a policy's own optimizer has its line
                yield from self._unserved(run.config.optimizer_of(policy), run, key)

    def _unserved(self, optimizer: OptimizerConfig, run: RunFacts, key: str) -> Iterator[str]:
        """Yield a line for each setting of a policy's optimizer that the Tinker server can't serve."""
        server, default = run.server, OptimizerConfig()
        for name in server.decides:
            if (value := getattr(optimizer, name)) != getattr(default, name):
                yield problem(f"{key}.{name}", f"{ITS_OWN}: expected no setting here", value)
        if server.shares_decay and optimizer.weight_decay and len(run.config.policies) > 1:
            why = "it would also shrink the other adapters: expected 0"
            yield problem(f"{key}.weight_decay", why, optimizer.weight_decay)

    @field_validator("micro_batch_tokens")
    @classmethod
    def _check_positive(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError("expected auto, or a number of at least 1")
        return value
