"""The fixtures of TRL's tests: a tiny model, and trainings with TRL's real ``GRPOTrainer``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from .helpers import Run, save_model, train_once


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl  # noqa: F401
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def train(model_folder: Path, tmp_path: Path) -> Callable[..., Run]:
    """``train(cls, **settings)``: :func:`train_once` of the session's model."""
    return partial(train_once, folder=model_folder, out=tmp_path)
