"""The figures that README leads to are not much older than the code that they measure."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
ROWS = dict.fromkeys(re.findall(r"bench/results/([\d-]{10})-(\S+)-cpu\.md", PAGE.split("\n## ")[1]))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source distribution has no history")
def test_no_row_is_much_older_than_the_code_that_it_measures(load: Callable[[str], ModuleType]) -> None:
    run = load("run")
    assert PAGE.split("\n## ")[1].startswith("In short") and len(ROWS) > 5
    assert {name for _, name in ROWS} == set(run.SHORT), "each file of results has its benches and code"
    for day, name in ROWS:
        benches, paths = run.SHORT[name]
        assert set(benches) <= set(run.NAMES) and all((ROOT / path).exists() for path in paths)
        git = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", "--", *paths]
        changed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        age = (date.fromisoformat(changed) - date.fromisoformat(day)).days
        assert age <= run.MOST_DAYS, f"{name}: measured on {day}, its code changed on {changed}: bench/run.py --readme"
