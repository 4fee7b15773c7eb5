"""Agents in containers: what they see, what they reach, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnwise.arena import Rubric
from turnwise.integrations.gateway import Container, Gateway, ProcessEpisode
from turnwise.integrations.gateway.process.container import FOLDER
from turnwise.integrations.gateway.process.output import OUTPUT_BYTES
from turnwise.sandbox.surface import build_program_filter
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
        **{"container": "bwrap", **options},
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


KERNEL = """
import ctypes, fcntl, resource, socket
ask("x")
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {"x86_64": 0, "aarch64": 1}

def refused(numbers, *values):
    number = numbers[NUMBERS[os.uname().machine]]
    return libc.syscall(number, *values) < 0 and ctypes.get_errno() in (1, 38)

def fails(action):
    try:
        action()
    except OSError:
        return True
    return False

def writable(folder):
    found = []
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                os.close(os.open(os.path.join(above, name), os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                continue
            found.append(os.path.join(above, name))
    return found

caps = [line.split()[1] for line in open("/proc/self/status") if line[:6] in ("CapPrm", "CapEff", "CapAmb")]
result({
    "root": 0 in (os.getuid(), os.geteuid(), os.getgid()),
    "rights": any(int(cap, 16) for cap in caps),
    "written": writable("/proc/sys") + writable("/dev/shm") + writable("/etc"),
    "own proc": not fails(lambda: open("/proc/self/oom_score_adj", "w")),
    "dev": not fails(lambda: open("/dev/x", "w")),
    "keyring": not refused((250, 219), 11, ctypes.c_int(-3), None, 0),
    "user namespace": not refused((272, 97), 0x10000000),
    "clone": not refused((56, 220), 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0),
    "io_uring": not refused((425, 425), 1, ctypes.create_string_buffer(200)),
    "bpf": not refused((321, 280), 0, None, 0),
    "ptrace": not refused((101, 117), 0, 0, 0, 0),
    "vsock": not fails(lambda: socket.socket(40, socket.SOCK_STREAM)),
    "packets": not fails(lambda: socket.socket(16, socket.SOCK_RAW, 12)),
    "terminal": not fails(lambda: fcntl.ioctl(0, 0x5412, b"x")),
    "newest": not refused((999, 999)),
    "works": [subprocess.run(["sh", "-c", "echo $((1 + 1))"], capture_output=True, text=True).stdout.strip(),
              bool(socket.if_nameindex()), os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize >> 20,
              resource.getrlimit(resource.RLIMIT_NPROC)[1], os.access("/tmp", os.W_OK), os.path.expanduser("~agent")],
})
"""


@needs_bubblewrap
def test_a_container_has_no_root_no_kernel_settings_no_keys_and_few_system_calls(tmp_path):
    seen = []
    rubric = Rubric([lambda extras: seen.append(extras["result"]) or 1.0])
    libc = ctypes.CDLL(None)
    libc.syscall({"x86_64": 250, "aarch64": 219}[platform.machine()], 1, None)  # a session keyring of the trainer's
    rollout = play_contained(tmp_path, KERNEL, rubric=rubric, container={"tool": "bwrap", "tmp_gb": 0.5, **SMALL})
    assert rollout.error is None, rollout.error
    [seen] = seen
    works = ["2", True, 512, 64, True, *([FOLDER] if os.getuid() == 0 else ["~agent"])]
    assert seen.pop("works") == works
    assert seen.pop("written") == [] and not any(seen.values()), seen


SMALL = {"max_processes": 64, "memory_gb": 0.25, "disk_gb": 0.03, "max_files": 500}
BEYOND = {
    "processes": ("""
pids = []
try:
    for _ in range(200):
        pids.append(os.fork()) or pids[-1] or (time.sleep(60), os._exit(0))
except BlockingIOError:
    ask("x")
    result(float(20 < len(pids) < 64))
""", ""),
    "memory": ("""
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(os.urandom(1)) * (150 << 20)
        time.sleep(60)
time.sleep(60)
""", "more memory than memory_gb=0.25"),
    "memory of one": ("bytearray(500 << 20)", "MemoryError"),
    "one file": ("""
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    open("big", "wb").write(bytes(40 << 20))
finally:
    os.unlink("big")
""", "File too large|more disk than disk_gb=0.03"),
    "files": ("""
for number in range(1000):
    open(f"f{number}", "w").close()
time.sleep(60)
""", "more files than max_files=500"),
    "disk": ("""
for number in range(3):
    open(f"f{number}", "wb").write(os.urandom(1 << 20) * 20)
time.sleep(60)
""", "more disk than disk_gb=0.03"),
    "removed files": ("""
kept = []
for number in range(3):
    kept.append(open(f"f{number}", "wb"))
    os.unlink(f"f{number}")
    kept[-1].write(os.urandom(1 << 20) * 20)
    kept[-1].flush()
time.sleep(60)
""", "more disk than disk_gb=0.03"),
    "disk below many folders": ("""
for _ in range(300):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
for number in range(3):
    open(f"f{number}", "wb").write(os.urandom(1 << 20) * 20)
time.sleep(60)
""", "more disk than disk_gb=0.03"),
    "shared memory that no process has": ("""
import mmap
kept, part = mmap.mmap(-1, 512 << 20), 16 << 20
for place in range(0, 512 << 20, part):
    kept[place : place + part] = bytes(part)
    kept.madvise(mmap.MADV_DONTNEED, place, part)
time.sleep(60)
""", "more memory than memory_gb=0.25"),
    "page tables": ("""
import mmap
kept = mmap.mmap(-1, 1 << 38, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ)
for place in range(0, 1 << 38, 2 << 20):
    kept[place]
time.sleep(60)
""", "more memory than memory_gb=0.25"),
    "buffers": ("""
import socket
kept = [socket.socketpair() for _ in range(600)]
time.sleep(60)
""", "more memory than memory_gb=0.25"),
    "files in memory": ("""
for number in range(1000):
    open(f"/tmp/f{number}", "w").close()
time.sleep(60)
""", "more files than max_files=500"),
    "removed and mapped files": ("""
import ctypes
kept = []
for number in range(3):
    with open(f"f{number}", "wb+") as file:
        file.write(os.urandom(1 << 20) * 20)
        file.flush()
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        kept.append(libc.mmap(None, ctypes.c_size_t(20 << 20), 1, 1, file.fileno(), ctypes.c_long(0)))
    os.unlink(f"f{number}")
time.sleep(60)
""", "more disk than disk_gb=0.03"),
    "an unreadable folder": ("""
os.mkdir("d")
os.chmod("d", 0o300)
for number in range(3):
    open(f"d/f{number}", "wb").write(os.urandom(1 << 20) * 20)
time.sleep(60)
""", "more disk than disk_gb=0.03"),
    "folders in each other": ("""
for _ in range(400):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
ask("x")
result(1)
""", ""),
}  # fmt: skip


@needs_bubblewrap
@pytest.mark.parametrize("kind", BEYOND)
def test_a_container_has_limits_of_processes_memory_and_disk(tmp_path, kind):
    code, problem = BEYOND[kind]
    rollout = play_contained(tmp_path, code, container={"tool": "bwrap", **SMALL}, timeout=30.0)
    if problem:  # a file as large as the disk may be seen before its writer hears of it
        assert any(each in rollout.error for each in problem.split("|") if each), rollout.error
    else:
        assert rollout.error is None and rollout.rewards == {"solver": 1.0}, rollout.error


@needs_bubblewrap
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_an_agent_that_meets_a_limit_of_its_container_is_scored(tmp_path, monkeypatch, kind):
    """A model's command can use more than the container has where the model would lose."""
    alone = [line for line in HEAD.splitlines() if "TURNWISE_QUESTION" not in line]
    monkeypatch.setitem(globals(), "HEAD", "\n".join([*alone, "ask('x')\n"]))
    rubric, options = Rubric([lambda extras: float(extras["failure"] == "")]), {"collect": [], "timeout": 30.0}
    rollout = play_contained(tmp_path, BEYOND[kind][0], container={"tool": "bwrap", **SMALL}, rubric=rubric, **options)
    assert rollout.error is None, rollout.error
    assert rollout.rewards == {"solver": 0.0} and rollout.facts.mishaps == {"episodes/agent_killed": 1}


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


CONTROL = """
control = os.read(int(os.environ["TURNWISE_CONTROL"]), 100).decode()
headers = {"Authorization": "Bearer " + control, "Content-Type": "application/json"}
opened = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/children", b"{}", headers)
child = json.load(urllib.request.urlopen(opened))
ask("x")
found = subprocess.run(["grep", "-rls", control, "/turnwise", "/episode", "/tmp"], capture_output=True).stdout
again = subprocess.run(["cat", "/proc/%d/fd/%s" % (os.getpid(), os.environ["TURNWISE_CONTROL"])], capture_output=True)
result(float(child["base_url"].startswith("http://127.0.0.1") and not found and not again.stdout))
"""


@needs_bubblewrap
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_key_for_sub_agents_is_read_once_and_nowhere_else(tmp_path, mask):
    before = os.umask(mask)
    try:
        rollout = play_contained(tmp_path, CONTROL, children=True)
    finally:
        os.umask(before)
    assert rollout.error is None and rollout.rewards == {"solver": 1.0}, rollout.error


MEMORY = """
import ctypes
control = os.read(int(os.environ["TURNWISE_CONTROL"]), 100).decode()
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
look = 'import os; open("/proc/%d/mem" % os.getppid(), "rb")'
ask("x")
result(float(subprocess.run([sys.executable, "-I", "-S", "-c", look], capture_output=True).returncode == 0))
"""


@needs_bubblewrap
def test_an_agent_keeps_its_memory_from_its_commands_if_it_asks(tmp_path):
    rollout = play_contained(tmp_path, MEMORY, children=True)
    assert rollout.error is None and rollout.rewards == {"solver": 0.0}, rollout.error


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


def test_docker_gets_no_network_no_key_the_folder_alone_and_the_same_limits(tmp_path):
    environment = {"PATH": "/host", "HOME": "/episode", "OPENAI_API_KEY": "secret", "LANG": "C"}
    container = Container(
        "docker", image="node:22", mounts=["/opt"], memory_gb=2, tmp_gb=0.5, max_processes=99, disk_gb=1
    )
    shell, *command = container.command(tmp_path, "name", environment, {"grace": 1.0}, ["agent", "x"], 50_123)
    assert shell == "/bin/sh" and command[:3] == ["-c", 'trap "" TERM; exec "$@"', "sh"]
    line = " ".join(command[3:])
    for part in (
        "docker run --rm --interactive --name name --network none --pull never --log-driver none",
        "--read-only --tmpfs /tmp:exec,size=536870912",
        "--shm-size 536870912 --user 50123:50123 --ipc private --cap-drop ALL --security-opt no-new-privileges",
        "--pids-limit 99 --memory 2147483648 --memory-swap 2147483648",
        f"--volume {tmp_path}/work:/episode --volume {tmp_path}/turnwise:/turnwise --volume /opt:/opt:ro",
        "--env HOME=/episode --env OPENAI_API_KEY --env LANG --entrypoint python3 node:22 -I -S /turnwise/supervisor",
    ):
        assert part in line
    assert "secret" not in line and "/host" not in line
    *_, options, program, argument = command
    assert (program, argument) == ("agent", "x")
    lock = json.loads(options)["lock"]
    assert lock["user"] is None and lock["limits"] == {"RLIMIT_CORE": 1, "RLIMIT_FSIZE": 2**30, "RLIMIT_NOFILE": 4096}
    assert bytes.fromhex(lock["filter"]) == build_program_filter(platform.machine())
    assert container.client_environment(environment)["PATH"] == os.environ["PATH"]


DOCKER = """#!/bin/sh
echo "$@" >>FOLDER/asked
case "$1" in info) echo LIMITS;; esac
[ "$3" != none ] || { echo no such image >&2; exit 1; }
"""


def test_docker_is_asked_for_its_limits_the_image_and_to_remove_the_container(tmp_path, monkeypatch):
    tool = tmp_path / "docker"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(limits):
        tool.write_text(DOCKER.replace("FOLDER", str(tmp_path)).replace("LIMITS", limits))
        tool.chmod(0o755)

    make("true true")
    container = Container.of({"image": "node:22"})
    assert container.tool == "docker"
    container.remove("name")
    info, *asked = (tmp_path / "asked").read_text().splitlines()
    assert info.startswith("info") and asked == ["image inspect node:22", "rm --force name"]
    with pytest.raises(RuntimeError, match="can't run here: no such image"):
        Container.of({"tool": "docker", "image": "none"})
    make("false true")
    with pytest.raises(RuntimeError, match=r"can't give a container memory.*container.without = \['memory'\]"):
        Container.of({"image": "node:22"})
    with pytest.warns(UserWarning, match="without=\\['memory'\\]: agents run without"):
        Container.of({"image": "node:22", "without": ["memory"]})


def test_docker_that_does_not_answer_fails_no_episode(tmp_path, monkeypatch):
    (tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("turnwise.integrations.gateway.process.container.CHECK_SECONDS", 0.1)
    with pytest.warns(UserWarning, match="docker doesn't answer: container name may be left behind"):
        Container("docker", image="node:22").remove("name")


@needs_bubblewrap
def test_a_host_that_gives_less_is_refused_unless_a_key_allows_it(tmp_path, monkeypatch):
    ways = [("missing", []), ("namespace", ["user", "processes"])]
    monkeypatch.setattr(Container, "_ways", lambda self: ways)
    trial = Container._trial
    monkeypatch.setattr(Container, "_trial", lambda self: "no rights" if self.way == "missing" else trial(self))
    with pytest.raises(RuntimeError, match=r"user and processes .no rights.. Run where it can, or .* \['user', 'proc"):
        Container.of("bwrap")
    with pytest.raises(RuntimeError, match="a container processes"):
        Container.of({"tool": "bwrap", "without": ["user"]})
    with pytest.warns(UserWarning, match="agents run without"):
        container = Container.of({"tool": "bwrap", "without": ["user", "processes"]})
    assert container.way == "namespace"
    with pytest.warns(UserWarning, match="agents run without"):
        rollout = play_contained(
            tmp_path,
            "ask('x'); result(float(not os.access('/proc/sys/kernel/core_pattern', os.W_OK)))",
            container={"tool": "bwrap", "without": ["user", "processes"]},
        )
    assert rollout.error is None and rollout.rewards == {"solver": 1.0}, rollout.error


def test_docker_gets_no_folder_whose_name_is_an_option(tmp_path, monkeypatch):
    (tmp_path / "a:rw").mkdir()
    with pytest.raises(ValueError, match=r"docker takes no folder with a colon, such as .*a:rw"):
        Container.of({"image": "x", "mounts": [tmp_path / "a:rw"]})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a:rw"))
    with pytest.raises(ValueError, match="set TMPDIR"):
        Container.of({"image": "x"})


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
        ({"image": "--privileged"}, ValueError, "container.image='--privileged': expected the name of an image"),
        ({"image": "x y"}, ValueError, "container.image='x y': expected the name of an image"),
        ({"memory_gb": 0}, ValueError, "memory_gb=0: expected a number > 0"),
        ({"without": ["everything"]}, ValueError, "without=.'everything'.: expected a list of some of"),
        ({"imgae": "x"}, ValueError, "container.imgae: unknown"),
    ],
)
def test_a_container_that_is_missing_is_an_error_at_the_start(tmp_path, monkeypatch, given, error, problem):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(error, match=problem):
        ProcessEpisode(["true"], Gateway(), container=given)
