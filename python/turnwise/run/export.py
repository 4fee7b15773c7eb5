"""Exports the policies of a checkpoint from its files alone, and pushes one to the Hub, or to ``HF_ENDPOINT``.

It builds no run, no client and no optimizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from turnwise import __version__
from turnwise.inference.common.model_files import read_generation_config
from turnwise.inference.weights.lora import AdaptedModel
from turnwise.run.checks import task_of, tiny_model
from turnwise.run.policy_sharing import own_bases
from turnwise.train.checkpoint.checkpoint import FORMATS, read_weight_set
from turnwise.train.checkpoint.files import CheckpointMismatch, read_manifest
from turnwise.train.checkpoint.progress import START, find_checkpoint
from turnwise.train.checkpoint.weight_sets import base_weight_sets, own_weight_set
from turnwise.train.config.schema import TrainConfig
from turnwise.train.log.lines import newest_lines
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

    def tiny() -> tuple[Any, Any]:
        return tiny_model(config, task_of(config))

    tokenizers = check_models(policies, tiny)
    loaded = load_models(policies, tiny, share_frozen=config.warm_start.steps == 0, empty=True)
    for name, model in loaded.items():
        _take_generation_config(model, policies[name].path)
    models: dict[str, Any] = attach_adapters(loaded, policies, config.seed)
    bases, base_paths, writes_bases = base_weight_sets(models), dict[int, str](), own_bases(config)
    # Fill them one after the other with the checkpoint's tensors, and write them.
    exported = []
    for name in chosen_policies(config, only):
        model, folder, base = models[name], out / "policies" / name, policies[name].path
        tensors = read_weight_set(path, own_weight_set(name, model, frozen=not policies[name].trainable), manifest)
        if isinstance(model, AdaptedModel):
            model.load_state_dict(tensors, assign=True)
            shared, adapter = model.shared, model.name is not None
            if (merge or writes_bases or not adapter) and id(shared) not in base_paths:
                shared.assign(read_weight_set(path, bases[id(shared)], manifest))
                base_paths[id(shared)] = base
                if writes_bases:
                    base_folder = (out / "bases" / str(list(bases).index(id(shared)))).resolve()
                    export_model(shared.plain(), tokenizers[name], base_folder, merge=False)
                    base_paths[id(shared)] = str(base_folder)
            base = base_paths.get(id(shared), base)
            export_model(model, tokenizers[name], folder, merge=merge, base=base)
            whole = folder / "merged" if adapter else folder
            exported.append(Exported(name, whole) if merge or not adapter else Exported(name, folder, base))
        else:
            kinds = {key: tensor.dtype for key, tensor in model.state_dict().items()}
            rounded = {
                key: tensor.to(kinds[key]) for key, tensor in tensors.items()
            }  # float32 if it trains in bfloat16
            model.load_state_dict(rounded, strict=False, assign=True)
            model.tie_weights()
            export_model(model, tokenizers[name], folder, merge=False)
            model.to("meta")  # frees its memory for the next one
            exported.append(Exported(name, folder))
    return exported, manifest


def _take_generation_config(model: Any, path: str) -> None:
    """Give ``model`` the settings for sampling that are beside its weights, if there are any."""
    if path != TINY:
        with suppress(OSError):
            model.generation_config = read_generation_config(path)


def write_card(exported: Exported, config: TrainConfig, manifest: Mapping[str, Any], repo: str | None = None) -> None:
    """Write ``README.md`` to an exported policy: its base, task, step and last validation, and how to load it.

    ``manifest`` is that of the checkpoint, ``repo`` the repository to which the folder goes. The card names no path of
    this machine.
    """
    from huggingface_hub import ModelCardData

    origin = config.policies[exported.policy].path
    on_hub = on_the_hub(origin)
    data = ModelCardData(
        base_model=origin if on_hub else None,
        library_name="peft" if exported.base else "transformers",
        pipeline_tag="text-generation",
        tags=["turnwise", "reinforcement-learning", *(["lora"] if exported.base else [])],
    )
    progress = manifest["state"].get("progress", {})
    facts = {
        "base model": origin if on_hub else "a tiny model, from random weights" if origin == TINY else "a local model",
        "weights": "a LoRA adapter" if exported.base else "whole",
        "task": ", ".join(config.tasks) or config.task,
        "actors": ", ".join(
            actor for actor, policy in config.policies_of_actors().items() if policy == exported.policy
        ),
        "step": f"{manifest['step']} of {config.steps}",
        "episodes": progress.get("episodes"),
        "sampled tokens": progress.get("sampled_tokens"),
        "credit rule": config.credit.rule,
        "loss": config.loss.type,
        "trained with": f"turnwise {__version__}",
    } | _validation(config.run_dir, progress)
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value not in (None, ""))
    package, loader = data.library_name, f"Auto{'Peft' if exported.base else ''}ModelForCausalLM"
    where = json.dumps(repo or ".")
    text = (
        f"---\n{data.to_yaml()}\n---\n\n# {exported.policy}\n\n"
        f"A policy that learned by reinforcement learning with turnwise.\n\n| | |\n|---|---|\n{rows}\n\n"
        f"```python\nfrom {package} import {loader}\n\nmodel = {loader}.from_pretrained({where})\n```\n"
    )
    (exported.folder / "README.md").write_text(text, encoding="utf-8")


def _validation(run_dir: Path, progress: Mapping[str, Any]) -> dict[str, str]:
    """Return success and metrics of the last validation up to the checkpoint's step; the log has all but success."""
    evaluations = {int(step): success for step, success in progress.get("evaluations", {}).items()}
    if not evaluations:
        return {}
    last = max(evaluations)
    rows = takewhile(lambda row: row["step"] >= last, (line.row for line in newest_lines(run_dir / "metrics.jsonl")))
    metrics = next((row for row in rows if row["step"] == last and "validation" in row), {})
    return {f"validation at step {last}: success": f"{evaluations[last]:.1%}"} | {
        f"validation at step {last}: {name.partition('/')[2]}": f"{value:.4g}"
        for name, value in metrics.items()
        if name.startswith("validation/")
    }


