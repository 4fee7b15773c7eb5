"""Saves a warm start in the run's folder, so that a signal or a kill in it loses minutes and not all of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from turnwise.train.checkpoint.checkpoint import check_checkpoint, load_checkpoint, save_checkpoint
from turnwise.train.checkpoint.files import CheckpointError
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.model.policy import Policy

FOLDER = "warm_start"
"""Folder of a run with the state of its warm start, until the run has a checkpoint."""

_BEST = "best.safetensors"


class WarmStartSaver:
    """Saves the warm start of one base under ``folder``, every ``minutes`` (0: never by the clock) and when asked.

    ``key`` identifies settings and rows: the state of another warm start is not restored. ``asked`` returns the signal
    that asks the process to end, or ``None``; then :meth:`after_step` saves and raises ``SystemExit(128 + signal)``.
    ``note`` gets lines for the user.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        minutes: float,
        asked: Callable[[], int | None] = lambda: None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder, self.key, self.minutes, self.asked, self.note = folder, key, minutes, asked, note
        self._saved_at = time.monotonic()

    def load(self, policy: Policy) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Restore ``policy``, and return the state and tensors that were saved with it; ``None`` if there are none."""
        found = list_checkpoints(self.folder)
        if not found:
            return None
        try:
            saved = check_checkpoint(found[-1], {policy.name: policy})["state"]["key"]
            why = "" if saved == self.key else "is of a warm start with other settings or rows"
        except CheckpointError as error:
            why = f"can't be read ({error})"
        if why:
            self.note(f"{found[-1]} {why}, so the warm start begins again")
            shutil.rmtree(self.folder)
            return None
        step, state = load_checkpoint(found[-1], {policy.name: policy})
        self.note(f"the warm start goes on from its step {step}, saved in {found[-1]}")
        return state["warm_start"], load((found[-1] / _BEST).read_bytes())

    def save(self, policy: Policy, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Save ``policy`` after ``step``, with a JSON-ready ``state`` and ``tensors``."""
        whole = {"key": self.key, "warm_start": dict(state)}
        best = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        save_checkpoint(self.folder, step, {policy.name: policy}, whole, keep=1, attachments={_BEST: best})
        self._saved_at = time.monotonic()

    def after_step(
        self, policy: Policy, step: int, state: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]]
    ) -> None:
        """Save if it is time, or if a signal came."""
        number = self.asked()
        due = self.minutes and time.monotonic() - self._saved_at >= 60 * self.minutes
        if number is None and not due:
            return
        self.save(policy, step, *state())
        if number is not None:
            self.note(f"stopped in the warm start; run the same command again to go on from its step {step}")
            raise SystemExit(128 + number)
