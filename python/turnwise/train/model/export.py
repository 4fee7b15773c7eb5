"""Exports trained policies as folders that transformers, peft and vLLM load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from turnwise.inference.weights.lora import AdaptedModel, shared_bases
from turnwise.train.model.policy import Policy
from turnwise.train.model.saving import save_merged, save_model

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
    holds an equal model that needs no peft (:func:`~turnwise.train.model.saving.save_merged`).
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
    policies: Mapping[str, Policy], tokenizer: Any, run_dir: Path, send: Send, *, own_bases: bool
) -> None:
    """Write sharded policies as :func:`export_policies` does, but no merged adapters.

    ``send(name, receive, base=...)`` calls ``receive`` with the whole weights of a policy, on this rank's CPU.
    """
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
                tokenizer.save_pretrained(base)
        if isinstance(policy.model, AdaptedModel) and policy.model.name is None:
            continue  # a frozen base: its own folder has it
        weights = send(name, _on_cpu, base=False)
        export_model(policy.model, tokenizer, folder, merge=False, base=base, weights=weights)


def _on_cpu(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in weights}


def export_policies(policies: Mapping[str, Policy], tokenizer: Any, run_dir: Path, *, own_bases: bool) -> None:
    """Write each policy to ``run_dir/policies/<name>``.

    Set ``own_bases`` if the adapters' bases differ from what their paths hold, or have no path. The bases are then
    written to ``run_dir/bases/<number>``, and the exported adapters refer to these folders.
    """
    bases: dict[int, str] = {}
    for number, shared in enumerate(shared_bases(policy.model for policy in policies.values())):
        if own_bases:
            folder = (run_dir / "bases" / str(number)).resolve()
            save_merged(shared.plain(), folder)
            tokenizer.save_pretrained(folder)
            bases[id(shared)] = str(folder)
    for name, policy in policies.items():
        export_model(policy.model, tokenizer, run_dir / "policies" / name, base=bases.get(id(policy.base), ""))


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
