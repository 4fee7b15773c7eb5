from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from turnwise.tasks import TASKS, build_task
from turnwise.tasks.base import check_counts, check_split, split_of


def test_unknown_tasks_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="task='sudoko': unknown; did you mean 'sudoku'"):
        build_task("sudoko")
    with pytest.raises(ValueError, match="known: " + ", ".join(sorted(TASKS))):
        build_task("zzz")


def test_hash_splits_are_frozen_and_eight_in_ten_train():
    assert [split_of(text) for text in "efgh"] == ["train", "validation", "eval", "train"]
    counts = Counter(split_of(str(i)) for i in range(5000))
    assert counts["train"] / 5000 == pytest.approx(0.8, abs=0.02)
    assert counts["eval"] / 5000 == pytest.approx(0.1, abs=0.02)


def test_checks_name_what_is_wrong():
    with pytest.raises(ValueError, match="copies=0"):
        check_counts(questions=1, copies=0)
    with pytest.raises(ValueError, match="split='dev'"):
        check_split("dev")


def test_importing_every_task_needs_no_torch_no_key_and_no_network():
    modules = ", ".join(["turnwise.tasks.tiny", *(place.partition(":")[0] for place in TASKS.values())])
    code = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules), 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})
