"""The families of tiny models, and the vLLM servers of a session."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from turnwise.inference.server.settings import ServeSettings

from ..vllm_servers import LentServer, lend, lent_servers  # noqa: F401
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


@pytest.fixture
def vllm_servers(served_folder: Path) -> Iterator[list[Any]]:
    """Two vLLM servers with room for adapters."""
    args = {"dtype": "float32", "skip_tokenizer_init": True}
    shared: dict[str, Any] = {"port": 0, "dummy_weights": True, "adapter_slots": 2, "engine_args": args}
    settings = ServeSettings(str(served_folder), kv_cache_gb=2**-5, **shared)
    servers = [lend(settings) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(LentServer.start, servers))
    yield servers
    for server in servers:
        server.stop()
