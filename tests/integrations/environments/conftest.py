"""Builds the tasks of the shared tests, and serves the one of OpenEnv."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .cases import Case


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The URL of an OpenEnv server on the loopback."""
    from .openenv_server import serving

    with serving() as found:
        yield found


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``build(case, **options)``: the task of a case, whose server is started if it has one."""

    def built(case: Case, **options: Any) -> Any:
        url = request.getfixturevalue("url") if "{url}" in case.task else ""
        return case.build(url, **options)

    return built
