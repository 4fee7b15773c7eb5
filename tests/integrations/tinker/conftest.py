"""Collects these tests only where SkyRL is with its JAX backend and the Tinker SDK: `make test-tinker`.

One server serves all tests. JAX compiles for each new shape, tens of seconds in all.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .helpers import Server

HERE = all(importlib.util.find_spec(name) for name in ("tinker", "skyrl", "jax", "uv"))
collect_ignore_glob = [] if HERE else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def key() -> None:
    from .helpers import KEY

    os.environ["TINKER_API_KEY"] = KEY


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that has learned the form of a sudoku's answers, and little more."""
    from .helpers import warm_base

    return warm_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from .helpers import Server

    with Server(base, tmp_path_factory.mktemp("skyrl")) as running:
        yield running
