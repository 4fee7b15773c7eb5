"""Exports trained policies as folders that transformers, peft and vLLM load, and tries it before a run."""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from turnwise.inference.weights.lora import AdaptedModel, shared_bases
from turnwise.train.model.policy import Policy
from turnwise.types import ByPolicy, Tokenizers
from turnwise.utils.files import replace_text

MAX_LOST = 0.05
"""Largest share of an adapter's update that the base's dtype may lose in a merged model."""

Send = Callable[..., dict[str, Tensor]]
"""A learner's ``send``."""


def export_model(
    model: Any,
    tokenizer: Any,
    folder: str | Path,
    *,
    merge: bool = True,
    base: str = "",
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a policy's ``model`` and ``tokenizer`` to ``folder``.

    ``weights`` are the policy's own weights, whole; by default the model's, which must then not be sharded.

    A full model is saved with ``save_pretrained``. For an adapter, ``folder`` holds the adapter in peft's format, with
    ``base`` as its base (by default the path that the base was loaded from). With ``merge``, ``folder/merged`` then
    holds an equal model that needs no peft (:func:`save_merged`).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(model, AdaptedModel):
        save_model(model, folder, weights)
    elif model.name is None:
        save_merged(model, folder)
    else:
        _save_adapter(model, folder, base or model.shared.path, weights)
        if merge:
            save_merged(model, folder / "merged")
            tokenizer.save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder)


def export_shards(
    policies: Mapping[str, Policy], tokenizer: Tokenizers, run_dir: Path, send: Send, *, own_bases: bool
) -> None:
    """Write sharded policies as :func:`export_policies` does, but no merged adapters.

    ``send(name, receive, base=...)`` calls ``receive`` with the whole weights of a policy, on this rank's CPU.
    """
    tokenizers: ByPolicy[Any] = ByPolicy.of(tokenizer, "tokenizer")
    for name, policy in policies.items():
        folder, base = run_dir / "policies" / name, ""
        if own_bases and policy.base is not None:
            number = shared_bases(each.model for each in policies.values()).index(policy.base)
            base = str((run_dir / "bases" / str(number)).resolve())
            if not Path(base).exists():
                adapter = {key for key, _ in policy.weights()}
                everything = send(name, _on_cpu, base=True)
                shared = {key: tensor for key, tensor in everything.items() if key not in adapter}
                save_model(policy.base.model, Path(base), shared)
                tokenizers[name].save_pretrained(base)
        if isinstance(policy.model, AdaptedModel) and policy.model.name is None:
            continue  # a frozen base: its own folder has it
        weights = send(name, _on_cpu, base=False)
        export_model(policy.model, tokenizers[name], folder, merge=False, base=base, weights=weights)


def _on_cpu(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in weights}


def export_policies(policies: Mapping[str, Policy], tokenizer: Tokenizers, run_dir: Path, *, own_bases: bool) -> None:
    """Write each policy to ``run_dir/policies/<name>``, with the tokenizer of all, or its own.

    Set ``own_bases`` if the adapters' bases differ from what their paths hold, or have no path. The bases are then
    written to ``run_dir/bases/<number>``, and the exported adapters refer to these folders.
    """
    tokenizers: ByPolicy[Any] = ByPolicy.of(tokenizer, "tokenizer")
    bases: dict[int, str] = {}
    for number, shared in enumerate(shared_bases(policy.model for policy in policies.values())):
        if own_bases:
            folder = (run_dir / "bases" / str(number)).resolve()
            save_merged(shared.plain(), folder)
            name = next(name for name, policy in policies.items() if policy.base is shared)
            tokenizers[name].save_pretrained(folder)
            bases[id(shared)] = str(folder)
    for name, policy in policies.items():
        export_model(policy.model, tokenizers[name], run_dir / "policies" / name, base=bases.get(id(policy.base), ""))


