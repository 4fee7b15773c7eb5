"""Progress of a run: counters, validations, reasons to stop, and the best step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.train.checkpoint.files import CheckpointError, hold
from turnwise.train.checkpoint.listing import LARGEST, checkpoint_at, list_checkpoints
from turnwise.train.config.policies import steps_in_training
from turnwise.train.config.schema import TrainConfig
from turnwise.utils.files import expanded, read_json


@dataclass(slots=True)
class RunProgress:
    """Counters of a run, saved with every checkpoint.

    ``evaluations`` is the validation success by step, with strings as keys as in JSON: ``{"10": 0.42}``. ``seconds``
    counts finished steps, with their validations.
    """

    step: int = 0
    episodes: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    evaluations: dict[str, float] = field(default_factory=dict)

    @property
    def best_step(self) -> int | None:
        """The step of the best validation, the first if several are equal; ``None`` before any validation."""
        if not self.evaluations:
            return None
        return min(map(int, self.evaluations), key=lambda step: (-self.evaluations[str(step)], step))

    def finished(self, config: TrainConfig) -> str | None:
        """Return the reason to end the run, or ``None`` while no limit of ``config`` is reached."""
        # The latest ``hold`` validations, and the number of validations since the best one.
        best = self.best_step
        target, hold, patience = config.eval.target_success, config.eval.hold, config.eval.patience
        latest = [self.evaluations[step] for step in sorted(self.evaluations, key=int)][-hold:]
        since = sum(int(step) > best for step in self.evaluations) if best is not None else 0
        limits = {
            f"steps = {config.steps}": self.step >= config.steps,
            f"max_seconds = {config.max_seconds}": config.max_seconds is not None
            and self.seconds >= config.max_seconds,
            f"max_sampled_tokens = {config.max_sampled_tokens}": config.max_sampled_tokens is not None
            and self.sampled_tokens >= config.max_sampled_tokens,
            f"eval.target_success = {target}: validation success is {' and '.join(f'{s:.1%}' for s in latest)}": (
                target is not None and len(latest) == hold and min(latest) >= target
            ),
            f"eval.patience = {patience}: no validation since step {best} was better": patience is not None
            and since >= patience,
        }
        return next((reason for reason, reached in limits.items() if reached), None)

    def run_share(self, config: TrainConfig, policy: str) -> float:
        """Return the share of the run that is over for ``policy``: of the steps that update it, or of
        ``max_sampled_tokens`` if that is more."""
        done, steps = (steps_in_training(policy, number, config.phases) for number in (self.step, config.steps))
        by_tokens = self.sampled_tokens / config.max_sampled_tokens if config.max_sampled_tokens else 0.0
        return min(1.0, max(done / max(1, steps), by_tokens))

    def checkpoint_due(self, config: TrainConfig) -> bool:
        """Return True if ``checkpoint.every`` saves this step, or ``checkpoint.keep_best`` as the best so far."""
        every = config.checkpoint.every
        return bool(every and self.step % every == 0) or self.best_kept(config) == self.step

    def best_kept(self, config: TrainConfig) -> int | None:
        """Return the step that ``checkpoint.keep_best`` keeps; ``None`` if it is off, or before any validation."""
        return self.best_step if config.checkpoint.keep_best else None


START = "start"
"""Name of a run's starting weights, after its warm start; used instead of a checkpoint's name."""


def find_checkpoint(root: Path, which: str | Path) -> Path:
    """Return the checkpoint under ``root`` that ``which`` names: a key of :data:`NAMED`, its own name, or a folder.

    A run that still trains keeps it as long as this process lives. Raises
    :class:`~turnwise.train.checkpoint.files.CheckpointError` naming what is missing.
    """
    if str(which) not in NAMED:
        inside = root / which
        found = inside if inside.is_dir() else expanded(Path(which))
        hold(found)
        return found
    while True:
        checkpoints = list_checkpoints(root)
        if not checkpoints:
            raise CheckpointError(f"checkpoint {str(which)!r}: {root} has none")
        found = NAMED[str(which)](checkpoints)
        if hold(found) or found in list_checkpoints(root):  # else the run has deleted it since the listing
            return found


def _best(checkpoints: list[Path]) -> Path:
    """Return the checkpoint with the best validation, according to the newest checkpoint."""
    try:
        state = read_json(checkpoints[-1] / "manifest.json", follow=True, most=LARGEST)["state"]
        step = RunProgress(**state["progress"]).best_step
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoints[-1] / 'manifest.json'} can't be read: {error!r}") from error
    if step is None:
        raise CheckpointError(f"checkpoint 'best': nothing was validated up to {checkpoints[-1]}; set eval.every")
    best = checkpoint_at(checkpoints[-1].parent, step)
    if best not in checkpoints:
        raise CheckpointError(f"checkpoint 'best': that of step {step} is gone; checkpoint.keep_best = true keeps it")
    return best


NAMED: dict[str, Callable[[list[Path]], Path]] = {"newest": lambda checkpoints: checkpoints[-1], "best": _best}
"""Special names of checkpoints. Each function chooses one of a run's checkpoints, given oldest first."""
