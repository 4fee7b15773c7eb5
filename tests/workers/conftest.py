"""Workers for all tests, and an end of the connections that a test leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from . import playing


@pytest.fixture(scope="session")
def workers() -> Iterator[playing.Workers]:
    with playing.Workers(3) as workers:
        yield workers


@pytest.fixture(autouse=True)
async def _closes() -> AsyncIterator[None]:
    yield
    while playing.ATTACHED:
        await playing.ATTACHED.pop().close()
