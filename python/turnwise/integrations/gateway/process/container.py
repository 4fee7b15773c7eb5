"""Containers for agents whose commands a model writes: they see the episode's folder, and reach the gateway alone."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from turnwise.integrations.gateway.process import supervisor
from turnwise.sandbox.seccomp import MACHINES
from turnwise.sandbox.surface import build_program_filter
from turnwise.utils.files import expanded

TOOLS = ("docker", "podman", "bwrap")
FOLDER, PRIVATE = "/episode", "/turnwise"
"""The episode's folder, and the one of the question and the result, as the agent sees them."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", sys.prefix, sys.base_prefix)
"""Folders that an agent in bubblewrap may read: programs, and the trainer's Python. No homes and no data."""
SETTINGS = (
    "alternatives", "ca-certificates", "fonts", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "localtime", "mime.types", "nsswitch.conf", "pki", "protocols", "services", "ssl", "terminfo",
)  # fmt: skip
"""The parts of ``/etc`` that programs read; others may hold passwords."""
OF_CLIENT = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "CONTAINER_HOST")
"""Variables by which docker and podman find their server."""
CHECK_SECONDS = 60.0
PROTECTIONS = ("user", "processes", "memory", "filter")
"""What a host may be unable to give: a user without rights, the limits of processes and memory, the filter of system
calls. Read-only system files, the limit of disk and the missing network come with every container."""
FIRST_USER, USERS = 50_000, 9_000
"""Users of containers that root starts. Nobody else has them, so each container has its own count of processes."""
OPEN_FILES = 4096
IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*", re.ASCII)
"""A name is no option of docker."""
_counted = count()


