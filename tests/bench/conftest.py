"""Load the benches by their path, as they are scripts outside the package; start them with the imports done."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from .warm_python import started

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


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A program to start as Python, without compilation, which takes long, and with one thread."""
    if not sys.platform.startswith("linux"):
        yield sys.executable
        return
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    with started(tmp_path_factory.mktemp("warm"), environment) as program:
        yield program
