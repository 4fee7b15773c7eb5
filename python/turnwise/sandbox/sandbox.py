"""Run untrusted programs, such as a model's, each in its own process that may only compute.

On Linux (x86-64 and aarch64, kernel 4.14 or newer; also in containers, without privileges, and binding root too):

============== =====================================================================================================
processes      one, with one thread; it can't start another, so every limit below holds for the whole program
time           CPU seconds by the kernel; wall seconds by the parent; it dies with its parent; sleeping is refused
input          none; reading it raises ``EOFError`` at once
memory         address space (``MemoryError``)
files          it can't open, list, inspect or create any, including the parent's and ``/proc``
network        none; it can't create a socket
signals        it can't send any, even to itself
environment    wiped; no open files but three pipes; an empty working directory that is deleted afterwards
output         the parent reads it up to a limit, then kills the program
system calls   an allow-list, see ``seccomp.py``; the kernel enforces it
============== =====================================================================================================

Elsewhere (macOS) only the POSIX limits apply: CPU time, file size 0, and no new process unless it runs as root. Memory,
network and reading files are not limited. ``Sandbox`` refuses this unless ``strict=False``, and then warns. On Windows
it always refuses.

The parent must treat a program's results only as data, and compare them itself. A program shares its process with the
code that calls it, so it may claim any result. It never receives the expected values.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from turnwise.sandbox.seccomp import MACHINES, build_filter

Reason = Literal["ok", "error", "memory", "cpu", "wall", "output", "forbidden", "crash"]

OPEN_FILES = 16
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONCOERCECLOCALE": "0"}  # so sets of strings always have the same order
_CHUNK = 16_384


class SandboxError(RuntimeError):
    """Raised if this machine can't lock a program in as required."""


class Returned(NamedTuple):
    """Result of one call: ``error`` is ``None`` if it returned, else for example ``"KeyError: 3"``."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxRun:
    """Result of a program. ``results`` has one entry per input. Inputs that it did not reach have ``reason`` as error.

    ``reason``: ``"ok"`` all calls returned; ``"error"`` one raised; ``"memory"`` one ran out of memory; ``"cpu"``,
    ``"wall"``, ``"output"``: killed at that limit; ``"forbidden"``: killed for asking for a process, a socket, a signal
    or the like; ``"crash"``: the interpreter died or stopped early. ``printed`` is what the program wrote, cut off.

    Example: ``SandboxRun([Returned(3)], "ok", "", seconds=0.03)``
    """

    results: list[Returned]
    reason: Reason
    printed: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one run. ``cpu_seconds`` is an integer and includes start-up (some hundredths).

    ``memory_mb`` is address space. ``output_bytes`` limits the printed text and the results of a program separately.
    ``wall_seconds`` ends a program that waits and never computes. It is long: a busy machine must not decide a reward.
    """

    cpu_seconds: int = 1
    wall_seconds: float = 60.0
    memory_mb: int = 256
    output_bytes: int = 65_536

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "memory_mb", "output_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number > 0")
        if not isinstance(self.cpu_seconds, int):
            raise ValueError(f"cpu_seconds={self.cpu_seconds!r}: expected whole seconds")

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """``(soft, hard)`` by the name in :mod:`resource`. The kernel kills one CPU second after its signal."""
        memory = self.memory_mb * 2**20
        return {
            "RLIMIT_CPU": (self.cpu_seconds, self.cpu_seconds + 1),
            "RLIMIT_AS": (memory, memory),
            "RLIMIT_FSIZE": (0, 0),
            "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES),
            "RLIMIT_NPROC": (0, 0),
            "RLIMIT_CORE": (1, 1),  # at 0 the kernel would still start the host's program for core dumps
        }


