"""Start a vLLM server that turnwise's clients can sample from and send weights to, and keep it running.

:class:`ModelServer` starts one server, waits until it is healthy, restarts it when it dies or hangs, and stops only the
processes that it started. :func:`serving` runs one inside an ``async with`` block.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from turnwise.inference.common.http import Endpoint, key_file, key_from_environment, read_key, write_key
from turnwise.inference.server.settings import ServeSettings, server_command
from turnwise.utils.processes import end_group, has_ended, how_it_ended
from turnwise.utils.threads import to_thread

SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens the endpoints that pause, load weights and resume
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

STABLE_SECONDS = 60.0
"""Seconds from its start after which a crash counts as the first one again."""

HUNG = 120.0
"""Seconds without an answer to ``/health`` after which a server counts as hung."""

PROBED = (5.0, 10.0)
"""Seconds between two requests to ``/health``, and seconds that the answer may take."""

LOG_LINES = 40
"""Lines of the server's log in its error."""


class ServerFailed(RuntimeError):
    """Raised if the server did not start or died too often. The message ends with the last lines of its log."""


class ModelServer:
    """One server and the thread that watches it. ``say`` gets a line per event, ``log`` each line of the server's log.

    ``with ModelServer(settings) as server`` serves at ``server.url`` until the end of the block. A server that dies or
    hangs is restarted at the same address, with its initial weights and its key. Clients send their weights again.

    If ``settings`` name no key, the server makes one and keeps it in ``key_file`` while it serves. Every
    :class:`~turnwise.inference.common.http.Endpoint` of this user on this host finds it there. ``failure`` says why the
    server did not start, or died too often.
    """

    def __init__(
        self,
        settings: ServeSettings,
        say: Callable[[str], None] = lambda line: None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.settings, self._say, self._log = settings, say, log
        self._place = _reserved(settings)
        self.port = self._place.getsockname()[1]
        self._leave = weakref.finalize(self, self._place.close)
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(settings.host, settings.host)
        self.url = f"http://{host}:{self.port}"
        self.key_file = key_file(self.url) if settings.api_key_env is None else None
        self._key = (
            secrets.token_urlsafe(32) if settings.api_key_env is None else key_from_environment(settings.api_key_env)
        )
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._stopping = threading.Event()
        self._ready, self._over = threading.Event(), threading.Event()
        self.failure = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the server, and return when it is healthy. Raises :class:`ServerFailed` if it never is."""
        if self._thread is not None:
            raise RuntimeError("the server was started before: make a new ModelServer")
        if self.key_file is not None:
            write_key(self.key_file, self._key)
        self._thread = threading.Thread(target=self._watch, name="turnwise-serve", daemon=True)
        self._thread.start()
        try:
            while not self._ready.wait(0.1) and not self._over.is_set():
                pass
        except BaseException:
            self.stop()
            raise
        if not self._ready.is_set():
            self._forget_key()
            raise ServerFailed(self.failure)

    def stop(self, wait: bool = True) -> None:
        """End the server and all its processes, at once or, without ``wait``, soon. May be called again."""
        self._stopping.set()
        if wait and self._thread is not None:
            self._thread.join()
            self._forget_key()

    def endpoint(self, **settings: Any) -> Endpoint:
        """Make an endpoint for a client, with the server's key. ``settings`` are arguments of :class:`Endpoint`."""
        return Endpoint(self.url, api_key=self._key, **settings)

    def _forget_key(self) -> None:
        """Delete the key file, unless a later server at the same address wrote it."""
        if self.key_file is not None and read_key(self.key_file) == self._key:
            self.key_file.unlink(missing_ok=True)

    def wait(self) -> None:
        """Return when the server is stopped. Raises :class:`ServerFailed` when it has died too often."""
        while not self._over.wait(0.5):
            pass
        if self.failure:
            raise ServerFailed(self.failure)

    @property
    def pid(self) -> int | None:
        """The id of the serving process, which leads its own group; ``None`` while there is none."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> ModelServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # -- the thread ----------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        try:
            failures = 0
            while True:
                # Serve until the process ends. A failure before the first healthy answer is final; others restart it.
                began = time.monotonic()
                problem = self._serve_once()
                if self._stopping.is_set():
                    return
                if not self._ready.is_set():
                    self.failure = self._with_log(
                        f"the server of {self.settings.model} {problem} before it was healthy"
                    )
                    return
                failures = 1 if time.monotonic() - began > STABLE_SECONDS else failures + 1
                if failures > self.settings.restarts:
                    self.failure = self._with_log(f"the server {problem}, {failures} times in a row")
                    return
                pause = min(2.0 ** (failures - 1), 30.0)
                self._say(f"the server {problem}; starting it again in {pause:g} s ({failures}. time in a row)")
                self._stopping.wait(pause)
                self.restarts += 1
        except Exception as error:
            self.failure = f"the server could not be watched: {error!r}"
            raise
        finally:
            self._leave()
            self._over.set()

    def _serve_once(self) -> str:
        """Start one process, watch it until it ends, and return the reason as part of a sentence."""
        process = self._process = subprocess.Popen(
            server_command(self.settings, self.port),
            stdin=subprocess.PIPE,  # stays open; the server ends when it closes, in whatever way this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(self.settings, self._key),
            start_new_session=True,  # its own process group, so that all its processes can be stopped together
        )
        reader = threading.Thread(target=self._read_log, args=(process,), daemon=True)
        reader.start()
        try:
            problem = self._until_healthy(process)
            if problem is None:
                self._say(f"serving {self.settings.model} at {self.url}")
                self._ready.set()
                problem = self._until_unhealthy(process)
        finally:
            end_group(process, patience=15.0 if self._stopping.is_set() else 0.0)
            reader.join(timeout=5)
            self._process = None
        return problem

    def _until_healthy(self, process: subprocess.Popen[bytes]) -> str | None:
        self._say(f"waiting for {self.settings.model} at {self.url}: loading takes seconds to minutes")
        deadline = time.monotonic() + self.settings.start_timeout
        while not self._stopping.wait(0.2):
            if has_ended(process):
                return how_it_ended(process)
            if is_healthy(self.url, 2.0):
                return None
            if time.monotonic() > deadline:
                return f"took longer than start_timeout={self.settings.start_timeout:g} s"
        return "was stopped"

    def _until_unhealthy(self, process: subprocess.Popen[bytes]) -> str:
        seen = asked = time.monotonic()
        while not self._stopping.wait(0.2):
            if has_ended(process):
                return how_it_ended(process)
            if time.monotonic() - asked < PROBED[0]:
                continue
            if is_healthy(self.url, PROBED[1]):
                seen = time.monotonic()
            elif time.monotonic() - seen > HUNG:
                return f"did not answer for {HUNG:g} s"
            asked = time.monotonic()
        return "was stopped"

    def _read_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                self._log(text)

    def _with_log(self, message: str) -> str:
        return "\n".join([f"{message}; the last lines of its log:", *self._lines])


@asynccontextmanager
async def serving(model: str | Path, **settings: Any) -> AsyncIterator[ModelServer]:
    """Serve ``model`` (a folder or hub name) until the end of the block.

    ``settings`` are those of :class:`ServeSettings`, except that ``port`` is a free one unless given. A client uses
    ``server.endpoint()``, which has the key.

    Example: ``async with serving("Qwen/Qwen3-0.6B", kv_cache_gb=4) as server: print(server.url)``
    """
    server = ModelServer(ServeSettings(**{"port": 0, **settings, "model": str(model)}))
    starting = asyncio.create_task(to_thread(server.start))
    try:
        await asyncio.shield(starting)
        yield server
    finally:
        await to_thread(server.stop)
        with suppress(ServerFailed):
            await starting


def _environment(settings: ServeSettings, key: str) -> dict[str, str]:
    from turnwise.inference.server.launch import HOSTS, KEY, STARTER

    names = (*settings.allowed_hosts, settings.host, socket.gethostname(), socket.gethostname().partition(".")[0])
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        KEY: key,  # every user of the machine could read an argument
        HOSTS: ",".join(names),
        STARTER: str(os.getpid()),
    }
    return {**os.environ, **SERVER_ENVIRONMENT, **variables}


def _reserved(settings: ServeSettings) -> socket.socket:
    """Bind the port, and keep it for the server, which binds it again seconds later and after each restart.

    Another user could else take the port in between, and would get the key. The socket doesn't listen, so that all
    connections reach the server. Raises ``OSError`` if the port is in use, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    port = settings.port
    try:
        for keeps in (False, True):  # the first fails if another server of this user listens there
            place = socket.socket(family, socket.SOCK_STREAM)
            try:
                place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if keeps and hasattr(socket, "SO_REUSEPORT"):
                    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for processes of this user alone
                place.bind((settings.host, port))
                port = place.getsockname()[1]
                if keeps:
                    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # no one else may listen there
                    return place
            except BaseException:
                place.close()
                raise
            place.close()
    except OSError as error:
        raise OSError(f"host={settings.host!r}, port={settings.port}: can't serve there: {error}") from error
    raise AssertionError("not reached")


def is_healthy(url: str, timeout: float) -> bool:
    """True if the server at ``url`` answers within ``timeout`` seconds that it is healthy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=timeout) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False