@dataclass(frozen=True, slots=True)
class Container:
    """Wraps the command of an agent; its network has nothing but a forwarder to the gateway's Unix socket.

    The command is no root in it, even if the trainer is. It can't change system files or kernel settings, and a filter
    refuses rare system calls (``turnwise.sandbox.surface``). An episode beyond a limit of memory or disk is ended, and
    fails.

    Example: ``Container("docker", image="node:22")``, or ``Container("bwrap", mounts=["/home/me/agents"])``
    """

    tool: str = "auto"
    """``"docker"``, ``"podman"`` or ``"bwrap"`` (bubblewrap). ``"auto"`` takes docker or podman if ``image`` is set,
    else bubblewrap."""
    image: str = ""
    """Image for docker and podman; it needs ``python3``."""
    mounts: Sequence[str] = ()
    """Further folders that the agent may read, at their own paths."""
    max_processes: int = 512
    """Processes and threads at once."""
    memory_gb: float = 8.0
    """GiB of memory of all processes together."""
    tmp_gb: float = 1.0
    """GiB of ``/tmp`` and of ``/dev/shm``, each of which is memory."""
    disk_gb: float = 10.0
    """GiB of the episode's folder."""
    max_files: int = 200_000
    """Files in the episode's folder."""
    without: Sequence[str] = ()
    """Protections that this host can't give, and that agents may lack: some of :data:`PROTECTIONS`."""
    way: str = field(default="", repr=False)
    """How the tool is called here; :meth:`of` finds it."""

    @classmethod
    def of(cls, given: str | Mapping[str, Any], also: Sequence[str] = ()) -> Self:
        """Return a container that this machine can run, with further mounts. Raises ``ValueError`` or ``RuntimeError``
        otherwise."""
        table: dict[str, Any] = {"tool": given} if isinstance(given, str) else dict(given)
        names = [field.name for field in fields(cls) if field.name != "way"]
        if unknown := [name for name in table if name not in names]:
            raise ValueError(f"gateway.container.{unknown[0]}: unknown, expected some of {names}")
        if not isinstance(mounts := table.get("mounts", ()), str):
            table["mounts"] = list(dict.fromkeys([*map(expanded, mounts), *also]))
        container = cls(**table)
        if container.tool == "auto":
            found = [tool for tool in TOOLS if (tool != "bwrap") == bool(container.image) and shutil.which(tool)]
            container = replace(container, tool=(found or ["docker" if container.image else "bwrap"])[0])
        return container.checked()

    def checked(self) -> Self:
        """Return the container in the safest way that runs here.

        Raises ``ValueError`` for wrong settings. Raises ``RuntimeError`` if nothing can be run in the container, or
        without a protection that ``without`` doesn't name; one that it names is a warning.
        """
        if self.tool not in TOOLS:
            raise ValueError(f"gateway.container={self.tool!r}: expected one of {('auto', *TOOLS)}")
        if (self.tool != "bwrap") != bool(self.image):
            raise ValueError(f"gateway.container.image={self.image!r}: expected one for docker or podman alone")
        if self.image and not IMAGE.fullmatch(self.image):
            raise ValueError(f"gateway.container.image={self.image!r}: expected the name of an image")
        if isinstance(self.mounts, str) or not all(
            Path(path).is_absolute() and Path(path).exists() for path in self.mounts
        ):
            raise ValueError(f"gateway.container.mounts={self.mounts!r}: expected a list of absolute paths that exist")
        if self.image and (colons := [path for path in (*self.mounts, tempfile.gettempdir()) if ":" in str(path)]):
            raise ValueError(
                f"gateway.container.mounts={self.mounts!r}: {self.tool} takes no folder with a colon, such as "
                f"{str(colons[0])!r}. Give it another name, or set TMPDIR if it is the temporary folder"
            )
        for name in ("max_processes", "memory_gb", "tmp_gb", "disk_gb", "max_files"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"gateway.container.{name}={value!r}: expected a number > 0")
        if isinstance(self.without, str) or not set(self.without) <= set(PROTECTIONS):
            raise ValueError(f"gateway.container.without={self.without!r}: expected a list of some of {PROTECTIONS}")
        if shutil.which(self.tool) is None:
            package = {"bwrap": " (package bubblewrap)"}.get(self.tool, "")
            raise RuntimeError(f"gateway.container={self.tool!r}: no program {self.tool!r}{package} on this machine")
        problems = []
        for way, lacks in self._ways():
            chosen = replace(self, way=way)
            if problem := chosen._trial():
                problems.append(problem)
                continue
            lacking = [*lacks, *([] if self._calls() else ["filter"])]
            if refused := [name for name in lacking if name not in self.without]:
                because = f" ({problems[0]})" if problems else ""
                raise RuntimeError(
                    f"gateway.container={self.tool!r}: this host can't give a container {' and '.join(refused)}"
                    f"{because}. Run where it can, or accept that with gateway.container.without = {lacking!r}"
                )
            if lacking:
                warnings.warn(f"gateway.container.without={lacking!r}: agents run without", stacklevel=4)
            return chosen
        raise RuntimeError(f"gateway.container={self.tool!r} can't run here: {problems[0]}")

    def _ways(self) -> list[tuple[str, list[str]]]:
        """Return the ways to call the tool, the safest first, with the protections that each lacks."""
        if self.image:
            return [("image", self._lacks_of_client())]
        if os.getuid() == 0:
            # Without a user namespace, the command becomes a user of the host that owns nothing. In one, it would stay
            # the host's root in the kernel's eyes, whose processes are not counted.
            return [("root", []), ("namespace", ["user", "processes"])]
        # Before Linux 5.14 the limit counts all processes of the user, and without a user namespace always.
        old = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2]) < (5, 14)
        return [("namespace", ["processes"] if old else []), ("plain", ["processes"])]

    def _lacks_of_client(self) -> list[str]:
        if self.tool != "docker":  # podman refuses limits that it can't set
            return []
        line = "{{.MemoryLimit}} {{.PidsLimit}}"
        info = subprocess.run(
            [self.tool, "info", "--format", line], capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
        words = [*info.stdout.split(), "", ""]
        return [name for name, word in zip(("memory", "processes"), words, strict=False) if word == "false"]

    def _trial(self) -> str:
        """Run the tool once. Return its error; empty if it works."""
        if self.image:
            trial = [self.tool, "image", "inspect", self.image]
            run = subprocess.run(trial, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
        else:
            with tempfile.TemporaryDirectory(prefix="turnwise-trial-") as folder:
                self.prepare(Path(folder))
                trial = self.command(Path(folder), "trial", {}, {"grace": 1.0}, ["true"], self.new_user())
                run = subprocess.run(trial, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
        return f"{run.stderr.strip()[-500:] or run.returncode}" if run.returncode else ""

    @property
    def python(self) -> str:
        return "python3" if self.image else sys.executable

    # -- one episode ---------------------------------------------------------------------------------------------------
    def prepare(self, root: Path, user: int | None = None) -> None:
        """Make ``root``'s folders ``work`` and ``turnwise`` with what the container needs, for ``user``."""
        for name in ("work", "turnwise"):
            (root / name).mkdir(exist_ok=True)
            (root / name).chmod(0o777)  # none but this process reaches root
        shutil.copyfile(supervisor.__file__, root / "turnwise" / "supervisor.py")
        (root / "turnwise" / "supervisor.py").chmod(0o755)
        for name in ("passwd", "group"):
            given = Path("/etc", name)
            lines = given.read_text(encoding="utf-8", errors="replace") if given.exists() else ""
            (root / name).write_text(f"{lines.rstrip()}\n{_ENTRIES[name].format(user=user)}\n" if user else lines)
            (root / name).chmod(0o644)

    def new_user(self) -> int | None:
        """Return the user of an episode's container; ``None`` where it stays the trainer's, which is not root."""
        if os.getuid() or self.way == "namespace":
            return None
        return FIRST_USER + (os.getpid() * 61 + next(_counted)) % USERS

    def give(self, root: Path, user: int | None) -> None:
        """Give ``root``'s folders, with all that is in them, to the user of the container."""
        if user is None:
            return
        for name in ("work", "turnwise"):
            for folder, _, files in os.walk(root / name):
                for path in (folder, *(os.path.join(folder, file) for file in files)):
                    os.chown(path, user, user, follow_symlinks=False)

    def give_socket(self, path: str, user: int | None) -> None:
        """Let docker's and podman's supervisor use a socket, which is not root; bubblewrap's may be."""
        if user is not None and self.image:
            os.chown(path, user, user)

    def command(
        self,
        root: Path,
        name: str,
        environment: Mapping[str, str],
        options: Mapping[str, Any],
        command: Sequence[str],
        user: int | None = None,
    ) -> list[str]:
        """Return the command that runs ``command`` under a supervisor with ``options`` in the container.

        The container has ``root``'s folders ``work`` and ``turnwise``. The tool itself ignores SIGTERM, so that
        ``command`` can end in its own time. Values of variables are in the tool's environment, and not on the command
        line.
        """
        inside = json.dumps({**options, "lock": self.lock(user)})
        inner = [self.python, "-I", "-S", f"{PRIVATE}/supervisor.py", inside, *command]
        folders = ((str(root / "work"), FOLDER), (str(root / "turnwise"), PRIVATE))
        if self.image:
            memory, shared = _bytes(self.memory_gb), _bytes(self.tmp_gb)
            user, group = (os.getuid(), os.getgid()) if user is None else (user, user)
            wrapped = [self.tool, "run", "--rm", "--interactive", "--name", name, "--network", "none"]
            wrapped += ["--pull", "never", "--log-driver", "none"]  # else docker would keep all output on disk
            wrapped += ["--read-only", "--tmpfs", f"/tmp:exec,size={shared}", "--shm-size", str(shared)]
            wrapped += ["--user", f"{user}:{group}", "--ipc", "private"]
            wrapped += ["--userns", "keep-id"] if self.tool == "podman" and os.getuid() else []
            wrapped += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--workdir", FOLDER]
            wrapped += ["--pids-limit", str(self.max_processes), "--memory", str(memory), "--memory-swap", str(memory)]
            wrapped += [part for source, place in folders for part in ("--volume", f"{source}:{place}")]
            wrapped += [part for path in self.mounts for part in ("--volume", f"{path}:{path}:ro")]
            wrapped += ["--env", f"HOME={FOLDER}"]
            wrapped += [part for name in environment if name not in OF_CLIENT for part in ("--env", name)]
            wrapped += ["--entrypoint", inner[0], self.image, *inner[1:]]
        else:
            wrapped = self._bwrap(root)
            wrapped += [part for source, place in folders for part in ("--bind", source, place)]
            wrapped += ["--remount-ro", "/", "--remount-ro", "/proc", "--remount-ro", "/dev"]
            wrapped += ["--chdir", FOLDER, "--", *inner]
        return ["/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh", *wrapped]

    def lock(self, user: int | None) -> dict[str, Any]:
        """Return what the command gives up in the container, for the supervisor."""
        # At RLIMIT_CORE 0 the kernel would still start the host's program for core dumps.
        limits = {"RLIMIT_CORE": 1, "RLIMIT_FSIZE": _bytes(self.disk_gb), "RLIMIT_NOFILE": OPEN_FILES}
        if not self.image:  # docker and podman limit these for the whole container
            limits |= {"RLIMIT_NPROC": self.max_processes, "RLIMIT_DATA": _bytes(self.memory_gb)}
        return {"limits": limits, "user": None if self.image else user, "filter": self._calls()}

    def _calls(self) -> str:
        """Return the filter of system calls for this machine; empty for one whose calls are not known."""
        machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())  # docker on macOS
        return build_program_filter(machine).hex() if machine in MACHINES else ""

    def watch(self, root: Path) -> dict[str, Any]:
        """Return the limits that a supervisor outside of the container watches. Docker and podman limit memory."""
        memory = 0 if self.image else _bytes(self.memory_gb)
        return {"memory": memory, "disk": _bytes(self.disk_gb), "files": self.max_files, "folder": str(root)}

    def _bwrap(self, root: Path) -> list[str]:
        arguments = ["bwrap", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "episode"]
        if self.way == "root":  # of the supervisor, which the command is not
            arguments += [part for right in ("SETUID", "SETGID", "KILL") for part in ("--cap-add", f"CAP_{right}")]
        arguments += [f"--unshare-{part}" for part in ("ipc", "pid", "net", "uts", "cgroup-try")]
        arguments += ["--unshare-user"] * (self.way == "namespace")
        arguments += ["--proc", "/proc", "--dev", "/dev"]
        for place in ("/tmp", "/dev/shm"):
            arguments += ["--perms", "1777", "--size", str(_bytes(self.tmp_gb)), "--tmpfs", place]
        shown = (*SYSTEM, *(f"/etc/{name}" for name in SETTINGS), *map(str, self.mounts))
        # Bubblewrap makes the folders above a mount for its own user alone.
        above = dict.fromkeys(str(folder) for path in shown for folder in reversed(Path(path).parents[:-1]))
        arguments += [part for folder in above for part in ("--perms", "0755", "--dir", folder)]
        arguments += [part for path in shown for part in ("--ro-bind-try", path, path)]
        for name in ("passwd", "group"):
            arguments += ["--ro-bind", str(root / name), f"/etc/{name}"]
        return arguments

    def client_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the tool: the agent's, and for docker and podman what finds their server."""
        if not self.image:
            return dict(environment)
        return {**environment, **{name: os.environ[name] for name in OF_CLIENT if name in os.environ}}

    def remove(self, name: str) -> None:
        """Kill what outlived its client; it is no descendant of the supervisor. Bubblewrap leaves nothing."""
        if not self.image:
            return
        try:
            subprocess.run([self.tool, "rm", "--force", name], capture_output=True, timeout=CHECK_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            warnings.warn(f"{self.tool} doesn't answer: container {name} may be left behind", stacklevel=2)


_ENTRIES = {"passwd": f"agent:x:{{user}}:{{user}}::{FOLDER}:/bin/sh", "group": "agent:x:{user}:"}


def _bytes(gigabytes: float) -> int:
    return int(gigabytes * 2**30)


def container_name() -> str:
    return f"turnwise-{uuid4().hex}"
