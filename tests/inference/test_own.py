"""The life of the servers that ``VLLMClient`` starts, with the transformers engine in the place of vLLM."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.inference import VLLMClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server import own
from turnwise.inference.server.server import ServerFailed
from turnwise.inference.server.settings import ServeSettings

from .helpers import (
    EXACT,
    adapted,
    build,
    check_adapters,
    error_of,
    gone,
    move,
    requests_of,
    sent,
    tokens_of,
    until_gone,
    versions_of,
)

pytestmark = pytest.mark.xdist_group("own_servers")


def without_vllm(model: str, **settings: Any) -> ServeSettings:
    """The settings with the transformers engine, one row at a time."""
    args = settings.pop("engine_args")
    taken = {name: settings[name] for name in ("port", "dummy_weights", "adapter_slots", "adapter_rank")}
    known = {name: value for name, value in args.items() if name not in ("skip_tokenizer_init",)}
    return ServeSettings(model, engine="transformers", max_batch_size=1, engine_args=known, **taken)


@pytest.fixture(autouse=True)
def transformers_engine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(own, "ServeSettings", without_vllm)
    monkeypatch.setattr(own, "vllm_or_raise", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("keys")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def client_of(policies: Any, **settings: Any) -> VLLMClient:
    return VLLMClient(policies, ByteTokenizer(), **settings)


@pytest.mark.slow
@pytest.mark.representative
async def test_a_killed_server_comes_back_with_the_weights_and_all_end_with_the_client(tmp_path: Path) -> None:
    """Two bases: a whole model, and one with two adapters, which share a server."""
    shared, adapters = adapted(build("served", seed=1))
    whole = build("served", seed=2)
    client = client_of({"whole": whole, **adapters}, logs=tmp_path / "logs")
    async with client:
        one, two = client.servers
        pids = [one.pid, two.pid]
        assert len({one.url, two.url}) == 2 and all(server.url.startswith("http://127.0.0.1:") for server in (one, two))
        assert one._key != two._key
        move(whole)
        client.load_weights("whole", sent(whole), 4)
        move(adapters["solver"])
        client.load_weights("solver", adapters["solver"].state_dict().items(), 3)
        before = await client.generate(requests_of(policy="whole"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="its requests are sent again"):
            after = await client.generate(requests_of(policy="whole"))
        assert tokens_of(after) == tokens_of(before) and versions_of(after) == {4}
        assert error_of(whole, after) < EXACT
        with pytest.warns(UserWarning, match="its requests are sent again"):
            await check_adapters(client, lambda: build("served"), shared, adapters, {"solver": 3, "critic": 0})
        assert client.stats()["restarts"] == 2 and (one.restarts, two.restarts) == (1, 1)
        assert client.version("whole") == 4 and client.version("critic") == 0
        pids += [one.pid, two.pid]
        folder = Path(client._folder.name)
        assert folder.is_dir() and not list(folder.rglob("*.safetensors")), "the servers start without weights"
    assert all(map(gone, pids)) and not folder.exists()  # type: ignore[arg-type]
    assert (tmp_path / "logs").is_dir()


@pytest.mark.slow
@pytest.mark.representative
def test_a_server_that_does_not_start_tells_its_last_lines(tmp_path: Path) -> None:
    started = [thread_of() for _ in range(1)]
    with pytest.raises(ServerFailed, match=r"(?s)before it was healthy; the last lines of its log:.*no_such_device"):
        client_of(build("served"), engine_args={"device": "no_such_device"}, logs=tmp_path)
    assert "no_such_device" in (tmp_path / "vllm-0.log").read_text()
    assert thread_of() == started[0]
    with pytest.raises(ValueError, match=r"engine_args\['model'\]: the server sets this one itself"):
        client_of(build("served"), engine_args={"model": "x"})
    with pytest.raises(ValueError, match="policies is empty"):
        client_of({})


def thread_of() -> int:
    import threading

    return sum(thread.name == "turnwise-serve" for thread in threading.enumerate())


@pytest.mark.slow
async def test_a_server_that_dies_for_good_fails_what_waits() -> None:
    client = client_of(build("served"))
    async with client:
        await client.generate(requests_of(1))
        [server] = client.servers
        server.settings = ServeSettings(server.settings.model, engine="transformers", restarts=0)
        os.kill(server.pid, signal.SIGKILL)  # type: ignore[arg-type]
        with (
            pytest.warns(UserWarning, match="its requests are sent again"),
            pytest.raises(Exception, match=r"(?s)no engine is left: .*was killed by SIGKILL, 1 times in a row"),
        ):
            await client.generate(requests_of(1))


@pytest.mark.slow
def test_a_client_that_is_closed_or_dropped_ends_its_servers() -> None:
    client = client_of(build("served"))
    pids = [server.pid for server in client.servers]
    asyncio.run(client.close())
    asyncio.run(client.close())
    assert all(map(gone, pids))  # type: ignore[arg-type]
    client = client_of(build("served"))
    pids = [server.pid for server in client.servers]
    del client
    gc.collect()
    until_gone(pids)  # type: ignore[arg-type]


TRAINER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from helpers import build
from turnwise.inference import VLLMClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server import own
from turnwise.inference.server.settings import ServeSettings

own.ServeSettings = lambda model, **_: ServeSettings(model, port=0, engine="transformers", dummy_weights=True)
own.vllm_or_raise = lambda: None
client = VLLMClient(build("served"), ByteTokenizer())
if not os.fork():  # a child that keeps what it inherits open
    time.sleep(600)
try:
    print(client.servers[0].pid, flush=True)  # whoever reads it presses Ctrl-C at once
    time.sleep(600)
except KeyboardInterrupt:
    print(client.servers[0].pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def trainer() -> Iterator[Any]:
    words = [sys.executable, "-c", TRAINER, str(Path(__file__).parent)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_spares_the_server_and_a_killed_trainer_takes_it_along(trainer: Any) -> None:
    """Also where a fork of the trainer lives on."""
    pid = int(trainer.stdout.readline())
    os.killpg(trainer.pid, signal.SIGINT)  # as a terminal does: to all in the foreground
    assert int(trainer.stdout.readline()) == pid and not gone(pid)
    trainer.kill()
    until_gone([pid])