def on_the_hub(path: str) -> bool:
    """Return True unless ``path`` is the tiny model or a folder of this machine."""
    return path != TINY and not path.startswith((".", "/", "~")) and not Path(path).exists()


def check_push(config: TrainConfig, policy: str, *, merge: bool) -> None:
    """Raise ``ValueError`` for a push without a token, and for an adapter whose base is not on the Hub."""
    if not os.environ.get("HF_TOKEN"):
        raise ValueError("HF_TOKEN: expected the environment variable with your token of the Hub, with write access")
    settings = config.policies[policy]
    if settings.lora and not merge and (own_bases(config) or not on_the_hub(settings.path)):
        raise ValueError(
            f"--push: the adapter {policy!r} has a base that is not on the Hub, so nobody else could load it: "
            "expected --merge, which pushes the merged model"
        )


def push(folder: Path, repo: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload the files of ``folder`` to the model repository ``repo`` (``"owner/name"``), and return its address.

    The server is ``HF_ENDPOINT``, the token ``HF_TOKEN``. Without a ``revision`` the repository must be new. With one,
    it may exist; the branch ``revision`` is created if it is missing. Raises ``ValueError`` for a repository that
    exists or that is public in spite of ``private``, ``PermissionError`` if the server refuses the token, and
    ``ConnectionError`` if it can't be reached or fails.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ["HF_TOKEN"])
    with _explained(api.endpoint, repo):
        api.create_repo(repo, private=private, exist_ok=revision is not None)
        if private and revision is not None and not api.model_info(repo).private:
            raise ValueError(f"--private: {repo} exists and is public: expected a private repository, or a new name")
        if revision not in (None, "main"):
            api.create_branch(repo, branch=str(revision), exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            ignore_patterns=["merged/*"],
            commit_message=f"Exported with turnwise {__version__}",
        )
    return f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")


@contextmanager
def _explained(endpoint: str, repo: str) -> Iterator[None]:
    """Raise the errors of :func:`push` in place of those of ``huggingface_hub``."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The HTTP client's errors, of another package from one version of huggingface_hub to the next.
    unreached: tuple[Any, ...] = (HfHubHTTPError.__mro__[1], ConnectionError)
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"--push {repo}: expected OWNER/NAME: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = getattr(error, "server_message", None) or str(error).strip().splitlines()[0]
        if status == 409:
            raise ValueError(
                f"--push {repo}: the repository exists: expected a new name, or --revision with one of its branches"
            ) from error
        if status in (401, 403):
            hint = "the token is not valid" if status == 401 else "the token may not write there"
            raise PermissionError(f"--push {repo}: {endpoint} answered {status}, {hint} (HF_TOKEN): {said}") from error
        raise ConnectionError(f"--push {repo}: {endpoint} answered {status}: {said}") from error
    except RuntimeError as error:  # from a thread that uploads a file
        said = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise ConnectionError(f"--push {repo}: {said}") from error
    except unreached as error:
        raise ConnectionError(f"--push {repo}: {endpoint} can't be reached: {error}") from error
