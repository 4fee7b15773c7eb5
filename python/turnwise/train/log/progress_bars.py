"""Progress bars of a run, its rollouts and its updates; hidden if the console is not a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from turnwise.utils.output import Output, printable

SHOWN = {
    "validation": "validation",
    "success": "success",
    "success_selected": "selected",
    "reward": "reward",
    "tokens_per_second": "tok/s",
    "inference/kv_cache_use": "kv",
    "staleness": "stale",
}
"""Metrics shown next to the run's bar if a step has them, with their labels. The latest validation stays visible:
with a tree that selects branches, only validation measures the policy's own success."""


class ProgressBars:
    """The bar of the run, and below it one bar per stage, which appears when the stage first reports.

    ``total_steps`` is the run's length. Nothing is drawn with ``shown=False``, or if the console is not a terminal.
    """

    def __init__(self, total_steps: int, console: Console, *, shown: bool = True) -> None:
        file: Any = Output.over(console.file)
        console.file = file
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description:<8}", style="bold", markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            # On a narrow terminal only the note is cut.
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
            console=console,
            expand=True,
            disable=not (shown and console.is_terminal),
        )
        self._run = self._progress.add_task("train", total=total_steps, note="")
        self._stages: dict[str, TaskID] = {}
        self._validation: dict[str, float] = {}

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that ``step`` steps are done, and the last one's ``metrics``."""
        if "validation" in metrics:
            self._validation = {"validation": metrics["validation"]}
        self._progress.update(self._run, completed=step, note=summary({**self._validation, **metrics}))

    def stage(self, name: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` parts of the stage ``name`` are done. A new round restarts its clock."""
        if name not in self._stages:
            self._stages[name] = self._progress.add_task(name, total=total, note="")
        task = self._stages[name]
        if self._progress.tasks[self._progress.task_ids.index(task)].completed > done:
            self._progress.reset(task)
        self._progress.update(task, completed=done, total=total)

    def rewind(self, step: int, validation: float | None = None) -> None:
        """Go back to ``step`` finished steps. ``validation`` is the last one among them."""
        self.step(max(step, 0), {} if validation is None else {"validation": validation})

    def note(self, text: str) -> None:
        """Print ``text`` above the bars, as it is."""
        self.console.print(Text(printable(text)), soft_wrap=True)


def summary(metrics: Mapping[str, float], *, by_actor: bool = False) -> str:
    """Return a line such as ``success 0.5  reward 1.25  tok/s 812``, of the metrics that are present.

    It begins with the mean reward ``by_actor``, if asked for.
    """
    shown = {name: name for name in metrics if by_actor and name.startswith("reward/")} | SHOWN
    return "  ".join(f"{label} {_short(metrics[name])}" for name, label in shown.items() if name in metrics)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def curve_line(step: int, metrics: Mapping[str, float], width: int = 30) -> str:
    """Draw a point of the learning curve: ``  step 10  ▐█████████████████▌            ▌  57.3%  412,608 tokens``."""
    share = min(max(metrics["validation"], 0.0), 1.0)
    full, half = divmod(round(2 * width * share), 2)
    bar = ("█" * full + "▌" * half).ljust(width)
    tokens = f"  {metrics['total_sampled_tokens']:,.0f} tokens" if "total_sampled_tokens" in metrics else ""
    return f"  step {step:>3}  ▐{bar}▌ {metrics['validation']:6.1%}{tokens}"
