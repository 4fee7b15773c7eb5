"""Two installations in turns: the processes, their cases, and what a user mistypes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "compare.py"), *words]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=400, check=False
    )


def test_a_folder_without_turnwise_is_refused(tmp_path: Path) -> None:
    done = run("--other", str(tmp_path))
    assert done.returncode == 2 and f"expected a folder that holds turnwise, got {tmp_path}" in done.stderr


def test_the_other_installation_is_the_one_that_is_imported(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """A stand-in that fails on import ends the bench with its name, and nothing passes for a measured time."""
    compare = load("compare")
    (tmp_path / "turnwise").mkdir()
    (tmp_path / "turnwise" / "__init__.py").write_text("raise SystemExit(7)")
    other = compare.Installation("older", tmp_path, ["--quick"])
    with pytest.raises(SystemExit, match="the process of older ended with code 7"):
        other.ask("case 0")


@pytest.mark.slow
def test_the_smallest_sizes(tmp_path: Path) -> None:
    import turnwise

    site = tmp_path / "site"
    site.mkdir()
    (site / "turnwise").symlink_to(Path(turnwise.__file__).parent)
    done = run(
        "--other", str(site), "--other_name", "same", "--quick", "--rounds", "2", "--json", str(tmp_path / "rows")
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["op"] for row in rows} >= {"policy_loss", "group_advantage", "linear_logprob", "state store"}
    assert all(row["same, µs"] > 0 and row["now, µs"] > 0 and row["× before"] > 0 for row in rows)
