"""A process with limits of time, memory and output for jobs on what others wrote: chat templates, and grammars.

No part of such a job can be bounded in its own process: one long call, or one allocation, ends when it ends. So the
kernel bounds another process and, where it has filters of system calls, lets it open no file, network or process. That
process serves one job after another, because a start costs 0.1 s, and the next one after a limit. The jobs are those of
``limited_child.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import marshal
import os
import platform
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from turnwise.sandbox.seccomp import MACHINES, build_filter

_log = logging.getLogger(__name__)
_WALL_SECONDS = 60.0
_LENGTH = struct.Struct("<Q")
_LIMIT, _OPEN = 2, 3
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables that the process gets: none with a key."""


class LimitError(ValueError):
    """A job takes more time or memory than its limits allow, or writes more."""


class Limits(NamedTuple):
    """CPU ``seconds``, bytes of ``memory`` beyond the interpreter's own, and bytes of ``output``."""

    seconds: float
    memory: int
    output: int


class LimitedProcess:
    """The process, which starts with the first job. A fork of this process starts its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        _all.add(self)

    def ask(self, job: str, text: str, content: bytes, limits: Limits) -> tuple[bool, str]:
        """Return True and the job's text, or False and its error. Raises :class:`LimitError` with the limit."""
        messages = [marshal.dumps((job, text, content, tuple(limits)))]
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._process = self._started()
                path = [str(Path(part).absolute()) for part in sys.path if isinstance(part, str)]
                messages.insert(0, marshal.dumps((path, _filter())))
            try:
                kind, content = self._exchange(self._process, messages)
            except BaseException:
                self.stop()  # half of an answer may be under way
                raise
            if kind == _LIMIT:
                self.stop()
                raise LimitError(content.decode())
            return not kind, content.decode("utf-8", "surrogatepass")

    def stop(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.wait()
            _close(process)

    def forget(self) -> None:
        """In a forked process: leave the process to the other one."""
        if (process := self._process) is not None:
            process.returncode = 0
            _close(process)
        self._process, self._lock = None, threading.Lock()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", str(Path(__file__).with_name("limited_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            cwd="/",
            start_new_session=True,
        )

    def _exchange(self, process: subprocess.Popen[bytes], messages: Sequence[bytes]) -> tuple[int, bytes]:
        try:
            for message in messages:
                _send(process, message)
            answer = _received(process, time.monotonic() + _WALL_SECONDS)
            if answer[0] == _OPEN:
                _note_open(answer[1:].decode("utf-8", "replace"))
                answer = _received(process, time.monotonic() + _WALL_SECONDS)
        except (EOFError, BrokenPipeError):
            status = process.wait()
            if status == -signal.SIGPROF:
                raise LimitError("takes more CPU time than its length justifies") from None
            assert process.stderr is not None
            said = os.read(process.stderr.fileno(), 1 << 16).decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise LimitError(f"ended its process (status {status}{said and f': {said:.200}'})") from None
        return answer[0], answer[1:]


def _filter() -> bytes | None:
    """Return the filter of this machine's system calls; ``None`` where there is none."""
    if sys.platform == "linux" and platform.machine() in MACHINES:
        return build_filter(platform.machine(), own_limits=True)
    _note_open(f"turnwise knows no system calls of {sys.platform} on {platform.machine()}")
    return None


@functools.cache
def _note_open(reason: str) -> None:
    """Say once that no filter holds a job that finds a hole in its interpreter."""
    _log.warning("chat templates and grammars run with limits, but without a filter of system calls: %s", reason)


def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    left = memoryview(_LENGTH.pack(len(content)) + content)
    while left:
        left = left[process.stdin.write(left) :]


def _received(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    content, missing = bytearray(), _LENGTH.size
    while len(content) < missing:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise LimitError(f"wrote nothing in {_WALL_SECONDS:g} s")
        if not (chunk := os.read(process.stdout.fileno(), min(missing - len(content), 1 << 20))):
            raise EOFError
        content += chunk
        if missing == _LENGTH.size and len(content) >= missing:
            missing += _LENGTH.unpack_from(content)[0]
    return bytes(content[_LENGTH.size :])


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            assert stream is not None
            stream.close()


_all: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for process in _all:
        process.forget()


def _stop_all() -> None:
    for process in _all:
        process.stop()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_stop_all)
