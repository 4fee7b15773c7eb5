"""Loads the models of the policies: checks their tokenizers, loads shared models once, and attaches adapters.

A run loads its models in stages. :func:`check_models` reads only tokenizers and configurations. :func:`load_models`
gives each policy a module; adapters and frozen policies with the same ``path`` and ``dtype`` share one. A warm start,
if there is one, trains these modules. Then :func:`attach_adapters` adds the adapters, and :func:`build_policies` builds
the policies.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from turnwise.chat.templates import use_template
from turnwise.chat.tokenizers import keep_ends
from turnwise.inference.common.hf_model import recompute_layers
from turnwise.inference.common.model_files import (
    is_local,
    make_model,
    read_config,
    read_generation_config,
    read_model,
    read_tokenizer,
)
from turnwise.inference.weights.lora import SharedBase, peft_or_raise
from turnwise.train.config.features import FEATURES, term_classes
from turnwise.train.config.policies import LoraConfig, PolicyConfig, sharing, steps_in_training
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, told_by_key
from turnwise.train.model.export import check_savable
from turnwise.train.model.policy import Policy
from turnwise.types import ByPolicy
from turnwise.utils.registry import did_you_mean
from turnwise.utils.values import problem

TINY = "tiny"
"""The ``path`` of a model that is built from scratch."""

NO_FOLDER = "there is no such folder"

Tiny = Callable[[], tuple[Any, nn.Module]]
"""Builds the tokenizer and the tiny model; every call returns equal ones."""


def check_models(policies: Mapping[str, PolicyConfig], tiny: Tiny, *, adapts: bool = True) -> ByPolicy[Any]:
    """Check the files at each path, and return the tokenizers of ``policies``; no weights are read.

    Policies whose tokenizers have the same tokens, chat template and special tokens share one, which knows the ends of
    turns of all their models. One without a chat template takes that of another policy with the same tokens. Raises
    :class:`ConfigError` with a line for each path that can't be read, whose tokenizer has no chat template, or whose
    model has fewer embeddings than the tokenizer has tokens, and for each ``chat_template`` that doesn't fit. Raises
    ``ImportError`` for adapters if ``peft`` is missing, unless a server ``adapts`` the models.
    """
    if adapts and any(settings.lora for settings in policies.values()):
        peft_or_raise()
    keys = {f"policies.{name}": (settings.path, settings.chat_template) for name, settings in policies.items()}
    read = {f"{key}.path": pair for key, pair in keys.items()}
    references = {f"policies.{name}.reference": settings.reference for name, settings in policies.items()}
    read |= {key: (path, None) for key, path in references.items() if path is not None}
    # Read every path once with each template, and collect all problems.
    problems: list[str] = []
    found: dict[tuple[str, str | None], Any] = {}
    for key, (path, template) in read.items():
        if (path, template) in found:
            continue
        found[path, template] = None
        rows, generation = math.inf, None
        try:
            if path == TINY:
                loaded = tiny()[0]
            else:
                whole = read_config(path)
                generation = _generation_config(path)
                loaded = read_tokenizer(path)
                rows = whole.get_text_config().vocab_size
                for mended in check_savable(whole, generation, loaded):
                    warnings.warn(problem(key, mended, path), RuntimeWarning, stacklevel=2)
        except (OSError, ValueError) as error:
            why = str(error).strip().splitlines()[0]
            if not Path(path).exists():
                why = (
                    NO_FOLDER if is_local(path) else f"there is no folder of this name, and as a name of the Hub: {why}"
                )
            problems.append(problem(key, why, path))
            continue
        if template is not None:
            try:
                use_template(loaded, template)
            except (OSError, ValueError) as error:
                problems.append(problem(f"{key.rpartition('.')[0]}.chat_template", str(error), template))
                continue
        others = (one for one in found.values() if one is not None)
        found[path, template] = next((one for one in others if _writes_alike(one, loaded)), loaded)
        if path != TINY:
            keep_ends(found[path, template], generation)
        if rows < len(loaded):
            problems.append(problem(key, f"the model embeds {rows} tokens, its tokenizer has {len(loaded)}", path))
    for pair, key in {pair: key for key, pair in reversed(keys.items())}.items():
        if found[pair] is not None and found[pair].chat_template is None:
            why = "its tokenizer has no chat template; use an instruction-tuned model, or set chat_template beside it"
            problems.append(problem(f"{key}.path", why, pair[0]))
    if problems:
        raise ConfigError("\n".join(problems))
    return ByPolicy({name: found[keys[f"policies.{name}"]] for name in policies}, "tokenizer")


def _writes_alike(one: Any, other: Any) -> bool:
    """Return True if ``one`` may stand for ``other``: it has its tokens, and its template unless that has none."""
    same = one.chat_template == other.chat_template and one.special_tokens_map == other.special_tokens_map
    return (same or other.chat_template is None) and bool(one.get_vocab() == other.get_vocab())


def load_models(
    policies: Mapping[str, PolicyConfig], tiny: Tiny, *, share_frozen: bool = True, empty: bool = False
) -> dict[str, nn.Module]:
    """Load a module for each policy, the same one for policies that share it (see :func:`sharing`).

    With ``empty`` their parameters have no memory; they come from another process or a checkpoint.
    """
    models: dict[str, nn.Module] = {}
    for names in sharing(policies, share_frozen):
        settings = policies[names[0]]
        model = load_model(settings.path, settings.dtype, tiny, empty=empty)
        if any(policies[name].gradient_checkpointing for name in names):
            with told_by_key(f"policies.{names[0]}.gradient_checkpointing", True):
                recompute_layers(model)
        models |= dict.fromkeys(names, model)
    return {name: models[name] for name in policies}


def check_targets(models: Mapping[str, nn.Module], policies: Mapping[str, PolicyConfig]) -> None:
    """Raise :class:`ConfigError` with a line for each name in ``lora.target_modules`` that its model doesn't have."""
    problems = []
    for name, settings in policies.items():
        if settings.lora is None or isinstance(settings.lora.target_modules, str):
            continue
        modules = [module for module, _ in models[name].named_modules()]
        for target in settings.lora.target_modules:
            if not any(module == target or module.endswith(f".{target}") for module in modules):
                kinds = {
                    module.rpartition(".")[2]
                    for module, part in models[name].named_modules()
                    if isinstance(part, nn.Linear)
                }
                why = f"the model has no module {target!r}; {did_you_mean(target, kinds)}"
                problems.append(problem(f"policies.{name}.lora.target_modules", why))
    if problems:
        raise ConfigError("\n".join(problems))


