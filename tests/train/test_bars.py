"""Bars on a terminal, silence elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from turnwise.train.log.progress_bars import ProgressBars, curve_line

METRICS = {"success": 0.25, "reward": 1.5, "tokens_per_second": 812.3, "staleness": 0.5, "loss": 9.0}


def drawn(*, terminal: bool, shown: bool = True, width: int = 120) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    bars = ProgressBars(80, console, shown=shown)
    bars.start()
    bars.rewind(2)
    bars.stage("rollouts", 3, 24)
    bars.stage("updates", 1, 6)
    bars.step(3, METRICS)
    bars.note("a note")
    bars.stop()
    return plain(out)


def plain(out: io.StringIO) -> str:
    """What was written, without the sequences that move the cursor."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.getvalue())


def test_three_bars_on_a_terminal():
    last = drawn(terminal=True).split("a note")[-1]
    run, rollouts, updates = [line for line in last.splitlines() if "/" in line][-3:]
    assert run.split()[0] == "train" and "3/80" in run
    assert "success 0.25  reward 1.5  tok/s 812  stale 0.5" in run and "loss" not in run
    assert rollouts.split()[0] == "rollouts" and "3/24" in rollouts
    assert updates.split()[0] == "updates" and "1/6" in updates
    # On a narrow terminal the end of the metrics is cut, not the bars.
    for line in drawn(terminal=True, width=60).split("a note")[-1].splitlines():
        assert len(line) <= 60 and (" success" not in line or re.match(r"train    . +3/80 \S+ success", line))
    # A new round of a stage starts again.
    out = io.StringIO()
    bars = ProgressBars(2, Console(file=out, force_terminal=True, width=120, color_system=None))
    bars.start()
    bars.stage("rollouts", 24, 24)
    bars.stage("rollouts", 1, 30)
    bars.stop()
    assert "1/30" in plain(out).splitlines()[-1]


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([], "validation 0.125"),
        ([{"success_selected": 0.625}], "validation 0.125  selected 0.625"),
        ([{"success_selected": 0.5, "validation": 0.25}, {"reward": 1.0}], "validation 0.25  reward 1"),
    ],
)
def test_the_latest_validation_stays_in_view(steps, shown):
    """Beside what a tree selected it alone is the policy's own success; so it is right after a resume."""
    out = io.StringIO()
    bars = ProgressBars(80, Console(file=out, force_terminal=True, width=140, color_system=None))
    bars.start()
    bars.rewind(2, 0.125)
    for step, metrics in enumerate(steps, start=3):
        bars.step(step, metrics)
    bars.stop()
    last = [line for line in plain(out).splitlines() if "/80" in line][-1]
    assert f"{2 + len(steps)}/80" in last and f" {shown} " in last


@pytest.mark.parametrize("settings", [{"terminal": False}, {"terminal": True, "shown": False}])
def test_notes_alone_where_no_bar_is_wanted(settings):
    assert drawn(**settings).strip() == "a note"


@pytest.mark.parametrize(
    ("success", "bar"), [(0.0, ""), (0.25, "██▌"), (0.5, "█████"), (1.0, "█" * 10), (-0.5, ""), (1.75, "█" * 10)]
)
def test_a_line_of_the_learning_curve(success, bar):
    line = curve_line(5, {"validation": success, "total_sampled_tokens": 12345}, width=10)
    assert line == f"  step   5  ▐{bar.ljust(10)}▌ {success:6.1%}  12,345 tokens"
