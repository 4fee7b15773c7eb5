"""A small HTTP server that does what a test says, wrong things among them."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Act:
    """What to do with one request; :meth:`play` gets the handler of the connection."""

    def play(self, handler: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError


class Say(Act):
    """Answer with ``status`` and ``body``: text as it is, all else as JSON."""

    def __init__(self, body: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.status, self.headers = status, headers or {}
        self.content = (body if isinstance(body, str) else json.dumps(body)).encode()

    def play(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(self.status)
        for name, value in {"Content-Length": str(len(self.content)), **self.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(self.content)


class Reset(Act):
    """Say half of an answer, if ``midway``, and reset the connection."""

    def __init__(self, midway: bool = True) -> None:
        self.midway = midway

    def play(self, handler: BaseHTTPRequestHandler) -> None:
        if self.midway:
            handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": [')
            handler.wfile.flush()
            time.sleep(0.02)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()
        handler.close_connection = True


class Hang(Act):
    """Say nothing for a long time."""

    def play(self, handler: BaseHTTPRequestHandler) -> None:
        time.sleep(3)
        handler.close_connection = True


Script = dict[str, Act | list[Act] | Callable[[dict[str, Any]], Act]]
"""By path: the same act each time, one after the other with the last again and again, or one made of the body."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of the default 5, further connections wait for seconds


class FakeServer:
    """``url`` and what was ``asked``: path and decoded body of each request, in order."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script, self.asked = script, []  # type: ignore[var-annotated]
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def finish(self) -> None:
                with suppress(OSError, ValueError):  # it was reset on purpose
                    super().finish()

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                fake.act(self.path.partition("?")[0], body, dict(self.headers)).play(self)

            do_GET = do_POST = answer

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def act(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Act:
        with self._lock:
            self.asked.append((path, body))
            self.headers.append(headers)
            act = self.script.get(path, Say({"detail": "Not Found"}, 404))
            if isinstance(act, list):
                act = act.pop(0) if len(act) > 1 else act[0]
        return act if isinstance(act, Act) else act(body)

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def faking(script: Script) -> Iterator[FakeServer]:
    server = FakeServer(script)
    try:
        yield server
    finally:
        server.close()
