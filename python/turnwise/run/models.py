"""Checks the models of a config before its run: their sizes, their memory, and the settings that they don't support."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from turnwise.chat.formats import ChatError
from turnwise.chat.known_formats import chat_format
from turnwise.chat.templates import EXAMPLE_TOOL, use_template
from turnwise.chat.tools import schemas
from turnwise.inference.common.experts import find_experts
from turnwise.inference.common.model_files import is_local, read_config, read_tokenizer
from turnwise.inference.local.decode import cache_unsupported_reason
from turnwise.inference.local.models import sampling_mode
from turnwise.train.config.policies import PolicyConfig, sharing
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.model.forward import LAYOUTS
from turnwise.train.model.loading import TINY, Tiny, attach_adapters, check_targets, load_model, load_models
from turnwise.train.model.support import ModelFacts, facts_of
from turnwise.train.terms.registry import check_term_models
from turnwise.types import Actor, ToolSource
from turnwise.utils.values import problem

TRIED = 50_000_000
"""Largest number of weights of a model that a check runs; a larger model is tried when its run starts."""


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The facts of the model that ``policies`` share.

    ``tried``: the check read and ran it. ``why_uncached``: the reason why the embedded client keeps no cache of its
    tokens.
    """

    policies: tuple[str, ...]
    facts: ModelFacts
    bytes: float
    tried: bool
    why_uncached: str = ""


def ask_models(config: TrainConfig, tiny: Tiny) -> list[ModelCheck]:
    """Check each model of ``config``, whose policies are resolved. Models that are not on this machine are omitted.

    Raises :class:`ConfigError` with a line for each key that its model can't serve.
    """
    checks, problems = [], Problems()
    for names in sharing(config.policies, share_frozen=config.warm_start.steps == 0):
        policies = {name: config.policies[name] for name in names}
        if _is_here(policies[names[0]].path):
            with problems.gathered():
                checks += _ask(policies, config, tiny)
    problems.raise_any()
    return checks


def check_vocabularies(config: TrainConfig, actors: Sequence[Actor], tiny: Tiny) -> None:
    """Raise :class:`ConfigError` with a line for each reference or teacher that doesn't have the tokens of its policy.

    Models that are not on this machine are left out.
    """
    read: dict[str, Any] = {}
    problems = []
    for key, value, path, pupil in _readers(config, actors):
        for each in {path, pupil} - read.keys():
            read[each] = _tokens(each, tiny)
        if None not in (read[path], read[pupil]) and read[path] != read[pupil]:
            why = f"{path!r} has other tokens than {pupil!r}, so it can't read those of the policy"
            problems.append(problem(key, f"{why}: expected a model of the same tokenizer", value))
    if problems:
        raise ConfigError("\n".join(problems))


def check_tools(config: TrainConfig, actors: Sequence[Actor], tokenizer_of: Callable[[str], Any]) -> None:
    """Raise :class:`ConfigError` for each actor with tools whose model's chat template shows none.

    ``tokenizer_of`` returns the tokenizer of a policy; ``None`` leaves it out.
    """
    problems = Problems()
    for actor in actors:
        if not actor.tools or (tokenizer := tokenizer_of(actor.policy)) is None:
            continue
        try:
            # A source of tools, such as a server, tells them once it runs: any tool shows whether the template can.
            own = schemas([tool for tool in actor.tools if not isinstance(tool, ToolSource)])
            chat_format(tokenizer, template_kwargs=actor.chat_template_kwargs).check_tools(own or [EXAMPLE_TOOL])
        except ChatError as error:
            why = (
                f"actor {actor.id!r} has tools, and {str(error).removeprefix('tools: ').partition(', or renderer')[0]}"
            )
            problems.lines.append(problem(f"policies.{actor.policy}.path", why, config.policies[actor.policy].path))
    problems.raise_any()


def check_templates(config: TrainConfig, tiny: Tiny) -> None:
    """Raise :class:`ConfigError` for each ``chat_template`` that doesn't fit a tokenizer on this machine."""
    problems = Problems()
    for name, policy in config.policies.items():
        if policy.chat_template is not None and (tokenizer := _tokenizer_at(policy.path, tiny)) is not None:
            try:
                use_template(tokenizer, policy.chat_template)
            except (OSError, ValueError) as error:
                problems.lines.append(problem(f"policies.{name}.chat_template", str(error), policy.chat_template))
    problems.raise_any()


def tokenizer_here(policy: PolicyConfig, tiny: Tiny) -> Any:
    """Return the tokenizer of a policy; ``None`` if its files can't be read here, or it has no chat template."""
    tokenizer = _tokenizer_at(policy.path, tiny)
    if tokenizer is not None and policy.chat_template is not None:
        try:
            use_template(tokenizer, policy.chat_template)
        except (OSError, ValueError):  # which check_templates tells
            return None
    return tokenizer if getattr(tokenizer, "chat_template", None) else None


def _tokenizer_at(path: str, tiny: Tiny) -> Any:
    if path == TINY:
        return tiny()[0]
    try:
        return read_tokenizer(path) if _is_here(path) else None
    except (OSError, ValueError):  # which the check of the models tells
        return None


