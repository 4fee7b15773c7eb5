"""Exports the policies of a checkpoint in one process, from its files alone: no run, no client, no optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.inference.weights.lora import AdaptedModel
from turnwise.run.checks import task_of, tiny_model
from turnwise.run.policy_sharing import own_bases
from turnwise.train.checkpoint.checkpoint import FORMATS, read_weight_set
from turnwise.train.checkpoint.files import CheckpointMismatch, read_manifest
from turnwise.train.checkpoint.progress import START, find_checkpoint
from turnwise.train.checkpoint.weight_sets import base_weight_sets, own_weight_set
from turnwise.train.config.schema import TrainConfig
from turnwise.train.model.export import export_model
from turnwise.train.model.loading import TINY, attach_adapters, check_models, load_models
from turnwise.utils.registry import did_you_mean


@dataclass(frozen=True, slots=True)
class Exported:
    """One exported policy.

    Example: ``Exported("writer", Path("export/policies/writer"), base="Qwen/Qwen3-0.6B")``
    """

    policy: str
    folder: Path
    base: str = ""
    """Hub name or folder of the model on which an adapter is loaded; empty for a whole model."""


def find_exported(config: TrainConfig, checkpoint: str | Path) -> Path:
    """Return the folder of a checkpoint: ``"newest"``, ``"best"``, the name of one of the run, or a folder.

    Raises ``ValueError`` for the starting weights, and ``CheckpointError`` for a checkpoint that is missing.
    """
    if checkpoint == START:
        raise ValueError(f"checkpoint={START!r}: expected a checkpoint; a run's starting weights are in none")
    return find_checkpoint(config.run_dir / "checkpoints", checkpoint)


def chosen_policies(config: TrainConfig, names: Sequence[str]) -> list[str]:
    """Return ``names``, by default those of all policies. Raises ``ValueError`` for a name that isn't a policy's."""
    for name in names:
        if name not in config.policies:
            raise ValueError(f"policy {name!r}: the run has none of this name; {did_you_mean(name, config.policies)}")
    return list(names or config.policies)


def export_checkpoint(
    config: TrainConfig,
    out: Path,
    checkpoint: str | Path = "newest",
    *,
    only: Sequence[str] = (),
    merge: bool = False,
) -> tuple[list[Exported], Mapping[str, Any]]:
    """Write policies of a checkpoint to ``out/policies/<name>``, and return them and the checkpoint's manifest.

    ``config`` is that in the run folder; for ``checkpoint`` see :func:`find_exported`. ``only`` names policies
    (default: all). ``merge`` also writes each adapter merged into its base, to ``out/policies/<name>/merged``, which is
    then returned. Bases that are at no path, or changed in a warm start, are in ``out/bases``.

    Weights are those of the checkpoint bit for bit, rounded to the dtype that computes. Memory holds one whole model at
    a time, and the base of adapters only if it is written or merged. Raises
    :class:`~turnwise.train.checkpoint.files.CheckpointError` for a checkpoint that is damaged or of other
    policies.
    """
    path = find_exported(config, checkpoint)
    manifest = read_manifest(path, FORMATS)
    policies = config.policies
    if set(manifest["policies"]) != set(policies):
        raise CheckpointMismatch(
            f"{path}: holds policies {sorted(manifest['policies'])}, the run's config has {sorted(policies)}"
        )
    # Build the models without memory, with the adapters' names and shapes.
    tiny = partial(_tiny, config)
    tokenizer = check_models(policies, tiny)
    loaded = load_models(policies, tiny, share_frozen=config.warm_start.steps == 0, empty=True)
    for name, model in loaded.items():
        _take_generation_config(model, policies[name].path)
    models: dict[str, Any] = attach_adapters(loaded, policies, config.seed)
    bases, places, writes_bases = base_weight_sets(models), dict[int, str](), own_bases(config)
    # Fill them one after the other with the checkpoint's tensors, and write them.
    exported = []
    for name in chosen_policies(config, only):
        model, folder, base = models[name], out / "policies" / name, policies[name].path
        own = read_weight_set(path, own_weight_set(name, model, frozen=not policies[name].trainable), manifest)
        if isinstance(model, AdaptedModel):
            model.load_state_dict(own, assign=True)
            shared, adapter = model.shared, model.name is not None
            if (merge or writes_bases or not adapter) and id(shared) not in places:
                shared.assign(read_weight_set(path, bases[id(shared)], manifest))
                places[id(shared)] = base
                if writes_bases:
                    place = (out / "bases" / str(list(bases).index(id(shared)))).resolve()
                    export_model(shared.plain(), tokenizer, place, merge=False)
                    places[id(shared)] = str(place)
            base = places.get(id(shared), base)
            export_model(model, tokenizer, folder, merge=merge, base=base)
            whole = folder / "merged" if adapter else folder
            exported.append(Exported(name, whole) if merge or not adapter else Exported(name, folder, base))
        else:
            kinds = {key: tensor.dtype for key, tensor in model.state_dict().items()}
            rounded = {key: tensor.to(kinds[key]) for key, tensor in own.items()}  # float32 if it trains in bfloat16
            model.load_state_dict(rounded, strict=False, assign=True)
            model.tie_weights()
            export_model(model, tokenizer, folder, merge=False)
            model.to("meta")  # frees its memory for the next one
            exported.append(Exported(name, folder))
    return exported, manifest


def _tiny(config: TrainConfig) -> tuple[Any, Any]:
    return tiny_model(config, task_of(config))


def _take_generation_config(model: Any, path: str) -> None:
    """Give ``model`` the settings for sampling that are beside its weights, if there are any."""
    from transformers import GenerationConfig

    if path != TINY:
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(path)
