"""Sends a run's metrics to Weights & Biases."""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.train.config.toml import ConfigError
from turnwise.utils.files import read_json, replace_text
from turnwise.utils.values import problem


class WandB:
    """A :class:`~turnwise.train.log.writers.MetricWriter` for one Weights & Biases run per run folder.

    ``folder/wandb.json`` keeps its id and last step. A copy of the folder is another run. W&B can't change a step, so
    steps that a resumed run repeats are not sent again. What W&B's environment variables set, such as ``WANDB_MODE``,
    this class leaves alone, but for a ``mode``: ``"offline"`` writes below ``folder/wandb`` without network access, and
    ``wandb sync`` sends it later.
    """

    def __init__(
        self, folder: Path, project: str, *, mode: str | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise ImportError("log.wandb needs wandb: pip install 'turnwise[logging]'") from error
        self.folder, self.project, self.mode, self.config = folder, project, mode, dict(config or {})
        self._run: Any = None
        self._id, self._last, self._shift = "", -1, 0
        self._open_row = self._new_row = 0
        """Of W&B's rows, the last that takes metrics, and the first without any."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.open()
        if step <= self._last:
            return
        # The file is written first: a kill in between loses this step instead of sending it twice.
        self._last = step
        self._remember()
        self._send(step + self._shift, step, metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add ``metrics`` to the row of ``step``. If W&B has closed it, as at the end of a process, they get a new row.

        The rows of all later steps are then numbered from there, so ``step`` becomes the x-axis.
        """
        self.open()
        if step > self._last:
            self.log(step, metrics)
        elif (row := step + self._shift) >= self._open_row:
            self._send(row, step, metrics)
        else:
            self._shift = self._new_row - self._last
            self._remember()
            self._run.define_metric("*", step_metric="step")
            self._send(self._new_row, step, metrics)

    def _send(self, row: int, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step}, step=row)
        self._open_row, self._new_row = row, row + 1

    def rewind(self, step: int) -> None:
        if step < 0 and (self._run is None or self._last >= 0):  # no step is left, so a new W&B run begins
            self.close()
            self._file.unlink(missing_ok=True)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    @property
    def _file(self) -> Path:
        return self.folder / "wandb.json"

    def open(self) -> None:
        """Begin the W&B run, or go on with it. Raises ``ConfigError``, such as without an API key."""
        if self._run is not None:
            return
        import wandb

        saved = read_json(self._file) if self._file.exists() else {}
        if saved and not self._is_ours(saved):
            warnings.warn(
                f"{self.folder} is a copy of {saved['folder']}, so a new run begins at Weights & Biases", stacklevel=2
            )
            saved = {}
        self._id = saved.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._last, self._shift = saved.get("last_step", -1), saved.get("shift", 0)
        mode: Any = self.mode or os.environ.get("WANDB_MODE")
        settings = {"SILENT": ("silent", True), "CONSOLE": ("console", "off"), "DISABLE_GIT": ("disable_git", True)}
        try:
            self._run = wandb.init(
                project=self.project,
                id=self._id,
                mode=mode,
                resume="allow" if mode in (None, "online") else None,
                config=self.config,
                settings=wandb.Settings(**_unless_set(settings)),
                **_unless_set({"DIR": ("dir", str(self.folder)), "NAME": ("name", self.folder.name)}),
            )
        except (wandb.Error, OSError, ValueError) as error:
            why = f"Weights & Biases opens no run: {error} (log.wandb_mode = 'offline' needs neither key nor network)"
            raise ConfigError(problem("log.wandb", why, self.project)) from error
        self._open_row = self._new_row = getattr(self._run, "starting_step", 0)
        self._remember()

    def _remember(self) -> None:
        plain = {"id": self._id, "project": self.project, "last_step": self._last, "shift": self._shift}
        replace_text(self._file, json.dumps({**plain, **_place(self.folder)}) + "\n")

    def _is_ours(self, saved: Mapping[str, Any]) -> bool:
        """Return False if ``saved`` was copied here: a moved folder keeps its inode, a restored one its path."""
        here = _place(self.folder)
        return any(saved.get(name, here[name]) == here[name] for name in here)


def _place(folder: Path) -> dict[str, Any]:
    at = folder.stat()
    return {"folder": str(folder.resolve()), "inode": f"{at.st_dev}:{at.st_ino}"}


def _unless_set(settings: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return the settings, as name and value, whose environment variable ``WANDB_<key>`` is not set."""
    return {name: value for key, (name, value) in settings.items() if f"WANDB_{key}" not in os.environ}
