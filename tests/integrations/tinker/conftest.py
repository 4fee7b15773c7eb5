"""Collects these tests only where SkyRL is with its JAX backend and the Tinker SDK: `make test-tinker`.

One server serves the tests. JAX compiles for each new shape, seconds each.
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
    """A folder with a narrow model that has begun to learn the form of a task's answers, whose prompts are short."""
    from .helpers import warm_base

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    return warm_base(tmp_path_factory.mktemp("base"), "split_clues", {}, steps=10, **sizes)


@pytest.fixture(scope="session")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from .helpers import Server

    with Server(base, tmp_path_factory.mktemp("skyrl")) as running:
        yield running
