"""Files that somebody chose to do harm are refused, or give a value: no signal, little memory, little time."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.state import CheckpointError, load

SHARE = 10_000
SLOW = [pytest.param(seed, SHARE, marks=pytest.mark.slow) for seed in range(1, 6)]


def run(call: str) -> None:
    """Run a function of ``hostile`` in a process of its own, whose death is a failure."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import hostile; hostile.{call}"
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, f"{call}: {result.returncode}\n{result.stdout[-3000:]}{result.stderr[-6000:]}"


def test_crafted_values_are_refused() -> None:
    run("check_crafted()")


def test_keys_that_take_for_ever_to_hash_are_refused() -> None:
    run("check_keys()")


def test_a_dict_with_one_key_twice_is_refused() -> None:
    run("check_twice()")


@pytest.mark.parametrize("kind", ["archives", "records"])
@pytest.mark.parametrize(("seed", "rounds"), [(0, 300), *SLOW])
def test_mutated_files_give_an_error_or_a_value(kind: str, seed: int, rounds: int) -> None:
    run(f"fuzz({kind!r}, {seed}, {rounds})")


def test_files_of_the_format_that_held_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(struct.pack("<8sII", b"\x89TWSTATE", 1, 4) + bytes(200))
    with pytest.raises(CheckpointError, match="it has format 1; this turnwise reads format 2"):
        load(tmp_path / "old")
