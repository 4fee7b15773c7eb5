"""A pool whose engines get their weights in one broadcast: one is killed, one gets a wrong bit, and none lies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from turnwise.inference import PoolClient, VLLMServerClient
from turnwise.inference.pool.engine import PrefixRouter
from turnwise.inference.weights import sync
from turnwise.inference.weights.publish import CollectiveTransfer
from turnwise.inference.weights.shared_transfer import SharedTransfer
from turnwise.inference.weights.sync import AutomaticTransfer, SafetensorsTransfer, transfer_to
from turnwise.run.checks import task_of, tiny_model
from turnwise.train.validate import config_from_dict

from .engine_server import EngineServers
from .helpers import requests_of, sent, versions_of


@pytest.mark.slow
async def test_three_engines_one_is_killed_and_one_gets_a_wrong_bit(tmp_path: Path) -> None:
    config = config_from_dict({"run_dir": str(tmp_path / "unused")})
    tokenizer, model = tiny_model(config, task_of(config))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    with EngineServers(tmp_path / "model", 3) as servers:
        transfer = CollectiveTransfer("gloo", gather=60.0)  # this machine may be busy
        shared = SharedTransfer(transfer)
        engines = {
            url: VLLMServerClient(servers.endpoint(number), tokenizer, model, transfer=shared.lend())
            for number, url in enumerate(servers.urls)
        }
        async with PoolClient(engines, router=PrefixRouter(imbalance=0)) as pool:
            for version in (1, 2):
                pool.load_weights("default", sent(model), version)
                assert versions_of(await pool.generate(requests_of(6))) == {version}
            assert transfer.stats() == {"epoch": 1, "in_groups": 6, "alone": 0, "lost": 0}
            await asyncio.to_thread(servers.kill, 0)
            with pytest.warns(UserWarning, match=f"engine {servers.urls[0]} failed"):
                pool.load_weights("default", sent(model), 3)
            assert versions_of(await pool.generate(requests_of(4))) == {3}
            assert transfer.stats()["epoch"] == 2 and transfer.stats()["in_groups"] == 8
            label = servers.label(1)
            servers.flip(1)
            with pytest.warns(UserWarning, match=f"engine {servers.urls[1]} failed.*other sums than those"):
                pool.load_weights("default", sent(model), 4)
            assert pool.serving() == servers.urls[2:]
            assert servers.label(1) != label and servers.label(1).endswith("-incomplete")
            assert versions_of(await pool.generate(requests_of(2))) == {4}


@pytest.mark.parametrize(
    ("urls", "name", "folder", "kind", "host"),
    [
        (["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"], "auto", False, AutomaticTransfer, None),
        (["http://127.0.0.1:1", "http://gpu2:2"], "auto", False, CollectiveTransfer, "gpu2"),
        (["http://127.0.0.1:1", "http://gpu2:2"], "auto", True, SafetensorsTransfer, None),
        (["http://gpu1:1", "http://gpu2:2"], "gloo", True, CollectiveTransfer, "gpu1"),
        (["http://127.0.0.1:1"], "gloo", False, CollectiveTransfer, "127.0.0.1"),
    ],
)
def test_engines_beyond_this_host_get_weights_over_the_network(
    urls: list[str], name: str, folder: bool, kind: type, host: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    towards: list[str] = []
    monkeypatch.setattr(sync, "address_towards", lambda host: towards.append(host) or "127.0.0.2")
    transfer: Any = transfer_to(urls, name, tmp_path if folder else None)
    assert type(transfer) is kind and towards == ([] if host is None else [host])
    if kind is CollectiveTransfer:
        assert transfer._host == "127.0.0.2"
    transfer.close()


def test_a_folder_is_for_some_transfers_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="transfer='shared_memory': expected 'auto', 'safetensors', 'gloo' or 'nccl'"):
        transfer_to(["http://127.0.0.1:1"], "shared_memory", tmp_path)
