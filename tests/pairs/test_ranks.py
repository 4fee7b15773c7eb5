"""Rows and single values on two ranks, as torchrun starts them, and rows whose processes are killed.

What ``--dry-run`` accepts trains on one process and on two ranks, from the start, and from the checkpoint of a run
with another value.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from turnwise.run.build import train_from_config
from turnwise.train.validate import config_from_dict

from .features import FEATURES, config_of
from .invariants import as_one_process, differences, sums, written
from .processes import Job, Result, kill_in_step_2, runs_of
from .rows import FIRST, Row, accepted, alone, covering

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow_model")]
PARTS = 8


def broken_on_two_ranks(rows: Sequence[Row], folder: Path, python: str, modules: Path) -> list[str]:
    """Run the rows on two ranks, go on as if killed, and say what does not hold, by row."""
    shutil.rmtree(folder, ignore_errors=True)
    jobs: list[Job] = []
    for number, row in enumerate(rows):
        begun = {"run_dir": str(folder / f"{number}-whole")}
        jobs.append(Job(config_of(row) | begun))
        jobs.append(Job(config_of(row) | {"run_dir": str(folder / f"{number}-again")}, begun["run_dir"]))
    results = runs_of(python, jobs, folder / "jobs", ranks=2, modules=modules)
    found = []
    for number, row in enumerate(rows):
        for problem in _problems_on_two_ranks(row, folder, number, *results[2 * number : 2 * number + 2]):
            found.append(f"{ {name: value for name, value in row.items() if value != FIRST[name]} }: {problem}")
            break
    return found


def _problems_on_two_ranks(row: Row, folder: Path, number: int, whole: Result, again: Result) -> Iterator[str]:
    if why := whole.refused or whole.failed:
        yield f"accepted, and fails: {why}"
    whole_dir, again_dir, alone_dir = (folder / f"{number}-{name}" for name in ("whole", "again", "alone"))
    yield from sums(whole_dir)
    # The first step of one process, which reads equal samples: without dropout, and if no clock orders them. Shards
    # that compute in bfloat16 have other entropies, so other tokens are among the top ones.
    clock, others = row.get("loop") == "clock", (row.get("shards"), row.get("masks")) == ("narrow", "entropy")
    if not (clock or others) and row.get("dropout", "off") == "off" and row.get("policies") != "adapter":
        train_from_config(config_from_dict(config_of(row) | {"run_dir": str(alone_dir)})).close()
        yield from as_one_process(alone_dir, whole_dir)
    if not clock:
        if why := again.refused or again.failed:
            yield f"fails when it resumes: {why}"
        yield from differences(written(whole_dir), written(again_dir), "a resumed run")


@pytest.mark.parametrize("part", [pytest.param(0, marks=pytest.mark.representative), *range(1, 2 * PARTS)])
def test_rows_train_on_two_ranks(part: int, tmp_path: Path, warm_python: str, tasks: Path) -> None:
    rows = [accepted(row, ranks=2) for row in covering()[part :: 6 * PARTS]]
    failed = broken_on_two_ranks(rows, tmp_path / "run", warm_python, tasks)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", range(PARTS))
def test_a_value_that_a_dry_run_accepts_trains(
    part: int, ranks: int, tmp_path: Path, warm_python: str, tasks: Path
) -> None:
    """From the start, and from the checkpoint of a run without it; and a run without it goes on from its checkpoint."""
    jobs: list[Job] = []
    names: list[str] = []
    below: dict[str, str] = {}

    def add(name: str, row: Row, begun: str = "") -> str:
        folder = str(tmp_path / "runs" / str(len(jobs)))
        jobs.append(Job(config_of(row) | {"run_dir": folder}, begun))
        names.append(f"{ {name: value for name, value in row.items() if value != FIRST[name]} } {name}")
        return folder

    values = [(name, value) for name, each in FEATURES.items() for value in each if value != FIRST[name]]
    for name, value in values[part::PARTS]:
        if (found := alone(name, value, ranks)) is None:
            continue
        row, without = found
        if str(without) not in below:
            below[str(without)] = add("", without)
        begun = add("from the start", row)
        add(f"where {name} was {FIRST[name]}", row, below[str(without)])
        add(f"where {name} was {value}", without, begun)
    results = runs_of(warm_python, jobs, tmp_path / "jobs", ranks=ranks, modules=tasks)
    failed = [f"{name}: {result.failed}" for name, result in zip(names, results, strict=True) if result.failed]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", range(2))
def test_a_killed_row_goes_on_with_the_same_bits(
    part: int, ranks: int, tmp_path: Path, warm_python: str, tasks: Path
) -> None:
    """SIGKILL of one process in the second step: while it samples, updates, validates or saves."""
    draws = random.Random(part)
    rows = [accepted(row, ranks) for row in draws.sample(covering(), 12) if row["loop"] != "clock"]
    whole, killed = (
        [Job(config_of(row) | {"run_dir": str(tmp_path / name / str(number))}) for number, row in enumerate(rows)]
        for name in ("whole", "killed")
    )
    options: Any = {"ranks": ranks, "modules": tasks}
    results = runs_of(warm_python, whole, tmp_path / "wholes", **options)
    for number, job in enumerate(killed):
        kill_in_step_2(warm_python, job, tmp_path / f"kill{number}", after=draws.uniform(0, 0.5), **options)
    results += runs_of(warm_python, killed, tmp_path / "again", **options)
    failed = [f"{row}: {result}" for row, result in zip([*rows, *rows], results, strict=True) if result != Result()]
    assert not failed, "\n".join(failed)
    for row, one, other in zip(rows, whole, killed, strict=True):
        folders = (Path(job.config["run_dir"]) for job in (one, other))
        failed += [f"{row}: {each}" for each in differences(*map(written, folders), "a killed run")]
    assert not failed, "\n".join(failed)
