"""Writes models with ``save_pretrained``, and mends or names what it would refuse, at the start of a run already."""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.inference.weights.lora import AdaptedModel
from turnwise.utils.files import replace_text

MOST_LOST = 0.05
"""Largest share of an adapter's update that the base's dtype may lose in a merged model."""


def save_model(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a transformers ``model``, or ``weights`` in its place, with configs that transformers takes."""
    mend_config(model.config, getattr(model, "generation_config", None))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config = mended_generation(model.generation_config)[0]
    model.save_pretrained(folder, state_dict=weights)


def save_merged(model: AdaptedModel, folder: Path) -> None:
    """Write the plain model that computes the same as ``model``.

    Its adapted weights are in float32 if the base's dtype would lose more than :data:`MOST_LOST` of the adapter's
    update; a warning tells it.
    """
    lost, base = model.shared.lost_in_merge(model), model.shared.model
    save_model(base, folder, model.shared.merged_weights(model, torch.float32 if lost > MOST_LOST else None))
    if lost > MOST_LOST:
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