def _save_adapter(model: AdaptedModel, folder: Path, base: str, given: Mapping[str, Tensor] | None) -> None:
    assert model.name is not None
    config = model.shared.configs[model.name]
    # peft keeps the layer names in a set, whose order differs between processes
    modules = sorted(config.target_modules) if isinstance(config.target_modules, set) else config.target_modules
    exported = replace(config, base_model_name_or_path=base, inference_mode=True, target_modules=modules)
    exported.target_modules = modules  # replace() turned the list into a set again
    exported.save_pretrained(str(folder))
    weights = {name: tensor.contiguous() for name, tensor in (given or model.state_dict()).items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# -- transformers' own files -------------------------------------------------------------------------------------------
def save_model(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a transformers ``model``, or ``weights`` in its place, with configs that transformers takes."""
    mend_config(model.config, getattr(model, "generation_config", None))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config = mended_generation(model.generation_config)[0]
    with _without_bars():
        model.save_pretrained(folder, state_dict=weights)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the bars of transformers off: a run has its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_merged(model: AdaptedModel, folder: Path) -> None:
    """Write the plain model that computes the same as ``model``.

    Its adapted weights are in float32 if the base's dtype would lose more than :data:`MAX_LOST` of the adapter's
    update; a warning tells it.
    """
    lost, base = model.shared.lost_in_merge(model), model.shared.model
    save_model(base, folder, model.shared.merged_weights(model, torch.float32 if lost > MAX_LOST else None))
    if lost > MAX_LOST:
        dtype, file = str(base.dtype).removeprefix("torch."), folder / "config.json"
        replace_text(file, json.dumps({**json.loads(file.read_text(encoding="utf-8")), "dtype": "float32"}, indent=2))
        warnings.warn(
            f"{folder}: {dtype} would lose {lost:.0%} of the update of adapter {model.name!r}, so the merged weights "
            f"are in float32. A program that computes in {dtype} loses it again: there, load the adapter itself",
            RuntimeWarning,
            stacklevel=2,
        )


def mended_generation(config: Any) -> tuple[Any, str]:
    """Return a copy of a generation ``config`` that transformers writes, and what was mended; empty if nothing was.

    Transformers reads, with a warning, settings that it refuses to write: above all a temperature without
    ``do_sample``, which is then set. Other settings that don't fit are left out.
    """
    if not (reason := _refusal(config)):
        return config, ""
    given = config.to_diff_dict()
    mended, left_out = min((_fitting(given), _fitting({"do_sample": True, **given})), key=lambda pair: len(pair[1]))
    added = ["do_sample = true is added"] if mended.do_sample and not config.do_sample else []
    left = [f"{', '.join(left_out)} is left out"] if left_out else []
    return mended, f"{' and '.join(added + left)}, as {reason}"


def _fitting(given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return a generation config with the settings of ``given`` that fit together, and the names of the others."""
    from transformers import GenerationConfig

    config, left_out = GenerationConfig(), []
    for key in sorted(given, key=lambda key: key not in ("do_sample", "num_beams")):  # on which others depend
        before = copy.deepcopy(config)
        setattr(config, key, given[key])
        if _refusal(config):
            config = before
            left_out.append(key)
    return config, left_out


def _refusal(config: Any) -> str:
    """Return why transformers refuses to write ``config``, in one line; empty if it takes it."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        lines = [line.strip("- ") for line in str(error).splitlines() if line.strip()]
        return next((line for line in lines if "`" in line), lines[0])
    return ""


def mend_config(config: Any, generation: Any) -> str:
    """Move settings for sampling from a model's ``config``, where transformers refuses them, to ``generation``.

    Return their names; empty if there are none.
    """
    misplaced: dict[str, Any] = getattr(config, "_get_generation_parameters", dict)()
    for key, value in misplaced.items():
        delattr(config, key)
        if generation is not None and getattr(generation, key, None) is None:
            setattr(generation, key, value)
    return ", ".join(misplaced)


def check_savable(config: Any, generation: Any, tokenizer: Any) -> list[str]:
    """Write what an export writes beside the weights, and return one line for each thing that it mends.

    Raises ``ValueError`` for what can't be mended.
    """
    mended = []
    if moved := mend_config(config, generation):
        mended.append(
            f"config.json has settings for sampling ({moved}), which an export moves to generation_config.json"
        )
    if generation is not None:
        generation, text = mended_generation(generation)
        mended += [f"transformers would not write its generation_config.json again: in exports {text}"] if text else []
    parts = {"config.json": config, "generation_config.json": generation, "tokenizer": tokenizer}
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts.items():
            try:
                if part is not None:
                    part.save_pretrained(folder)
            except Exception as error:  # of any kind: its code may come from the model's folder
                raise ValueError(f"its {name} can't be exported: {type(error).__name__}: {error}") from error
    return mended
