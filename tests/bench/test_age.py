"""The figures that README leads to are not much older than the code that they measure."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
ROWS = dict.fromkeys(re.findall(r"bench/results/([\d-]{10})-(\S+)-cpu\.md", PAGE.split("\n## ")[1]))


def has_history() -> bool:
    """False for a source distribution and a shallow clone, which don't tell when a file changed."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository", "--show-toplevel"]
    told = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
    return told == ["false", str(ROOT)]


def test_each_file_of_results_has_its_benches_and_code(load: Callable[[str], ModuleType]) -> None:
    run = load("run")
    assert PAGE.split("\n## ")[1].startswith("In short") and len(ROWS) > 5
    assert {name for _, name in ROWS} == set(run.SHORT)
    for benches, paths in run.SHORT.values():
        assert set(benches) <= set(run.NAMES) and all((ROOT / path).exists() for path in paths)


if has_history():

    def test_no_row_is_much_older_than_the_code_that_it_measures(load: Callable[[str], ModuleType]) -> None:
        run = load("run")
        for day, name in ROWS:
            git = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", "--", *run.SHORT[name][1]]
            changed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
            age = (date.fromisoformat(changed) - date.fromisoformat(day)).days
            assert age <= run.MOST_DAYS, f"{name}: of {day}, its code changed on {changed}: bench/run.py --readme"
