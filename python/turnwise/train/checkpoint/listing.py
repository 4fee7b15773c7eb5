"""Finds the checkpoints of a run. It reads only the step in their manifests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.utils.files import read_json, replace_text

if TYPE_CHECKING:
    from turnwise.train.config.schema import TrainConfig

PREFIX = "step_"
"""Beginning of the name of a checkpoint, before the eight digits of its step."""

LARGEST = 1 << 31
"""Most bytes of a manifest, which holds the artifacts of stores."""


EXPORTED = "export.json"
"""File of an exported policy's folder with the step of its weights."""


def checkpoint_at(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step`` under ``root``, which may not exist."""
    return root / f"{PREFIX}{step:08d}"


def checkpoints_to_resume(config: TrainConfig) -> list[Path]:
    """Return the checkpoints from which a run of ``config`` can go on, the newest last; none if it doesn't resume."""
    return list_checkpoints(Path(config.run_dir) / "checkpoints") if config.resume else []


def list_checkpoints(root: Path) -> list[Path]:
    """List the checkpoints under ``root``, oldest first, without those of :func:`ignored_checkpoints`.

    A checkpoint with an unreadable manifest is included; loading it raises an error.
    """
    return sorted(path for path in root.glob(f"{PREFIX}*") if _reason_to_ignore(path) is None)


def ignored_checkpoints(root: Path) -> dict[Path, str]:
    """List folders under ``root`` that look like checkpoints but are not (copies, for example), with the reasons."""
    reasons = {path: _reason_to_ignore(path) for path in sorted(root.glob(f"{PREFIX}*"))}
    return {path: reason for path, reason in reasons.items() if reason is not None}


def _reason_to_ignore(path: Path) -> str | None:
    if not re.fullmatch(rf"{PREFIX}\d{{8}}", path.name):
        return f"its name is not {PREFIX!r} and eight digits"
    manifest = path / "manifest.json"
    try:
        about = manifest.stat()
    except OSError:
        return "it has no manifest.json"
    step = _step_of(manifest, about.st_mtime_ns, about.st_size)
    return f"its manifest is that of step {step}" if step not in (None, int(path.name.removeprefix(PREFIX))) else None


@lru_cache(maxsize=1024)
def _step_of(manifest: Path, changed: int, size: int) -> int | None:
    """Return the step in a manifest, ``None`` if it is damaged. The cache avoids reading an unchanged file again."""
    try:
        return int(read_json(manifest, follow=True, most=LARGEST)["step"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None


def mark_exported(run_dir: Path, policies: Iterable[str], step: int | None) -> None:
    """Write the ``step`` of each exported policy into its folder. ``None`` takes the mark away before an export."""
    for name in policies:
        folder = run_dir / "policies" / name
        if step is None:
            (folder / EXPORTED).unlink(missing_ok=True)
        elif folder.is_dir():
            replace_text(folder / EXPORTED, json.dumps({"step": step}) + "\n")
