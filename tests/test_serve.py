"""Looking after a server: it starts, dies, hangs and ends, and nothing of it is left.

A small program stands for vLLM's, whose own server the tests of the clients start.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.cli import main as cli
from turnwise.inference.common.http import Endpoint
from turnwise.inference.server import server as serve
from turnwise.inference.server.server import ModelServer, ServerFailed, serving
from turnwise.inference.server.settings import ServeSettings, server_command
from turnwise.inference.transformers_server.launch import build_model

from .inference.helpers import gone

PROGRAM = """
import http.server, os, pathlib, subprocess, sys, threading, time
port, folder, mode = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
count = len(list(folder.glob("start*")))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
(folder / f"start{count}").write_text(f"{os.getpid()} {helper.pid}")
print("loading part", count, flush=True)
if mode == "fails" or mode == "fails later" and count:
    print("no such model", flush=True)
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments): pass
class Server(http.server.ThreadingHTTPServer):
    allow_reuse_port = True  # as vLLM's and the transformers engine's: the starter keeps the port
Server(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def keys(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys go to a place of the test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("keys")))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelServer]:
    def make(mode: str = "well", said: list[str] | None = None, **settings: Any) -> ModelServer:
        command = lambda _, port: [sys.executable, "-c", PROGRAM, str(port), str(tmp_path), mode]  # noqa: E731
        monkeypatch.setattr(serve, "server_command", command)
        lines = [] if said is None else said
        return ModelServer(ServeSettings("some/model", port=0, **settings), lines.append, lines.append)

    return make


def started(tmp_path: Path) -> list[list[int]]:
    """Leader and helper of each process that was started."""
    files = sorted(tmp_path.glob("start*"), key=lambda file: int(file.name[5:]))
    return [[int(pid) for pid in file.read_text().split()] for file in files]


def until(holds: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def all_gone(tmp_path: Path) -> None:
    """A process that was killed takes a moment to go."""
    until(lambda: all(gone(pid) for pids in started(tmp_path) for pid in pids))


def test_it_serves_until_it_is_stopped_and_leaves_nothing(stand_in: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as bystander:
        with stand_in(said=said) as server:
            assert serve.is_healthy(server.url, 5.0)
            [[leader, helper]] = started(tmp_path)
            assert server.pid == leader
            assert not gone(helper)
        all_gone(tmp_path)
        assert server.pid is None
        server.stop()
        assert bystander.poll() is None
        bystander.kill()
    assert any("waiting for some/model" in line for line in said)
    assert f"serving some/model at {server.url}" in said
    assert "loading part 0" in said


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "was killed by SIGKILL; starting it again in 1 s"),
        pytest.param(signal.SIGTERM, "was killed by SIGTERM; starting it again in 1 s", marks=pytest.mark.slow),
        (signal.SIGSTOP, "did not answer for 0.5 s"),
    ],
)
def test_a_server_that_dies_or_hangs_is_started_again_at_its_address(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, told: str
) -> None:
    """Killed with its helper left behind, by its own hand, or stopped."""
    monkeypatch.setattr(serve, "HUNG", 0.5)
    monkeypatch.setattr(serve, "PROBED", (0.1, 0.5))
    said: list[str] = []
    with stand_in(said=said) as server:
        before = started(tmp_path)[0]
        os.kill(before[0], number)
        until(lambda: len(started(tmp_path)) == 2 and serve.is_healthy(server.url, 1.0))
        assert all(gone(pid) for pid in before) and server.restarts == 1
    all_gone(tmp_path)
    assert any(told in line for line in said)


def test_a_server_that_can_not_start_says_why(stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stand_in("fails")
    with pytest.raises(ServerFailed, match=r"(?s)ended with exit code 3 before.*no such model"):
        server.start()
    assert len(started(tmp_path)) == 1
    all_gone(tmp_path)
    # One that takes too long is ended.
    monkeypatch.setattr(serve, "is_healthy", lambda url, timeout: False)
    with pytest.raises(ServerFailed, match=r"longer than start_timeout=0.5 s"):
        stand_in(start_timeout=0.5).start()
    all_gone(tmp_path)


def test_a_server_that_dies_too_often_is_given_up(stand_in: Any, tmp_path: Path) -> None:
    server = stand_in("fails later", restarts=1)
    with server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerFailed, match=r"(?s)ended with exit code 3, 2 times in a row.*no such model"):
            server.wait()
    assert len(started(tmp_path)) == 2


async def test_serving_ends_with_the_block(stand_in: Any, tmp_path: Path) -> None:
    stand_in()
    with pytest.raises(RuntimeError, match="mine"):
        async with serving("some/model", restarts=0) as server:
            assert serve.is_healthy(server.url, 5.0)
            raise RuntimeError("mine")
    all_gone(tmp_path)
    stand_in("fails")
    with pytest.raises(ServerFailed):
        async with serving("some/model"):
            raise AssertionError("never well")