class Sandbox:
    """Runs programs, at most ``parallel`` at once per event loop (default: one per core), as the module describes.

    Raises :class:`SandboxError` if a program can't be locked in here, unless ``strict=False``.

    Example::

        run = await Sandbox().call("def f(a, b):\\n    return a + b", "f", [(1, 2), ("x", 1)])
        assert run.results[0].value == 3 and run.results[1].error.startswith("TypeError")
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, parallel: int | None = None, strict: bool = True
    ) -> None:
        self.limits = SandboxLimits() if limits is None else limits
        self._filter = find_filter(strict=strict)
        self._parallel = (os.cpu_count() or 1) if parallel is None else parallel
        if self._parallel < 1:
            raise ValueError(f"parallel={parallel!r}: expected at least 1")
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def call(self, program: str, function: str, inputs: Sequence[Sequence[Any]]) -> SandboxRun:
        """Define ``program`` and call its ``function`` on each of ``inputs``, tuples of plain arguments, in order.

        All calls run in one process, so a later call sees globals that an earlier one changed. A call may return
        ``None``, bool, int, float, str, lists, and dicts with string keys; a tuple arrives as a list. Any other value
        counts as an error of that call.
        """
        job = self._job(program, function, inputs)
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._parallel)):
            with tempfile.TemporaryDirectory(prefix="turnwise-sandbox-", ignore_cleanup_errors=True) as folder:
                return await self._run(job, len(inputs), folder)

    def _job(self, program: str, function: str, inputs: Sequence[Sequence[Any]]) -> bytes:
        job = {
            "program": program,
            "function": function,
            "inputs": [tuple(arguments) for arguments in inputs],
            "limits": self.limits.rlimits(),
            "filter": self._filter,
            "parent": os.getpid(),
        }
        try:
            return marshal.dumps(job)
        except ValueError:
            raise TypeError(f"inputs={inputs!r}: expected plain numbers, strings, lists and dicts") from None

    async def _run(self, job: bytes, calls: int, folder: str) -> SandboxRun:
        started = time.perf_counter()
        child = _Child(job, folder, self.limits)
        # Watch in a separate thread. The threads of the loop's executor may all be busy, and the limit would pass.
        watcher = ThreadPoolExecutor(1, thread_name_prefix="turnwise-sandbox")
        watching = asyncio.get_running_loop().run_in_executor(watcher, child.watch)
        watcher.shutdown(wait=False)
        try:
            stopped = await asyncio.shield(watching)
        except asyncio.CancelledError:
            child.kill()
            await asyncio.wait([watching])
            raise
        results = _read_results(bytes(child.lines), calls)
        reason = stopped or _reason(child.process.returncode, results, calls)
        missing = Returned(error=reason)
        return SandboxRun(
            results + [missing] * (calls - len(results)),
            reason,
            child.printed.decode("utf-8", "replace"),
            time.perf_counter() - started,
        )


class _Child:
    """A program's process: ``lines`` and ``printed`` are what it has written so far."""

    def __init__(self, job: bytes, folder: str, limits: SandboxLimits) -> None:
        self.limits = limits
        self.deadline = time.monotonic() + limits.wall_seconds
        self.lines, self.printed = bytearray(), bytearray()
        with tempfile.TemporaryFile() as standard_input:
            standard_input.write(job)
            standard_input.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", str(Path(__file__).with_name("child.py"))],
                stdin=standard_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
            )

    def watch(self) -> Reason | None:
        """Read until the process ends or exceeds a limit; blocks. Returns the limit that it exceeded, if any."""
        try:
            return self._read()
        except subprocess.TimeoutExpired:
            return "wall"
        finally:
            self.kill()
            self.process.wait()
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()

    def kill(self) -> None:
        """Kill the process's group. No process can have left it, as the filter lets none start."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _read(self) -> Reason | None:
        with selectors.DefaultSelector() as selector:
            for stream, written in ((self.process.stdout, self.lines), (self.process.stderr, self.printed)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, written)
            while selector.get_map():
                left = self.deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    return "wall"
                for key, _ in ready:
                    room = self.limits.output_bytes - len(key.data)
                    if not (chunk := os.read(key.fd, _CHUNK)):
                        selector.unregister(key.fileobj)
                    elif len(chunk) > room:
                        return "output"
                    key.data.extend(chunk)
        # A program may close its pipes and continue to run.
        self.process.wait(max(0.0, self.deadline - time.monotonic()))
        return None


def find_filter(*, strict: bool) -> bytes | None:
    """Return the filter for this machine. Without one, return ``None`` with a warning if ``strict`` is false.

    Raises :class:`SandboxError` if there is no filter and ``strict`` is true, and always on Windows, which has no
    resource limits.
    """
    machine = platform.machine()
    if sys.platform == "linux" and machine in MACHINES:
        return build_filter(machine)
    where = f"{sys.platform} on {machine or 'an unknown machine'}"
    if sys.platform == "win32":
        raise SandboxError(f"{where}: programs can't be limited here; use Linux or a Linux container")
    risk = "a program can read files, use memory and reach the network"
    if strict:
        raise SandboxError(f"{where}: {risk} here; use Linux (x86_64 or aarch64), or accept that with strict=False")
    warnings.warn(f"sandbox on {where}: {risk}; only CPU time, wall time and output are bounded", stacklevel=3)
    return None


def _read_results(lines: bytes, calls: int) -> list[Returned]:
    """Parse the results up to the first line that is not one. The program may have written any line but the first."""
    first, *others = lines.decode("utf-8", "replace").split("\n")
    if "refused" in (report := _read_line(first)):
        raise SandboxError(f"the kernel refused to lock the program in: {report['refused']}")
    results: list[Returned] = []
    for line in others[:-1][:calls]:
        result = _read_line(line)
        if not {"value", "error"} & result.keys():
            break
        results.append(Returned(result.get("value"), None if "value" in result else str(result["error"])))
    return results


def _read_line(line: str) -> dict[str, Any]:
    """Parse a line's object; an empty dict if it has none, or if it holds text that can't be encoded."""
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # halves of surrogate pairs
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _reason(status: int, results: Sequence[Returned], calls: int) -> Reason:
    if len(results) == calls:
        errors = [result.error for result in results if result.error is not None]
        if any(error.startswith("MemoryError") for error in errors):
            return "memory"
        return "error" if errors else "ok"
    return _SIGNALS.get(-status, "crash")


_ENDS: dict[str, Reason] = {"SIGXCPU": "cpu", "SIGKILL": "cpu", "SIGSYS": "forbidden"}
_SIGNALS = {getattr(signal, name): reason for name, reason in _ENDS.items() if hasattr(signal, name)}
