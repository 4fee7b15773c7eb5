"""Agents in containers: what they see, what they reach, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnwise.arena import Rubric
from turnwise.integrations.gateway import Container, Gateway, ProcessEpisode
from turnwise.integrations.gateway.process.episode import OUTPUT_BYTES
from turnwise.types import EpisodeRequest

from .helpers import arena_of, scripted
from .processes import HEAD

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap needs Linux")


def bubblewrap_runs() -> bool:
    trial = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(trial, check=False, capture_output=True).returncode == 0


needs_bubblewrap = pytest.mark.skipif(not bubblewrap_runs(), reason="bubblewrap is missing or can't run")


def play_contained(tmp_path: Path, code: str, **options):
    (tmp_path / "agent.py").write_text(HEAD + code)
    arena = arena_of(scripted("4"))
    episode = ProcessEpisode(
        [sys.executable, "-I", "-S", "agent.py"],
        Gateway(renderer="template"),
        actors=["solver"],
        files={"agent.py": tmp_path / "agent.py"},
        container="bwrap",
        **options,
    )
    arena.add_episode(episode)
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("process", {"text": "2 + 2"})]))
    return result.rollout


LOOKS = """
answer = ask(question["text"])

def fails(action):
    try:
        action()
    except OSError:
        return True
    return False

