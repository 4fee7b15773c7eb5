"""Records of a run: metrics (a line a step), ``rollouts.jsonl`` (a few episodes a step), ``warnings.jsonl``, and
progress bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from turnwise.arena.recording.rollouts_jsonl import plain_result
from turnwise.train.config.schema import TrainConfig
from turnwise.train.log.progress_bars import ProgressBars, curve_line
from turnwise.train.log.token_text import token_texts
from turnwise.train.log.writers import JsonLines, MetricWriter, append_lines, keep_steps, open_writers, read_lines
from turnwise.types import GenerateResult, Tokenizer

_FAILED_PER_STEP = 8
"""Failed episodes written whole, of each step: enough to see why, not enough to fill a disk."""


class RunLog:
    """Hands metrics to ``writers``, writes episodes under ``folder``, and shows bars where ``console`` is a terminal.

    ``rollouts_per_step`` episodes of each step are written whole, with the recording that ``turnwise replay`` plays;
    lines are flushed as they are written. Without ``writers`` metrics go to ``metrics.jsonl`` alone. With a
    ``tokenizer`` each completion token is written as text too.
    """

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        *,
        rollouts_per_step: int = 1,
        writers: Sequence[MetricWriter] | None = None,
        tokenizer: Tokenizer | None = None,
        console: Console | None = None,
        progress: bool = True,
    ) -> None:
        self.folder = folder
        self.rollouts_per_step = rollouts_per_step
        self.tokenizer = tokenizer
        self.writers: list[MetricWriter] = [JsonLines(folder / "metrics.jsonl")] if writers is None else list(writers)
        self.progress = progress
        self.bars = ProgressBars(total_steps, console or Console(), shown=progress)
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self:
        """The log that ``config.log`` describes, under ``config.run_dir``."""
        return cls(
            config.run_dir,
            config.steps,
            rollouts_per_step=config.log.rollouts_per_step,
            writers=open_writers(config),
            progress=config.log.progress,
        )

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()
        for writer in self.writers:
            writer.close()

    def step(self, step: int, metrics: Mapping[str, float], results: Sequence[GenerateResult] = ()) -> None:
        """Record one finished training step."""
        for writer in self.writers:
            writer.log(step, metrics)
        chosen = [result for result in results if result.rollout.error is None][: self.rollouts_per_step]
        failed = [result for result in results if result.rollout.error is not None][:_FAILED_PER_STEP]
        kept = {id(result) for result in chosen + failed}  # in their order, which sums in credit rules depend on
        rows = [{"step": step, **self._plain(result)} for result in results if id(result) in kept]
        append_lines(self.folder / "rollouts.jsonl", rows)
        self.bars.step(step, metrics)
        if self.progress and "validation" in metrics:
            self.note(curve_line(step, metrics))

    def rollouts(self, done: int, total: int) -> None:
        """Show how many episodes of the batch under way are finished."""
        self.bars.stage("rollouts", done, total)

    def updates(self, done: int, total: int) -> None:
        """Show how many optimizer updates of the batch under way are done."""
        self.bars.stage("updates", done, total)

    def warn(self, step: int, text: str) -> None:
        """Print what is wrong with ``step``, and keep it in ``warnings.jsonl``, which the report shows."""
        self.note(f"step {step}: {text}")
        append_lines(self.folder / "warnings.jsonl", [{"step": step, "warning": text}])

    def note(self, text: str) -> None:
        """Print one line, above the bars where there are any."""
        self.bars.note(text)

    def rewind(self, step: int) -> int:
        """Drop what stands there of later steps, and a line that a kill cut off, so that each step is written once.

        Returns how many later steps there were.
        """
        later = len({row["step"] for row in read_metrics(self.folder) if row["step"] > step})
        for writer in self.writers:
            writer.rewind(step)
        for name in ("rollouts.jsonl", "warnings.jsonl"):
            keep_steps(self.folder / name, step)
        validated = [row for row in read_metrics(self.folder) if "validation" in row]
        self.bars.rewind(step, validated[-1] if validated else None)
        return later

    def _plain(self, result: GenerateResult) -> dict[str, Any]:
        row = plain_result(result)
        if self.tokenizer is not None:
            _write_tokens(row, self.tokenizer)
        return row


def _write_tokens(row: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Beside the ids of each completion its tokens as text, here and below."""
    for step in row["steps"]:
        step["completion_tokens"] = token_texts(tokenizer, step["completion_token_ids"])
    for child in row["children"]:
        _write_tokens(child, tokenizer)


def read_metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, or of another file; an unfinished last line is left out.

    Raises ``ValueError`` naming a bad one.
    """
    return [row for _, row in read_lines(folder / name)]
