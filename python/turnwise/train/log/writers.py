"""Metric writers, each a :class:`MetricWriter`: ``metrics.jsonl`` always, TensorBoard, Weights & Biases and Prometheus
on request.

A writer opens its log before a training run samples anything, and at the latest with the first step. Inspecting a run
creates no empty log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Protocol

from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.log.lines import add_to_step, append_lines, keep_steps
from turnwise.train.log.metrics import numbers_of
from turnwise.train.log.prometheus import Prometheus
from turnwise.train.log.secrets import hide_secrets
from turnwise.train.log.weights_and_biases import WandB
from turnwise.utils.values import problem

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricWriter(Protocol):
    """A destination of metrics. The trainer calls ``rewind`` before the first ``log``.

    A method ``add(step, metrics)`` gets metrics of a step that is already logged; without it :meth:`log` gets them.
    A method ``open()`` is called, perhaps several times, before a run samples anything. It raises an error, such as
    ``ConfigError``, if later calls would fail.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one finished step. Steps come in rising order."""

    def rewind(self, step: int) -> None:
        """Forget the steps after ``step`` (-1: all steps): they will be logged again, and must not appear twice."""

    def close(self) -> None:
        """Write pending data. Logging may continue afterwards."""


def open_writers(config: TrainConfig) -> list[MetricWriter]:
    """Return the writers that ``config.log`` selects. Raises ``ImportError`` naming the extra of a missing package,
    and ``ConfigError`` if the port for Prometheus is in use."""
    writers: list[MetricWriter] = [JsonLines(config.run_dir / "metrics.jsonl")]
    if config.log.tensorboard:
        writers.append(TensorBoard(config.run_dir / "tensorboard"))
    if config.log.wandb is not None:
        settings = hide_secrets(config.model_dump(mode="json"))
        writers.append(WandB(config.run_dir, config.log.wandb, mode=config.log.wandb_mode, config=settings))
    if config.log.prometheus is not None:
        writers.append(Prometheus(config))
    return writers


class JsonLines:
    """Appends one JSON object per step to ``path``, ``{"step": 3, "reward": 0.5, ...}``, and flushes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        append_lines(self.path, [{"step": step, **metrics}])

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add ``metrics`` to the row of ``step``, or to a new row at the end."""
        add_to_step(self.path, step, metrics)

    def rewind(self, step: int) -> None:
        keep_steps(self.path, step)

    def close(self) -> None:
        """Do nothing: every line is already written."""


class TensorBoard:
    """Writes event files under ``folder``, one scalar per metric. View them with ``tensorboard --logdir RUN_DIR``.

    A resumed run writes a new file, which makes TensorBoard drop the repeated steps (``purge_step``).
    """

    def __init__(self, folder: Path) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ImportError("log.tensorboard needs tensorboard: pip install 'turnwise[logging]'") from error
        self.folder = folder
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def open(self) -> None:
        """Raise ``ConfigError`` unless a file can be made in the folder. The first step opens the log itself."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ConfigError(problem("log.tensorboard", f"{self.folder} can't be written: {error}", True)) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_step)
        for name, value in numbers_of(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
