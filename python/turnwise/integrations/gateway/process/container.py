"""Containers for agents whose commands a model writes: they see the episode's folder, and reach the gateway alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from turnwise.utils.files import expanded

TOOLS = ("docker", "podman", "bwrap")
FOLDER, PRIVATE = "/episode", "/turnwise"
"""The episode's folder, and the one of the question and the result, as the agent sees them."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", sys.prefix, sys.base_prefix)
"""Folders that an agent in bubblewrap may read: programs, and the trainer's Python. No homes and no data."""
SETTINGS = (
    "alternatives", "ca-certificates", "fonts", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "localtime", "mime.types", "nsswitch.conf", "passwd", "pki", "protocols", "services", "ssl", "terminfo",
)  # fmt: skip
"""The parts of ``/etc`` that programs read; others may hold passwords."""
OF_CLIENT = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "CONTAINER_HOST")
"""Variables by which docker and podman find their server."""
CHECK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Container:
    """Wraps the command of an agent; its network has nothing but a forwarder to the gateway's Unix socket.

    Example: ``Container("docker", image="node:22")``, or ``Container("bwrap", mounts=["/home/me/agents"])``
    """

    tool: str = "auto"
    """``"docker"``, ``"podman"`` or ``"bwrap"`` (bubblewrap). ``"auto"`` takes docker or podman if ``image`` is set,
    else bubblewrap."""
    image: str = ""
    """Image for docker and podman; it needs ``python3``."""
    mounts: Sequence[str] = ()
    """Further folders that the agent may read, at their own paths."""

    @classmethod
    def of(cls, given: str | Mapping[str, Any]) -> Self:
        """Return a container that this machine can run. Raises ``ValueError`` or ``RuntimeError`` otherwise."""
        table: dict[str, Any] = {"tool": given} if isinstance(given, str) else dict(given)
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in table if name not in names]:
            raise ValueError(f"gateway.container.{unknown[0]}: unknown, expected some of {names}")
        if not isinstance(mounts := table.get("mounts", ()), str):
            table["mounts"] = [expanded(path) for path in mounts]
        container = cls(**table)
        if container.tool == "auto":
            found = [tool for tool in TOOLS if (tool != "bwrap") == bool(container.image) and shutil.which(tool)]
            container = replace(container, tool=(found or ["docker" if container.image else "bwrap"])[0])
        container.check()
        return container

    def check(self) -> None:
        """Raise ``ValueError`` for wrong settings, and ``RuntimeError`` if nothing can be run in the container here."""
        if self.tool not in TOOLS:
            raise ValueError(f"gateway.container={self.tool!r}: expected one of {('auto', *TOOLS)}")
        if (self.tool != "bwrap") != bool(self.image):
            raise ValueError(f"gateway.container.image={self.image!r}: expected one for docker or podman alone")
        if isinstance(self.mounts, str) or not all(
            Path(path).is_absolute() and Path(path).exists() for path in self.mounts
        ):
            raise ValueError(f"gateway.container.mounts={self.mounts!r}: expected a list of absolute paths that exist")
        if shutil.which(self.tool) is None:
            package = {"bwrap": " (package bubblewrap)"}.get(self.tool, "")
            raise RuntimeError(f"gateway.container={self.tool!r}: no program {self.tool!r}{package} on this machine")
        trial = [self.tool, "image", "inspect", self.image] if self.image else [*self._bwrap(), "true"]
        run = subprocess.run(trial, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
        if run.returncode:
            raise RuntimeError(f"gateway.container={self.tool!r} can't run here: {run.stderr.strip()[-500:]}")

    @property
    def python(self) -> str:
        return "python3" if self.image else sys.executable

    def command(self, root: Path, name: str, environment: Mapping[str, str], inner: Sequence[str]) -> list[str]:
        """Return the command that runs ``inner`` in the container, on ``root``'s folders ``work`` and ``turnwise``.

        The tool itself ignores SIGTERM, so that ``inner`` can end in its own time. Values of variables are in the
        tool's environment, and not on the command line.
        """
        folders = ((str(root / "work"), FOLDER), (str(root / "turnwise"), PRIVATE))
        if self.image:
            wrapped = [self.tool, "run", "--rm", "--interactive", "--name", name, "--network", "none"]
            wrapped += ["--read-only", "--tmpfs", "/tmp:exec", "--user", f"{os.getuid()}:{os.getgid()}"]
            wrapped += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--workdir", FOLDER]
            wrapped += [part for source, place in folders for part in ("--volume", f"{source}:{place}")]
            wrapped += [part for path in self.mounts for part in ("--volume", f"{path}:{path}:ro")]
            wrapped += ["--env", f"HOME={FOLDER}"]
            wrapped += [part for name in environment if name not in OF_CLIENT for part in ("--env", name)]
            wrapped += ["--entrypoint", inner[0], self.image, *inner[1:]]
        else:
            wrapped = self._bwrap()
            wrapped += [part for source, place in folders for part in ("--bind", source, place)]
            wrapped += ["--remount-ro", "/", "--chdir", FOLDER, "--", *inner]
        return ["/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh", *wrapped]

    def _bwrap(self) -> list[str]:
        arguments = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "episode"]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        for path in (*SYSTEM, *(f"/etc/{name}" for name in SETTINGS), *map(str, self.mounts)):
            arguments += ["--ro-bind-try", path, path]
        return arguments

    def client_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the tool: the agent's, and for docker and podman what finds their server."""
        if not self.image:
            return dict(environment)
        return {**environment, **{name: os.environ[name] for name in OF_CLIENT if name in os.environ}}

    def remove(self, name: str) -> None:
        """Kill what outlived its client; it is no descendant of the supervisor. Bubblewrap leaves nothing."""
        if self.image:
            subprocess.run([self.tool, "rm", "--force", name], capture_output=True, timeout=CHECK_SECONDS, check=False)


def container_name() -> str:
    return f"turnwise-{uuid4().hex}"
