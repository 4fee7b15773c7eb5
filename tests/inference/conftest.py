"""The families of tiny models, and the vLLM servers of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .helpers import CONFIGS, VOCABULARY, build


@pytest.fixture(params=list(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model "served" and a tokenizer, from which a server starts."""
    from turnwise.tasks.tiny import build_tokenizer

    folder = tmp_path_factory.mktemp("served")
    build("served").save_pretrained(folder)
    build_tokenizer(["2 + 2 = 4"], vocab_size=VOCABULARY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_servers(served_folder: Path) -> Iterator[list[Any]]:
    """Two vLLM servers for all tests of the session, the second with a key. Each takes half a minute to start."""
    from turnwise.inference.server.server import Server
    from turnwise.inference.server.settings import ServeSettings

    os.environ["TURNWISE_TEST_KEY"] = "sesame"
    shared = {"port": 0, "adapter_slots": 2, "adapter_rank": 8, "kv_cache_gb": 2**-5}
    servers = [
        Server(ServeSettings(str(served_folder), api_key_env=key, **shared), log=print)
        for key in (None, "TURNWISE_TEST_KEY")
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.start, servers))
        yield servers
    finally:
        for server in servers:
            server.stop()
