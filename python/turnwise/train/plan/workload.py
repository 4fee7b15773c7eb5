"""What a step of a run has to do: the size of its model, its model calls and their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from turnwise.train.config.policies import PolicyConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import TINY, Tiny, load_model, sharing
from turnwise.types import Actor

PROMPT_TOKENS = 1024
"""Tokens of a prompt, if neither the user nor a run says how many."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a model's configuration that say it is a mixture of experts."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a dense model.

    Example: ``ModelSize(parameters=7e9, kv_bytes=57344, heads=28, kv_heads=4)``
    """

    parameters: float
    """Weights; tied ones count once."""
    kv_bytes: float
    """Bytes of one token's keys and values."""
    heads: int
    """Attention heads: tensor parallelism must divide them."""
    kv_heads: int
    """Heads of keys and values; more GPUs than these hold copies."""
    weight_bytes: int = 2
    """Bytes of a weight in an engine."""
    train_bytes: int = 2
    """Bytes of a weight in the trainer."""
    adapter_parameters: float = 0.0
    """Weights of all adapters together; 0 trains the model itself."""

    def __post_init__(self) -> None:
        for name in ("parameters", "kv_bytes", "heads", "kv_heads", "weight_bytes", "train_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number > 0")

    @property
    def sent_bytes(self) -> float:
        """Bytes of the weights that a sync sends: the adapters, or all."""
        return (self.adapter_parameters or self.parameters) * self.weight_bytes


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


def model_of(config: TrainConfig, tiny: Tiny) -> ModelSize:
    """Return the size of the one base that all policies of ``config`` share, with their adapters."""
    bases = sharing(config.policies, share_frozen=True)
    if len(bases) > 1:
        raise ConfigError(
            f"config key 'policies': {len(bases)} bases ({'; '.join(', '.join(names) for names in bases)}): expected "
            "one, as the plan is for one pool of engines and one group of training GPUs. Plan each base alone"
        )
    settings = config.policies[bases[0][0]]
    trained = {name: policy for name, policy in config.policies.items() if policy.trainable}
    if not trained:
        raise ConfigError("config key 'policies': no policy is trainable, so there is nothing to plan")
    try:
        module = load_model(settings.path, settings.dtype, tiny, empty=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"config key 'policies.{bases[0][0]}.path' = {settings.path!r}: expected a folder with config.json, or a "
            f"model of the Hub: {reason}"
        ) from error
    return size_of(module, trained, None if settings.path == TINY else _dtype_of_files(settings.path))


def _dtype_of_files(path: str) -> torch.dtype | None:
    """Return the dtype of a model's files, in which vLLM serves it by default; ``None`` if they don't say it."""
    from transformers import AutoConfig

    found: torch.dtype | None = AutoConfig.from_pretrained(path).get_text_config().dtype
    return found


def size_of(module: Any, trained: Mapping[str, PolicyConfig], served: torch.dtype | None = None) -> ModelSize:
    """Return the size of a Hugging Face causal LM whose policies ``trained`` have these settings.

    Engines hold it in the dtype ``served``, by default that of ``module``.
    """
    config = module.config.get_text_config()
    found = next((name for name in EXPERTS if getattr(config, name, 0)), None)
    if found is not None:
        raise ConfigError(f"policies.path: the model has {found} = {getattr(config, found)}: expected a dense model")
    if not getattr(config, "num_attention_heads", 0):
        raise ConfigError(f"policies.path: a {config.model_type} has no attention: expected a transformer")
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    train_bytes = next(module.parameters()).element_size()
    weight_bytes = train_bytes if served is None else served.itemsize
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        kv_bytes=2 * config.num_hidden_layers * kv_heads * width * weight_bytes,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        weight_bytes=weight_bytes,
        train_bytes=train_bytes,
        adapter_parameters=math.fsum(_adapter(module, policy) for policy in trained.values()),
    )


def _adapter(module: nn.Module, policy: PolicyConfig) -> int:
    """Return the weights of the policy's adapter; 0 if it has none."""
    if policy.lora is None:
        return 0
    head = getattr(module, "get_output_embeddings", lambda: None)()
    is_target: Callable[[str, nn.Module], bool]
    targets = policy.lora.target_modules
    if isinstance(targets, str):
        is_target = lambda name, part: part is not head  # noqa: E731
    else:
        is_target = lambda name, part: any(name == t or name.endswith(f".{t}") for t in targets)  # noqa: E731
    linear = (part for name, part in module.named_modules() if isinstance(part, nn.Linear) and is_target(name, part))
    return policy.lora.rank * sum(part.in_features + part.out_features for part in linear)
