"""The tasks that rows name, as a module on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .features import TASKS


@pytest.fixture(autouse=True)
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the module, which is also on the path of this process."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "pair_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("pair_tasks", None)
    return folder
