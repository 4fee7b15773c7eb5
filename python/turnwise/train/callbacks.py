"""What may take part in the training loop beside it: told when a run starts and after each step, and saved with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.train.loop import Trainer
    from turnwise.types import GenerateResult


class Callback:
    """Override what is needed; all of it runs in the event loop's thread, while no policy is updated.

    ``name`` is unique in a run. What :meth:`state_dict` gives, fit for JSON, and :meth:`files` is in every checkpoint,
    so a resumed run has the callback as it was.
    """

    name: str

    async def on_start(self, trainer: Trainer) -> None:
        """The client has the starting weights, or those that the run resumed with; nothing was sampled yet."""

    async def after_step(self, trainer: Trainer, results: Sequence[GenerateResult]) -> Mapping[str, float]:
        """Step ``trainer.progress.step`` was trained on ``results`` and published; the metrics to log with it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this object."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Undo :meth:`state_dict`; ``folder`` is the checkpoint, with what :meth:`files` named in it."""

    def protected_steps(self) -> Collection[int]:
        """Steps whose checkpoints must stay."""
        return ()

    def files(self) -> Mapping[str, Path]:
        """Files that never change once written, by their names in a checkpoint, which links them."""
        return {}
