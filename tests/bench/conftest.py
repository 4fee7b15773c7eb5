"""Load the benches by their path, as they are scripts outside the package; start them with the imports done."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """``load("run")`` loads a module of ``bench/`` as a script there would import it."""
    monkeypatch.syspath_prepend(str(BENCH))

    def by_path(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, f"bench_{name}", module)
        spec.loader.exec_module(module)
        return module

    return by_path
