"""Leaves most tests of peers with an environment of their own to ``make test-all``."""

from __future__ import annotations

from pathlib import Path

import pytest

APART = {Path(__file__).parent / name for name in ("tinker", "verifiers", "verl")}


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent in APART:
            item.add_marker(pytest.mark.slow)