def strays(folder):
    # What is in a folder, but for the trainer's Python, which may be installed there.
    paths = [os.path.join(folder, name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    found = []
    for path in paths:
        if path not in PYTHONS:
            leads = any(python.startswith(path + "/") for python in PYTHONS)
            found += strays(path) if leads else [path]
    return found

import socket
host, port = OUTER
result({
    "answer": answer,
    "folder": os.getcwd() == os.environ["HOME"] == "/episode",
    "readable": [path for path in (SECRET, "/etc/shadow") if os.path.exists(path)],
    "writable": [path for path in ("/x", "/usr/x", "/etc/x", sys.prefix + "/x") if not fails(lambda: open(path, "w"))],
    "strays": [*strays("/tmp"), *strays("/home"), *strays("/root"), *strays("/var")],
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "net": [name for name in os.listdir("/sys/class/net")] if os.path.exists("/sys/class/net") else ["lo"],
    "other port": fails(lambda: socket.create_connection((host, port), 1)),
    "key": any(os.environ["OPENAI_API_KEY"] in open(f"/proc/{pid}/cmdline").read()
               for pid in os.listdir("/proc") if pid.isdigit()),
})
"""


@needs_bubblewrap
def test_an_agent_sees_its_folder_and_reaches_the_gateway_alone(tmp_path):
    secret = tmp_path / "answers.jsonl"
    secret.write_text("4")
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = {"SECRET": str(secret), "OUTER": other.getsockname(), "PYTHONS": (sys.prefix, sys.base_prefix)}
        code = LOOKS
        for name, value in given.items():
            code = code.replace(name, repr(value))
        seen = []
        rubric = Rubric([lambda extras: seen.append(extras["result"]) or 1.0])
        rollout = play_contained(tmp_path, code, rubric=rubric)
    assert rollout.error is None, rollout.error
    assert len(rollout.steps) == 1
    [seen] = seen
    assert 0 < seen.pop("processes") < 8
    assert seen == {
        **{"answer": "4", "folder": True, "readable": [], "writable": [], "strays": [], "net": ["lo"]},
        **{"other port": True, "key": False},
    }


@needs_bubblewrap
def test_contained_failures_and_output(tmp_path):
    code = f"""
print("x" * {2 * OUTPUT_BYTES})
print(os.environ["OPENAI_API_KEY"], file=sys.stderr)
print("so", flush=True)
sys.exit(3)
"""
    rollout = play_contained(tmp_path, code)
    assert "exited with code 3; its last output:" in rollout.error and rollout.error.rstrip().endswith("so")
    assert "***" in rollout.error and len(rollout.error) < OUTPUT_BYTES + 4096
    rollout = play_contained(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert "was killed by SIGKILL" in rollout.error


@needs_bubblewrap
def test_nothing_in_a_container_changes_the_result_after_the_agent_has_ended(tmp_path):
    code = """
agent = os.getpid()
detached("while os.path.exists('/proc/%d' % agent): time.sleep(0.001)\\ntime.sleep(0.2); result(1)")
ask("x")
result(0)
"""
    rollout = play_contained(tmp_path, code)
    assert rollout.error is None, rollout.error
    assert rollout.rewards == {"solver": 0.0}


def named(marker: str) -> list[str]:
    """The processes of this machine that have ``marker`` on their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes()
        except OSError:
            continue
        found += [file.parent.name] * (marker.encode() in text and file.parent.name != str(os.getpid()))
    return found


@needs_bubblewrap
@pytest.mark.parametrize("stubborn", [False, True])
def test_everything_in_a_container_ends_at_the_deadline(tmp_path, stubborn):
    marker = str(300 + os.getpid() / 10**8)
    code = f"""
subprocess.Popen(["sleep", "{marker}"], start_new_session=True)
detached("os.execvp('sleep', ['sleep', '{marker}'])")
print("so far", flush=True)
end = lambda *_: (print("ended well", flush=True), sys.exit(0))
signal.signal(signal.SIGTERM, signal.SIG_IGN if {stubborn} else end)
time.sleep(300)
"""
    began = time.monotonic()
    rollout = play_contained(tmp_path, code, timeout=1.0, grace=0.3 if stubborn else 20.0)
    assert "longer than timeout=1 s" in rollout.error and "so far" in rollout.error
    assert ("ended well" in rollout.error) == (not stubborn)
    assert time.monotonic() - began < 15
    # The kernel ends the others of a namespace after its first process is gone: on a busy machine a moment later.
    until = time.monotonic() + 5
    while named(marker) and time.monotonic() < until:
        time.sleep(0.05)
    assert named(marker) == []


def test_docker_gets_no_network_no_key_and_the_folder_alone(tmp_path):
    environment = {"PATH": "/host", "HOME": "/episode", "OPENAI_API_KEY": "secret", "LANG": "C"}
    container = Container("docker", image="node:22", mounts=["/opt"])
    shell, *command = container.command(tmp_path, "name", environment, ["python3", "-I", "agent.py"])
    assert shell == "/bin/sh" and command[:3] == ["-c", 'trap "" TERM; exec "$@"', "sh"]
    line = " ".join(command[3:])
    for part in (
        "docker run --rm --interactive --name name --network none --read-only",
        f"--volume {tmp_path}/work:/episode --volume {tmp_path}/turnwise:/turnwise --volume /opt:/opt:ro",
        "--env HOME=/episode --env OPENAI_API_KEY --env LANG --entrypoint python3 node:22 -I agent.py",
    ):
        assert part in line
    assert "secret" not in line and "/host" not in line
    assert container.client_environment(environment)["PATH"] == os.environ["PATH"]


def test_docker_is_asked_for_the_image_and_to_remove_the_container(tmp_path, monkeypatch):
    tool = tmp_path / "docker"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ "$3" != none ] || {{ echo no such image >&2; exit 1; }}\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    container = Container.of({"image": "node:22"})
    assert container.tool == "docker"
    container.remove("name")
    assert (tmp_path / "asked").read_text().splitlines() == ["image inspect node:22", "rm --force name"]
    with pytest.raises(RuntimeError, match="can't run here: no such image"):
        Container.of({"tool": "docker", "image": "none"})


@pytest.mark.parametrize(
    ("given", "error", "problem"),
    [
        ("auto", RuntimeError, "no program 'bwrap' .package bubblewrap. on this machine"),
        ({"tool": "podman", "image": "x"}, RuntimeError, "no program 'podman' on this machine"),
        ({"image": "x"}, RuntimeError, "no program 'docker' on this machine"),
        ("chroot", ValueError, "expected one of"),
        ("docker", ValueError, "container.image=''"),
        ({"tool": "bwrap", "image": "x"}, ValueError, "container.image='x'"),
        ({"mounts": ["/no/such/folder"]}, ValueError, "absolute paths that exist"),
        ({"imgae": "x"}, ValueError, "container.imgae: unknown"),
    ],
)
def test_a_container_that_is_missing_is_an_error_at_the_start(tmp_path, monkeypatch, given, error, problem):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(error, match=problem):
        ProcessEpisode(["true"], Gateway(), container=given)