def attach_adapters(
    models: Mapping[str, nn.Module], policies: Mapping[str, PolicyConfig], seed: int
) -> dict[str, nn.Module]:
    """Return ``models`` with an adapter for each policy that has one; a full model that no other shares is unchanged.

    ``seed`` plus the policy's index seeds the adapter's initial weights. Raises :class:`ConfigError` for
    ``target_modules`` that a model doesn't have.
    """
    # Each module that several policies share, or that gets an adapter, becomes the base of its policies.
    adapted, by_module = dict(models), dict[int, list[str]]()
    for name, model in models.items():
        by_module.setdefault(id(model), []).append(name)
    for names in by_module.values():
        if len(names) == 1 and policies[names[0]].lora is None:
            continue
        shared = SharedBase(models[names[0]], policies[names[0]].path)
        for name in names:
            lora = policies[name].lora
            if lora is None:
                adapted[name] = shared.plain()
                continue
            with told_by_key(f"policies.{name}.lora.target_modules", lora.target_modules):
                adapted[name] = shared.add_adapter(name, peft_config(lora), seed + list(policies).index(name))
        if any(policies[name].gradient_checkpointing for name in names):
            shared.enable_gradient_checkpointing()
    return adapted


def load_references(policies: Mapping[str, PolicyConfig], tiny: Tiny, *, empty: bool = False) -> dict[str, nn.Module]:
    """Load the models that trainable policies name as ``reference``, each path and dtype once."""
    loaded: dict[tuple[str, str], nn.Module] = {}
    references = {}
    for name, settings in policies.items():
        if settings.reference is not None and settings.trainable:
            key = (settings.reference, settings.dtype)
            if key not in loaded:
                loaded[key] = load_model(*key, tiny, empty=empty)
            references[name] = loaded[key]
    return references


def build_policies(
    config: TrainConfig, models: Mapping[str, nn.Module], references: Mapping[str, nn.Module] | None = None
) -> dict[str, Policy]:
    """Build a policy for each of ``models`` by its section of ``config``: optimizer, schedule, reference.

    ``references`` are the reference models of KL terms, by default the starting weights. Raises ``ValueError`` for a
    model whose policy has no section.
    """
    if unknown := sorted(set(models) - set(config.policies)):
        raise ValueError(f"models has {unknown[0]!r}: expected names of config.policies, {', '.join(config.policies)}")
    updates_per_step = config.update.ppo_epochs * config.update.num_minibatches
    policies = {
        name: Policy(
            name,
            model,
            config.optimizer_of(name),
            total_steps=steps_in_training(name, config.steps, config.phases) * updates_per_step,
            trainable=config.policies[name].trainable,
            with_reference=config.loss.kl.coef > 0 and config.policies[name].trainable,
            reference=(references or {}).get(name),
            layout=config.update.sequence_layout,
            head_memory=config.update.head_memory,
            dropout=config.policies[name].dropout,
        )
        for name, model in models.items()
    }
    for policy in policies.values():
        for term in term_classes(FEATURES):
            term().see_whole(policy, config)
    return policies


def find_device(name: str) -> torch.device:
    """Return the device of the config key ``device``; ``"auto"`` is the GPU if torch has one, else the CPU.

    Raises :class:`ConfigError` for an unknown name, and for a device that this machine doesn't have.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(problem("device", f"{reason}; expected auto, cpu or cuda", name)) from error
    return device


def load_model(path: str, dtype: str, tiny: Tiny, *, empty: bool = False) -> Any:
    """Load a causal LM from a folder or the Hub, or build the tiny one. Raises ``OSError`` naming what is missing.

    With ``empty`` read only its configuration: its parameters are on the meta device, its buffers are real.
    """
    kind = getattr(torch, dtype)
    if path == TINY:
        return take_dtype(tiny()[1], kind)
    if empty:
        with _parameters_on_meta():
            model = take_dtype(make_model(read_config(path), kind), kind)
        model.generation_config = _generation_config(path) or model.generation_config
        return model
    return read_model(path, kind)


def take_dtype(model: Any, kind: torch.dtype) -> Any:
    """Convert the saved tensors of ``model``, as ``from_pretrained`` does, and return it.

    Rotary frequencies and tensors that the model keeps in float32 are not converted; ``Module.to`` would round them.
    """
    wide = [re.escape(part) for part in model._get_dtype_plan(kind)]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if wide and re.search("|".join(wide), name) else kind)
    model.config.dtype = kind
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Make the parameters of new modules on the meta device. Buffers, which a file may not have, are made as usual."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def peft_config(lora: LoraConfig) -> Any:
    """Convert the section into ``peft``'s own configuration."""
    return peft_or_raise().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def _generation_config(path: str) -> Any:
    """Return the generation config under ``path``; ``None`` if there is none."""
    try:
        return read_generation_config(path)
    except OSError:
        if (Path(path) / "generation_config.json").exists():
            raise
        return None
