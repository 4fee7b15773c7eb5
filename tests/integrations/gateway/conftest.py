"""Counts the requests that a gateway's server sees."""

from __future__ import annotations

import pytest

from turnwise.integrations.gateway.service.server import GatewayServer


@pytest.fixture
def requests(monkeypatch):
    """The requests that reached a server, in order."""
    seen = []
    whole = GatewayServer._session

    def counted(self, request):
        seen.append(request)
        return whole(self, request)

    monkeypatch.setattr(GatewayServer, "_session", counted)
    return seen
