"""Sections of the policies: models, adapters, optimizers, phases and the supervised warm start."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from turnwise.settings.section import (
    APPLIES,
    SERVER_DECIDES,
    Change,
    Effect,
    Effects,
    RunFacts,
    Section,
    Share,
    kept,
    refused,
    trial,
)
from turnwise.utils.files import PathText
from turnwise.utils.registry import did_you_mean
from turnwise.utils.values import problem


def _other_weights(change: Change) -> Effect:
    """Keep the path of a model whose weights are in the checkpoint, unless its folder has moved."""
    if change.before and change.now and not Path(change.before).is_dir() and Path(change.now).is_dir():
        return APPLIES
    return kept(f"not {change.now or 'unset'}: its weights are in the checkpoint")


class LoraConfig(Section):
    """A low-rank adapter (https://arxiv.org/abs/2106.09685): trains ``alpha / rank * B A`` instead of the weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of the matrices ``A`` and ``B``."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapter; it is divided by ``rank``."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input in updates; needs the policy's ``dropout = true``."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Modules that get an adapter: every linear layer but the head and a mixture's experts, or a list of names."""

    at_resume: ClassVar[Effects] = dict.fromkeys(("rank", "target_modules"), refused("its matrices have this shape"))


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """Shape of the decay from ``lr`` to ``min_lr_ratio * lr`` over the run's ``steps``, or ``max_sampled_tokens``."""
    min_lr_ratio: float = Field(default=1.0, ge=0, le=1)
    """Final learning rate as a share of ``lr``; 1 keeps it constant."""
    warmup: int = Field(default=0, ge=0)
    """Updates of linear warm-up from 0 to ``lr``."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment, each from 0 to below 1."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to this one."""


SERVER_ALPHA = 32.0
"""Scale of every adapter on a Tinker server, hosted or SkyRL's."""


class PolicyConfig(Section):
    """Weights, tokenizer and optimizer of one policy."""

    path: PathText = "tiny"
    """Folder or Hugging Face Hub name of the model; ``tiny`` builds a random model of about 1M parameters."""
    chat_template: PathText | None = None
    """Chat template in place of the tokenizer's: a file with Jinja, or ``chatml``, which shows tools."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type that computes. A whole bfloat16 model trains float32 weights beside it; float16 is for frozen ones."""
    trainable: bool = True
    """Update this policy."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    dropout: bool = False
    """Keep the dropout of the model and its adapter on in updates; the ratio of the first update is then not 1."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the weights; adapters of one ``path`` share one copy of the base."""
    reference: PathText | None = None
    """Reference of the KL term, a folder or Hub name; by default the weights at the start, for an adapter the base."""
    optimizer: dict[str, Any] = Field(default_factory=dict)
    """Keys of the optimizer in ``[update]`` with other values for this policy, such as ``lr``."""

    at_resume: ClassVar[Effects] = {
        "path": _other_weights,
        "reference": _other_weights,
        "trainable": refused("a checkpoint has optimizers of the policies that trained alone"),
        "lora": refused("the checkpoint has weights of the other kind"),
    }

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        if self.trainable and self.dtype == "float16":
            why = "gradients underflow in it; expected 'bfloat16' or 'float32' for a policy that trains"
            yield problem(f"{key}.dtype", why, self.dtype)
        if run.task is None:
            return
        name, teachers = key.partition(".")[2], run.config.teachers().values()
        if name not in {*(actor.policy for actor in run.actors), *teachers}:
            played = ", ".join(f"{actor.id!r} with {actor.policy!r}" for actor in run.actors)
            yield problem(key, f"no actor of task {run.task.name!r} plays with it: {played}")
        if run.server is not None:
            yield from self._unserved(key)

    def _unserved(self, key: str) -> Iterator[str]:
        """Yield a line for each setting that a Tinker server can't serve."""
        default = PolicyConfig()
        if self.path == default.path:
            why = "expected the folder or Hub name of the model that the server has"
            yield problem(f"{key}.path", why, self.path)
        for name in ("dtype", "dropout", "gradient_checkpointing", "reference"):
            if (value := getattr(self, name)) != getattr(default, name):
                yield problem(f"{key}.{name}", SERVER_DECIDES, value)
        if self.trainable and self.lora is None:
            why = "a Tinker server trains adapters, no full weights: expected { rank = 16 } or another rank"
            yield problem(f"{key}.lora", why, None)
        elif self.trainable and self.lora is not None:
            fixed = LoraConfig(rank=self.lora.rank, alpha=SERVER_ALPHA)
            for name in ("alpha", "dropout", "target_modules"):
                if (value := getattr(self.lora, name)) != (expected := getattr(fixed, name)):
                    yield problem(f"{key}.lora.{name}", f"expected {expected!r}, which Tinker servers set", value)


def sharing(policies: Mapping[str, PolicyConfig], share_frozen: bool = True) -> list[list[str]]:
    """Group the names of ``policies`` that can share one copy of their weights.

    These are adapters with the same path and dtype, and with ``share_frozen`` also frozen policies of that path and
    dtype. A policy that trains all its weights is alone in its group.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, settings in policies.items():
        alone = settings.lora is None and (settings.trainable or not share_frozen)
        key = (settings.path, settings.dtype, name) if alone else (settings.path, settings.dtype)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


class ActorConfig(Section):
    """Policies of one actor."""

    policy: str | None = None
    """Policy that plays it; by default the one that it would have without this table."""
    teacher: str | None = None
    """Policy that teaches it by on-policy distillation; one that plays no actor is frozen."""


class PhaseConfig(Section):
    """A phase in which only some policies train; after the last phase the first one follows again."""

    train: list[str] = Field(min_length=1)
    """Policies that this phase updates."""
    steps: int = Field(ge=1)
    """Steps of the phase."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        played = {actor.policy for actor in run.actors}
        for name in self.train if run.task is not None else ():
            policy = run.config.policies.get(name)
            if name not in played:
                why = f"no actor plays with a policy {name!r}; {did_you_mean(name, played)}"
                yield problem(f"{key}.train", why, self.train)
            elif policy is not None and not policy.trainable:
                yield problem(f"{key}.train", f"policies.{name}.trainable is false", self.train)


def policies_at(step: int, phases: Sequence[PhaseConfig], trainable: Collection[str]) -> set[str]:
    """Return the policies of ``trainable`` that are updated in ``step``, counted from 0.

    Each phase lasts for its ``steps``; after the last phase the first one follows again.
    """
    if not phases:
        return set(trainable)
    rest = step % sum(phase.steps for phase in phases)
    for phase in phases:
        if rest < phase.steps:
            return set(phase.train) & set(trainable)
        rest -= phase.steps
    raise AssertionError("a step lies in one of the phases")


def steps_in_training(policy: str, steps: int, phases: Sequence[PhaseConfig]) -> int:
    """Count the steps among the first ``steps`` in whose phase ``policy`` is: those over which its rate falls."""
    if not phases:
        return steps
    rounds, rest = divmod(steps, sum(phase.steps for phase in phases))
    in_a_round = sum(phase.steps for phase in phases if policy in phase.train)
    return rounds * in_a_round + sum(policy in policies_at(step, phases, [policy]) for step in range(rest))


class WarmStartConfig(Section):
    """Supervised training before the first step, on the task's demonstrations or on a file, up to a target."""

    steps: int = Field(default=0, ge=0)
    """Most updates of supervised training; 0 skips it."""
    batch_size: int = Field(default=128, ge=1)
    """Rows of one update."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; default: 2e-3 for a model of fewer than ten million parameters, else 2e-5."""
    warmup: int = Field(default=20, ge=0)
    """Updates of linear warm-up from 0 to ``lr``."""
    shuffle: bool = True
    """False keeps the order of the rows, for demonstrations that begin with other rows than they end with."""
    held_out: int = Field(default=256, ge=0)
    """Rows that don't train but are measured, with all rows of their prompts; at most a tenth of the prompts."""
    check_every: int = Field(default=20, ge=1)
    """Updates between two measurements of the held-out rows."""
    target_reproduced: float | None = Field(default=None, gt=0, le=1)
    """Share of held-out prompts whose greedy completion is a demonstrated one, that ends the warm start."""
    target_loss: float | None = Field(default=None, ge=0)
    """Mean cross-entropy per token, over ten updates, that ends the warm start."""
    min_entropy: float | None = Field(default=None, gt=0)
    """Entropy per token, in nats, below which the warm start ends with the best weights before."""
    patience: int | None = Field(default=None, ge=1)
    """Measurements without a lower held-out loss that end the warm start with the best weights before."""
    data: PathText | None = None
    """JSONL of ``{"messages": [...], "completion": "..."}``, or a run's ``rollouts.jsonl``; default: demonstrations."""
    min_reward: float | None = None
    """Least reward of a recorded step that becomes a row; needs ``data``."""

    at_resume: ClassVar[Effects] = {"*": kept("as the warm start is over")}

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        if self.min_reward is not None and self.data is None:
            yield problem(f"{key}.min_reward", "needs warm_start.data, recorded episodes to choose from")
        if self.steps and run.server is not None:
            why = "no model is here to start: expected 0, and as the base model one that is warm-started already"
            yield problem(f"{key}.steps", why, self.steps)
        elif self.steps and self.data is None and run.trains:
            yield from trial(f"{key}.steps", self.steps, partial(getattr, run.task, "demonstrations"))

    @model_validator(mode="after")
    def _check_measured(self) -> Self:
        for name in self.targets() if not self.held_out else ():
            raise ValueError(f"{name} needs held_out > 0: it is measured on held-out rows")
        return self

    def targets(self) -> list[str]:
        """Return the set keys that read held-out rows."""
        return [name for name in ("target_reproduced", "min_entropy", "patience") if getattr(self, name) is not None]
