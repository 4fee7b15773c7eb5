"""vLLM servers that outlive the tests that use them: each takes half a minute to start.

They are those that ``VLLMClient`` would start: same model, same settings. A client that closes gives its server back,
and the next one sends it its own weights. The servers end with this process.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnwise.inference.server import own
from turnwise.inference.server.server import ModelServer
from turnwise.inference.server.settings import ServeSettings

_kept: dict[str, list[LentServer]] = {}


class LentServer:
    """A running server, which a client can start and stop like one of its own."""

    def __init__(self, settings: ServeSettings) -> None:
        self.server = ModelServer(settings, log=print)
        self.lent = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def start(self) -> None:
        if self.server._thread is None:
            self.server.start()

    def stop(self, wait: bool = True) -> None:
        self.lent = False


def lend(settings: ServeSettings, log: Any = None) -> LentServer:
    """A server with these settings that no other client has. It has room for adapters in any case that one needs it."""
    config = json.loads((Path(settings.model) / "config.json").read_text())
    settings = replace(settings, adapter_slots=settings.adapter_slots and 8, adapter_rank=16)
    key = json.dumps([config, repr(replace(settings, model=""))], sort_keys=True)
    servers = _kept.setdefault(key, [])
    for server in servers:
        if not server.lent and not server.server.failure:
            server.lent = True
            return server
    folder = tempfile.mkdtemp(prefix="turnwise-lent-")  # the client's own goes with the client
    shutil.copytree(settings.model, folder, dirs_exist_ok=True)
    servers.append(LentServer(replace(settings, model=folder)))
    return servers[-1]


@pytest.fixture
def lent_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``VLLMClient`` take running servers where it would start its own."""
    monkeypatch.setattr(own, "ModelServer", lend)
