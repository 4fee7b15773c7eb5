"""Pushes an exported policy to the Hugging Face Hub, or to another server that ``HF_ENDPOINT`` names, with a card."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turnwise import __version__
from turnwise.run.export import Exported
from turnwise.run.policy_sharing import own_bases
from turnwise.train.config.schema import TrainConfig
from turnwise.train.log.run_log import read_metrics
from turnwise.train.model.loading import TINY


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
        "task": config.task,
        "actors": ", ".join(actor for actor, policy in config.actors.items() if policy == exported.policy),
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
    logged = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
    rows = [row for row in logged if row["step"] == last and "validation" in row]
    metrics = rows[-1] if rows else {}
    return {f"validation at step {last}: success": f"{evaluations[last]:.1%}"} | {
        f"validation at step {last}: {name.partition('/')[2]}": f"{value:.4g}"
        for name, value in metrics.items()
        if name.startswith("validation/")
    }


def on_the_hub(path: str) -> bool:
    """Return True unless ``path`` is the tiny model or a folder of this machine."""
    return path != TINY and not path.startswith((".", "/", "~")) and not Path(path).exists()


def check_push(config: TrainConfig, policy: str, *, merge: bool) -> None:
    """Raise ``ValueError`` for a push without a token, and for an adapter whose base nobody else has."""
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

    The server is ``HF_ENDPOINT``, the token ``HF_TOKEN``. Without a ``revision`` the repository must be new. A
    ``revision`` is a branch of a new or existing one, which is made if it is missing. Raises ``ValueError`` for a
    repository that exists or that is public in spite of ``private``, ``PermissionError`` if the server refuses the
    token, and ``ConnectionError`` if it can't be reached or fails.
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
