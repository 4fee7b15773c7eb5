"""Asks the models of a config what they are, before a run: sizes, memory, and what can't work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from turnwise.inference.local.decode import cache_unsupported_reason
from turnwise.inference.local.models import sampling_mode
from turnwise.run.models.size import STATES
from turnwise.train.config.policies import PolicyConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.model.forward import LAYOUTS
from turnwise.train.model.loading import TINY, Tiny, attach_adapters, check_targets, load_models, sharing
from turnwise.train.model.support import ModelFacts, facts_of

TRIED = 50_000_000
"""Most weights of a model that is read for a trial; a larger one is tried when its run starts."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The facts of the model of ``policies``, which share it. ``tried`` says whether it was read and run.

    ``why_uncached`` is why the embedded client can't keep its earlier tokens in a cache.
    """

    policies: tuple[str, ...]
    facts: ModelFacts
    bytes: float
    tried: bool
    why_uncached: str = ""


def ask_models(config: TrainConfig, tiny: Tiny) -> list[Asked]:
    """Ask each model of ``config``, whose policies are resolved. A model that is not on this machine is left out.

    Raises :class:`ConfigError` with a line for each key that its model can't serve.
    """
    asked, problems = [], Problems()
    for names in sharing(config.policies, share_frozen=config.warm_start.steps == 0):
        policies = {name: config.policies[name] for name in names}
        if _is_here(policies[names[0]].path):
            with problems.gathered():
                asked += _ask(policies, config, tiny)
    problems.raise_any()
    return asked


def describe_models(config: TrainConfig, tiny: Tiny) -> list[str]:
    """Return a line about each model of ``config``. Raises as :func:`ask_models` does."""
    lines = []
    found = {name: one for one in ask_models(config, tiny) for name in one.policies}
    for names in sharing(config.policies, share_frozen=config.warm_start.steps == 0):
        whose = f"model of {', '.join(map(repr, names))}"
        if names[0] not in found:
            lines.append(f"{whose}: {config.policies[names[0]].path!r} is not on this machine, so it was not asked")
            continue
        one = found[names[0]]
        facts, settings = one.facts, config.policies[names[0]]
        context = "no limit of context" if facts.context_length is None else f"context {facts.context_length}"
        told = [f"{facts.kind}, {facts.parameters:,} weights in {settings.dtype}, {_bytes(one.bytes)}", context]
        if facts.drops:
            on = "on" if any(config.policies[name].dropout for name in names) else "off"
            told.append(f"dropout {on} ({', '.join(f'{name} = {share:g}' for name, share in facts.drops.items())})")
        if one.tried:
            rows = facts.reason_padded and f"padded, as {facts.reason_padded}"
            rows = rows or (facts.reason_unshared and f"packed, not shared, as {facts.reason_unshared}") or "shared"
            told.append(f"rows {rows}")
            told.append(f"log-probs from logits, as {facts.reason_unfused}" if facts.reason_unfused else "no logits")
            if one.why_uncached:
                told.append(f"sampled here without a cache, as {one.why_uncached}")
        else:
            told.append("its rows are tried when the run starts")
        lines.append(f"{whose}: {'; '.join(told)}")
    return lines


def _ask(policies: Mapping[str, PolicyConfig], config: TrainConfig, tiny: Tiny) -> list[Asked]:
    names = tuple(policies)
    empty = _attached(policies, config, tiny, empty=True)
    model = empty[names[0]]
    facts = facts_of(model, tried=False)
    found = Asked(names, facts, _held(policies, facts, empty, config), tried=False)
    if facts.parameters > TRIED:
        return [found]
    models = _attached(policies, config, tiny, empty=False)
    layout = LAYOUTS[config.update.sequence_layout]
    for name in sorted(names, key=lambda name: not policies[name].dropout):
        how = {"stream": layout.stream, "shared": layout.trie_share > 0, "dropout": policies[name].dropout}
        try:
            facts = facts_of(models[name], **how)
        except ValueError as error:
            keys = {"dropout": "dropout", "target_modules": "lora.target_modules"}
            key = next((key for start, key in keys.items() if str(error).startswith(start)), "path")
            raise ConfigError(f"config key 'policies.{name}.{key}': {error}") from error
        why = facts.reason_unshared if layout.trie_share else facts.reason_padded
        if layout.required and why and policies[name].trainable:
            key = f"config key 'update.sequence_layout' = {config.update.sequence_layout!r}"
            raise ConfigError(f"{key}: {facts.kind} of policy {name!r} doesn't support it, as {why}")
    with sampling_mode(models[name], share=True):
        why_uncached = cache_unsupported_reason(models[name])
    return [Asked(names, facts, found.bytes, True, why_uncached)]


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
        raise ConfigError(f"config key 'policies.{name}.path' = {path!r}: {reason}") from error
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
            own = sum(parameter.numel() for parameter in models[name].parameters())
            full = policy.lora is None
            total += own * STATES + (own * width if full and width < 4 else 0)
            total += own * width if full and config.loss.kl.coef else 0
    alone = all(policy.trainable and policy.lora is None for policy in policies.values())
    return total if alone else total + facts.parameters * width


def _is_here(path: str) -> bool:
    """Return True if the config under ``path`` can be read without a network."""
    from transformers import AutoConfig

    if path == TINY or path.startswith((".", "/", "~")):
        return True
    try:
        AutoConfig.from_pretrained(path, local_files_only=True)
    except OSError:
        return False
    except ValueError:  # of a model that transformers doesn't know, which the next reading names
        return True
    return True


def _bytes(count: float) -> str:
    unit = min(3, max(0, len(f"{count:.0f}") - 1) // 3)
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]} with gradients and AdamW"