COMMAND = """
import sys
from turnwise.inference.server import server as serve
from turnwise.cli import main as cli
serve.server_command = lambda settings, port: [sys.executable, "-c", {program!r}, str(port), {folder!r}, "well"]
sys.exit(cli.main(["serve", "some/model", "--port", "0"]))
"""


@pytest.mark.parametrize(
    "number, code",
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0, marks=[pytest.mark.slow, pytest.mark.representative]),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_turnwise_serve_ends_what_it_started(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """SIGKILL aside, which only vLLM's own launcher notices (see test_vllm_launch)."""
    program = COMMAND.format(program=PROGRAM, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-P", "-c", program], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        key = next(line for line in process.stderr if "turnwise: the key" in line).split(" is in ")[1].split(";")[0]
        said = next(line for line in process.stderr if "turnwise: serving" in line)
        assert Path(key).stat().st_mode & 0o777 == 0o600
        assert "http://127.0.0.1:" in said
        os.kill(process.pid, number)
        process.stderr.read() if number != signal.SIGKILL else None
        assert process.wait(30) == code
    assert Path(key).exists() == (number == signal.SIGKILL)
    Path(key).unlink(missing_ok=True)
    if number == signal.SIGKILL:
        os.killpg(started(tmp_path)[0][0], signal.SIGKILL)
    all_gone(tmp_path)


# -- settings ----------------------------------------------------------------------------------------------------------
def test_every_server_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"engine_args": {"dtype": "float32"}}
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    plain = ModelServer(ServeSettings("m", port=0, **known))
    with pytest.raises(ValueError, match=r"'SOME_KEY'.* does not exist or is empty"):
        ServeSettings("m", api_key_env="SOME_KEY")
    for wrong, place in {"sésame": 2, "sesame\n": 7, "open sesame": 5, "\x7f": 1}.items():
        monkeypatch.setenv("SOME_KEY", wrong)
        with pytest.raises(ValueError, match=rf"'SOME_KEY'.*character {place} of {len(wrong)} is no letter") as caught:
            ServeSettings("m", api_key_env="SOME_KEY")
        assert wrong not in str(caught.value)
    monkeypatch.setenv("SOME_KEY", "sesame")
    named = ModelServer(ServeSettings("m", "0.0.0.0", 0, api_key_env="SOME_KEY", **known))
    assert named.key_file is None and named._key == "sesame"
    assert len(plain._key) > 40 and plain._key != ModelServer(ServeSettings("m", port=0))._key
    for server in (plain, named):
        words = server_command(server.settings, 8000)
        assert "--middleware=turnwise.inference.server.launch.RequestGate" in words
        assert not any(server._key in word for word in words), "everybody on the machine can read a command line"
        assert serve._environment(server.settings, server._key)["VLLM_API_KEY"] == server._key


def test_the_names_by_which_a_server_may_be_asked_and_a_port_that_is_taken() -> None:
    settings = ServeSettings("m", "gpu1", allowed_hosts=["gpu1.example"])
    names = serve._environment(settings, "k")["TURNWISE_SERVE_HOSTS"].split(",")
    assert names[:2] == ["gpu1.example", "gpu1"] and socket.gethostname() in names
    with pytest.raises(ValueError, match=r"allowed_hosts: 'gpu1:8000': expected a host's name without a port"):
        ServeSettings("m", allowed_hosts=["gpu1:8000"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port={port}: can't serve there"):
            ModelServer(ServeSettings("m", port=port))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems share ports by other rules")
def test_a_port_is_kept_for_the_server_until_it_ends() -> None:
    """Else another user could take it while the model loads, or before a restart, and get the key."""
    server = ModelServer(ServeSettings("m", port=0))

    def listens(**options: Any) -> None:
        place = ("127.0.0.1", server.port)
        with socket.create_server(place, **options) as listening, socket.create_connection(place, timeout=10):
            listening.accept()[0].close()

    with pytest.raises(OSError, match="in use"):
        listens()  # as another user's would, who can't share the port
    with pytest.raises(OSError, match="can't serve there"):
        ModelServer(ServeSettings("m", port=server.port))
    for _ in range(2):
        listens(reuse_port=True)  # as the server does
    server._leave()
    listens()


def test_the_key_is_in_a_file_of_the_users_own_while_it_serves(stand_in: Any) -> None:
    server = stand_in()
    with server:
        assert server.key_file.stat().st_mode & 0o777 == 0o600
        assert server.key_file.parent.stat().st_mode & 0o777 == 0o700
        for endpoint in (server.endpoint(), Endpoint(server.url.replace("127.0.0.1", "localhost"))):
            assert endpoint._key == server._key
            endpoint.close()
        server.key_file.chmod(0o644)
        endpoint = Endpoint(server.url)
        assert endpoint._key is None, "somebody else may have written it"
        endpoint.close()
        server.key_file.chmod(0o600)
    assert not server.key_file.exists()
    with pytest.raises(ServerFailed):
        stand_in("fails").start()
    assert not list(server.key_file.parent.iterdir())


def test_no_key_goes_where_others_can_read_it(stand_in: Any, tmp_path: Path) -> None:
    server = stand_in()
    server.key_file.parent.mkdir()
    server.key_file.parent.chmod(0o777)
    with pytest.raises(OSError, match="can be used by others"):
        server.start()
    assert not started(tmp_path)


def test_what_vllm_is_told(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 20}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "torch_dtype": "float32"}')
    engine_args = {"max-model-len": 64, "enforce_eager": True, "hf_overrides": {"a": 1}, "enable_log_requests": False}
    settings = ServeSettings(
        str(tmp_path),
        adapters={"critic": tmp_path},
        adapter_slots=2,
        adapter_rank=8,
        kv_cache_gb=0.5,
        engine_args=engine_args,
    )
    words = server_command(settings, 8123)
    assert words[:4] == [sys.executable, "-P", "-m", "turnwise.inference.server.launch"]
    for word in (
        f"--model={tmp_path}", "--host=127.0.0.1", "--port=8123", "--dtype=float32", "--enable-scale-out",
        "--logprobs-mode=processed_logprobs", "--generation-config=vllm", "--no-async-scheduling",
        "--worker-extension-cls=turnwise.inference.vllm.worker.WorkerExtension", "--max-loras=4",
        "--enable-lora", "--max-lora-rank=32", f"--kv-cache-memory-bytes={2**29}", "--max-model-len=64",
        "--enforce-eager", '--hf-overrides={"a": 1}', "--no-enable-log-requests",
    ):  # fmt: skip
        assert word in words
    assert words[-2:] == ["--lora-modules", f"critic={tmp_path}"]
    plain = server_command(ServeSettings(str(tmp_path), engine_args={"dtype": "bfloat16"}), 1)
    assert "--dtype=bfloat16" in plain and "--enable-lora" not in plain


def test_what_the_transformers_engine_is_told(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 20}')
    sizes = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    how: dict[str, Any] = {"max_batch_size": 1, "adapter_slots": 2, "adapter_rank": 8, "dummy_weights": True}
    settings = ServeSettings(
        str(tmp_path), engine="transformers", adapters={"critic": tmp_path}, engine_args={"device": "cpu"}, **how
    )
    *words, options = server_command(settings, 8123)
    assert words == [sys.executable, "-P", "-m", "turnwise.inference.transformers_server.launch"]
    told = ServeSettings(**json.loads(options))
    assert told == dataclasses.replace(settings, port=8123, adapters={"critic": str(tmp_path)})
    model = build_model(dataclasses.replace(told, engine_args={"device": "cpu", "dtype": "float16"}))
    assert (model.dtype, build_model(told).dtype) == (torch.float16, torch.bfloat16)
    assert "--load-format=dummy" in server_command(ServeSettings(str(tmp_path), dummy_weights=True), 1)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"engine": "tgi"}, "engine='tgi': expected one of vllm, transformers"),
        ({"engine": "transformers", "kv_cache_gb": 2}, "kv_cache_gb=2: expected engine='vllm', got 'transformers'"),
        ({"engine": "transformers", "max_batch_size": 0}, "max_batch_size=0: expected more than 0"),
        ({"engine": "transformers", "engine_args": {"seed": 1}}, r"args\['seed'\]: expected one of device, dtype"),
        ({"port": 70000}, "port=70000"),
        ({"kv_cache_gb": 0}, "kv_cache_gb=0"),
        ({"restarts": -1}, "restarts=-1"),
        ({"engine_args": {"port": 1}}, r"engine_args\['port'\]"),
        ({"engine_args": {"logprobs-mode": 1}}, r"engine_args\['logprobs_mode'\]"),
        ({"adapters": {"critic": "/nowhere"}}, r"adapters\['critic'\]='/nowhere'"),
    ],
)
def test_settings_that_can_not_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeSettings("m", **settings)


def test_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeSettings] = []
    monkeypatch.setattr("turnwise.cli.serve.serve.serve_until_stopped", seen.append)
    words = ["--engine-arg", "max_model_len=64", "--engine-arg", "enforce_eager=true", "--kv-cache-gb", "2"]
    words += ["--allowed-host", "gpu1"]
    assert cli.main(["serve", "m", *words]) == 0
    given = {"max_model_len": 64, "enforce_eager": True}
    assert seen == [ServeSettings("m", kv_cache_gb=2.0, engine_args=given, allowed_hosts=("gpu1",))]
    assert cli.main(["serve", "m", "--engine", "transformers", "--max-batch-size", "2", "--dummy-weights"]) == 0
    assert seen[1:] == [ServeSettings("m", engine="transformers", max_batch_size=2, dummy_weights=True)]
    assert cli.main(["serve", "m", "--host", "0.0.0.0", "--api-key-env", "NO_SUCH_KEY"]) == 2
    assert "api_key_env" in capsys.readouterr().err
    assert cli.main(["serve", "m", "--adapters", "critic"]) == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err
