"""What a run writes down: ``metrics.jsonl`` (a line a step), ``rollouts.jsonl`` (a few episodes a step), a bar."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from turnwise.types import GenerateResult

_FAILED_PER_STEP = 8
"""Failed episodes written whole, of each step: enough to see why, not enough to fill a disk."""


class RunLog:
    """Appends JSON lines under ``folder`` and shows a progress bar where ``console`` is a terminal.

    ``rollouts_per_step`` episodes of each step are written whole. Lines are flushed as they are written.
    """

    def __init__(
        self, folder: Path, total_steps: int, *, rollouts_per_step: int = 1, console: Console | None = None
    ) -> None:
        self.folder = folder
        self.rollouts_per_step = rollouts_per_step
        self.console = console or Console()
        folder.mkdir(parents=True, exist_ok=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._bar = self._progress.add_task("train", total=total_steps, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def step(self, step: int, metrics: Mapping[str, float], results: Sequence[GenerateResult] = ()) -> None:
        """Record one finished training step."""
        self._append("metrics.jsonl", [{"step": step, **metrics}])
        chosen = [result for result in results if result.rollout.error is None][: self.rollouts_per_step]
        failed = [result for result in results if result.rollout.error is not None]
        self._append(
            "rollouts.jsonl", [{"step": step, **_plain(result)} for result in chosen + failed[:_FAILED_PER_STEP]]
        )
        self._progress.update(self._bar, completed=step, note=_note(metrics))

    def note(self, text: str) -> None:
        """Print one line, above the bar where there is one."""
        self._progress.console.print(text, highlight=False)

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps, and a line that a kill cut off, so that a resumed run writes each once."""
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            path = self.folder / name
            if path.exists():
                kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
                temporary.replace(path)
        self._progress.update(self._bar, completed=step)

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as stream:
            for row in rows:
                stream.write(json.dumps(row, default=str) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; an unfinished last line is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if _step_of(line) < math.inf]


def _step_of(line: str) -> float:
    """The step of a JSON line; infinity for one that was cut off while it was written."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _plain(result: GenerateResult) -> dict[str, Any]:
    children = [_plain(child) for child in result.children]
    return {**_jsonable(result.rollout), "parent_id": result.parent_id, "children": children}


def _jsonable(value: Any) -> Any:
    """What JSON can hold of ``value``. An episode's extras may be anything, and must not end a run by being logged."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in fields(value)}
    return value


def _note(metrics: Mapping[str, float]) -> str:
    shown = {"success": "success", "reward": "reward", "tokens_per_second": "tok/s"}
    return "  ".join(f"{label} {metrics[name]:.3g}" for name, label in shown.items() if name in metrics)
