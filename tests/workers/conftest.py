"""Ends the connections that a test leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from . import playing


@pytest.fixture(autouse=True)
async def _closes() -> AsyncIterator[None]:
    yield
    while playing.ATTACHED:
        await playing.ATTACHED.pop().close()