def _readers(config: TrainConfig, actors: Sequence[Actor]) -> Iterator[tuple[str, str, str, str]]:
    """Yield each model that reads the tokens of another: the config key and its value, and the paths of both."""
    for name, policy in config.policies.items():
        if policy.reference not in (None, policy.path):
            yield f"policies.{name}.reference", policy.reference, policy.reference, policy.path
    for actor in actors:
        teacher = config.teachers().get(actor.id)
        if teacher is not None and {teacher, actor.policy} <= config.policies.keys():
            own, other = config.policies[actor.policy].path, config.policies[teacher].path
            if other != own:
                yield f"actors.{actor.id}.teacher", teacher, other, own


def _tokens(path: str, tiny: Tiny) -> dict[str, int] | None:
    """Return the tokens of a model and their ids; ``None`` if its files can't be read here."""
    if path == TINY:
        return dict(tiny()[0].get_vocab())
    try:
        return dict(read_tokenizer(path).get_vocab()) if _is_here(path) else None
    except (OSError, ValueError):  # which the check of the models tells
        return None


def describe_models(config: TrainConfig, tiny: Tiny) -> list[str]:
    """Return a line about each model of ``config``. Raises as :func:`ask_models` does."""
    lines = []
    checked = {name: one for one in ask_models(config, tiny) for name in one.policies}
    for names in sharing(config.policies, share_frozen=config.warm_start.steps == 0):
        whose = f"model of {', '.join(map(repr, names))}"
        if names[0] not in checked:
            lines.append(f"{whose}: {config.policies[names[0]].path!r} is not on this machine, so it was not checked")
            continue
        one = checked[names[0]]
        facts, settings = one.facts, config.policies[names[0]]
        context = "no limit of context" if facts.context_length is None else f"context {facts.context_length}"
        parts = [f"{facts.kind}, {facts.parameters:,} weights in {settings.dtype}, {_bytes(one.bytes)}", context]
        if facts.drops:
            on = "on" if any(config.policies[name].dropout for name in names) else "off"
            parts.append(f"dropout {on} ({', '.join(f'{name} = {share:g}' for name, share in facts.drops.items())})")
        if one.tried:
            rows = facts.reason_padded and f"padded, as {facts.reason_padded}"
            rows = rows or (facts.reason_unshared and f"packed, not shared, as {facts.reason_unshared}") or "shared"
            parts.append(f"rows {rows}")
            parts.append(f"log-probs from logits, as {facts.reason_unfused}" if facts.reason_unfused else "no logits")
            if one.why_uncached:
                parts.append(f"sampled here without a cache, as {one.why_uncached}")
        else:
            parts.append("its rows are tried when the run starts")
        lines.append(f"{whose}: {'; '.join(parts)}")
    return lines


def _ask(policies: Mapping[str, PolicyConfig], config: TrainConfig, tiny: Tiny) -> list[ModelCheck]:
    names = tuple(policies)
    empty = _attached(policies, config, tiny, empty=True)
    check_term_models(config, empty)
    model = empty[names[0]]
    facts = facts_of(model, tried=False)
    check = ModelCheck(names, facts, _held(policies, facts, empty, config), tried=False)
    if facts.parameters > TRIED:
        return [check]
    models = _attached(policies, config, tiny, empty=False)
    layout = LAYOUTS[config.update.sequence_layout]
    for name in sorted(names, key=lambda name: not policies[name].dropout):
        options = {"stream": layout.stream, "shared": layout.trie_share > 0, "dropout": policies[name].dropout}
        try:
            facts = facts_of(models[name], **options)
        except ValueError as error:
            keys = {"dropout": "dropout", "target_modules": "lora.target_modules"}
            key = next((key for start, key in keys.items() if str(error).startswith(start)), "path")
            raise ConfigError(problem(f"policies.{name}.{key}", error)) from error
        reason = facts.reason_unshared if layout.trie_share else facts.reason_padded
        if layout.required and reason and policies[name].trainable:
            why = f"{facts.kind} of policy {name!r} doesn't support it, as {reason}"
            raise ConfigError(problem("update.sequence_layout", why, config.update.sequence_layout))
    check_critic(config, models)
    with sampling_mode(models[name], share=True):
        why_uncached = cache_unsupported_reason(models[name])
    return [ModelCheck(names, facts, check.bytes, True, why_uncached)]


def check_loaded(config: TrainConfig, models: Mapping[str, nn.Module]) -> None:
    """Raise :class:`ConfigError` for settings that don't fit the loaded models."""
    check_targets(models, config.policies)
    check_term_models(config, models)
    check_critic(config, models)


def check_critic(config: TrainConfig, models: Mapping[str, nn.Module]) -> None:
    """Raise :class:`ConfigError` if ``loss.critic`` is to read a trained model whose rows must be padded."""
    for name in models if config.loss.critic is not None else ():
        policy = config.policies[name]
        if policy.trainable and (reason := facts_of(models[name], dropout=policy.dropout).reason_padded):
            why = f"policy {name!r} needs padded rows, as {reason}, and a value head reads packed ones"
            raise ConfigError(problem("loss.critic", f"{why}: expected another model, or no critic"))


def _attached(
    policies: Mapping[str, PolicyConfig], config: TrainConfig, tiny: Tiny, *, empty: bool
) -> Mapping[str, Any]:
    try:
        models = load_models(policies, tiny, share_frozen=config.warm_start.steps == 0, empty=empty)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        name, path = next((name, policy.path) for name, policy in policies.items())
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(problem(f"policies.{name}.path", reason, path)) from error
    check_targets(models, policies)
    return attach_adapters(models, policies, config.seed)


def _held(
    policies: Mapping[str, PolicyConfig], facts: ModelFacts, models: Mapping[str, Any], config: TrainConfig
) -> float:
    """Return the bytes of one process that trains: weights, gradients, moments, and a reference's weights."""
    width = getattr(torch, next(iter(policies.values())).dtype).itemsize
    total = 0.0
    for name, policy in policies.items():
        if policy.trainable:
            count = sum(parameter.numel() for parameter in models[name].parameters())
            full = policy.lora is None
            total += count * STATES + (count * width if full and width < 4 else 0)
            total += count * width if full and config.loss.kl.coef else 0
    alone = all(policy.trainable and policy.lora is None for policy in policies.values())
    return total if alone else total + facts.parameters * width


def _is_here(path: str) -> bool:
    """Return True if the config under ``path`` can be read without a network."""
    if path == TINY or is_local(path):
        return True
    try:
        read_config(path, local_files_only=True)
    except OSError:
        return False
    except ValueError:  # of a model that transformers doesn't know, which the next reading names
        return True
    return True


def _bytes(count: float) -> str:
    unit = min(3, max(0, len(f"{count:.0f}") - 1) // 3)
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]} with gradients and AdamW"


STATES = 16
"""Bytes of the trainer per trained weight: weight, gradient, and Adam's two moments in float32, whatever computes."""


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

    def engine_bytes(self, tensor_parallel: int) -> float:
        """Return the bytes of an engine's weights on one of its ``tensor_parallel`` GPUs, with adapters."""
        return (self.parameters + self.adapter_parameters) * self.weight_bytes / tensor_parallel

    def state_bytes(self, *, reference: bool = False) -> float:
        """Return the bytes of weights, gradients, Adam and a ``reference`` on all ranks together."""
        if self.adapter_parameters:  # the base without its adapter is the reference
            return self.parameters * self.train_bytes + STATES * self.adapter_parameters
        return (STATES + reference * self.train_bytes) * self.parameters

    def rank_bytes(self, ranks: int, *, reference: bool = False) -> float:
        """Return the bytes of one of ``ranks`` ranks, without activations."""
        # One process computes with a rounded copy; ranks round what they gather.
        rounded = self.train_bytes if ranks == 1 and self.train_bytes < 4 and not self.adapter_parameters else 0
        return self.state_bytes(reference=reference) / ranks + rounded * self.parameters


def model_of(config: TrainConfig, tiny: Tiny) -> ModelSize:
    """Return the size of the one base that all policies of ``config`` share, with their adapters.

    ``tiny`` builds the tiny model. Reads the model's configuration, no weights. Raises :class:`ConfigError` for several
    bases, for a mixture of experts, and if no policy is trainable.
    """
    bases = sharing(config.policies, share_frozen=True)
    if len(bases) > 1:
        why = (
            f"{len(bases)} bases ({'; '.join(', '.join(names) for names in bases)}): expected one, as the plan is for "
            "one pool of engines and one group of training GPUs. Plan each base alone"
        )
        raise ConfigError(problem("policies", why))
    settings = config.policies[bases[0][0]]
    trained = {name: policy for name, policy in config.policies.items() if policy.trainable}
    if not trained:
        raise ConfigError(problem("policies", "no policy is trainable, so there is nothing to plan"))
    try:
        module = load_model(settings.path, settings.dtype, tiny, empty=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        why = f"expected a folder with config.json, or a model of the Hub: {reason}"
        raise ConfigError(problem(f"policies.{bases[0][0]}.path", why, settings.path)) from error
    return size_of(module, trained, None if settings.path == TINY else _dtype_of_files(settings.path))


def _dtype_of_files(path: str) -> torch.dtype | None:
    """Return the dtype of a model's files, in which vLLM serves it by default; ``None`` if they don't say it."""
    dtype: torch.dtype | None = read_config(path).get_text_config().dtype
    return dtype


def size_of(module: Any, trained: Mapping[str, PolicyConfig], served: torch.dtype | None = None) -> ModelSize:
    """Return the size of a Hugging Face causal LM whose policies ``trained`` have these settings.

    Engines hold it in the dtype ``served``, by default that of ``module``.
    """
    config = module.config.get_text_config()
    if (experts := find_experts(config)) is not None:
        raise ConfigError(f"policies.path: the model has {experts[0]} = {experts[1]}: expected a dense model")
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
