"""Listens for connections of strangers: a bounded number, of which those without a key give way, and with patience.

asyncio's own servers accept whatever comes, and print a traceback for each connection once the process has no file
descriptor left. This one leaves clients waiting in the kernel, and says once that it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Container, Iterable
from typing import Any

log = logging.getLogger(__name__)

MOST = 256
"""Connections of one listener."""
SHARE = 2
"""All listeners of a process together have half of the files that it may open."""
PROVE_SECONDS = 30.0
"""Seconds until a connection must have shown a key."""
STALL_SECONDS, LEAST_TAKEN = 120.0, 2**14
"""Seconds in which a client must take that many bytes, while more wait for it."""
PAUSE = 0.1
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_open: set[_Connection] = set()
_warned: set[str] = set()


class _Connection(asyncio.Protocol):
    """Passes all on to the protocol of the server, and tells the listener when the connection ends."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.inner = listener, listener.factory()
        self.transport: Any = None
        self.proved = False
        self.timer: asyncio.TimerHandle | None = None
        self.stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.timer = asyncio.get_running_loop().call_later(PROVE_SECONDS, self.give_way)
        self.listener.by_transport[transport] = self
        self.inner.connection_made(transport)

    def give_way(self) -> None:
        """Close the connection unless its client has shown a key."""
        if not self.proved and self.transport is not None:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.left()
        self.inner.connection_lost(error)

    def left(self) -> None:
        for timer in (self.timer, self.stall):
            if timer is not None:
                timer.cancel()
        _open.discard(self)
        self.listener.connections.pop(self, None)
        self.listener.by_transport.pop(self.transport, None)
        self.listener.changed.set()

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self._watch(self.transport.get_write_buffer_size())
        self.inner.pause_writing()

    def _watch(self, waiting: int) -> None:
        self.stall = asyncio.get_running_loop().call_later(STALL_SECONDS, self._check_stall, waiting)

    def _check_stall(self, before: int) -> None:
        """Close the connection if its client has hardly taken anything."""
        waiting = self.transport.get_write_buffer_size()
        if waiting > before - LEAST_TAKEN:
            self.transport.abort()
        else:
            self._watch(waiting)

    def resume_writing(self) -> None:
        if self.stall is not None:
            self.stall.cancel()
        self.inner.resume_writing()


class Listener:
    """Accepts clients of ``sockets``, at most ``most`` at once, each with a protocol of ``factory``.

    When another comes, the oldest without a key is closed; if all have one, further clients wait. A server calls
    :meth:`prove` once a client has shown its key. Raises nothing for a lack of file descriptors: clients wait.

    Example::

        listener = Listener(await tcp_sockets("127.0.0.1", 0), runner.server)
        ...
        await listener.close()
    """

    def __init__(self, sockets: list[socket.socket], factory: Callable[[], Any], most: int = MOST) -> None:
        self.sockets, self.factory, self.most = sockets, factory, most
        self.connections: dict[_Connection, None] = {}
        """In the order of arrival."""
        self.by_transport: dict[Any, _Connection] = {}
        self.changed = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._accept(one)) for one in sockets]

    def prove(self, transport: Any) -> None:
        """Note that the client of ``transport`` has shown a key."""
        connection = self.by_transport.get(transport)
        if connection is not None:
            connection.proved = True

    async def close(self) -> None:
        """Take no more clients, and close those that have shown no key."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for one in self.sockets:
            one.close()
        for connection in list(self.connections):
            connection.give_way()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in FULL:
                    _warn_once("files", "no file descriptor is left for another connection, so clients wait: %s", error)
                    self._make_room()
                await asyncio.sleep(PAUSE)
                continue
            try:
                await self._has_room()
                connection = _Connection(self)
                self.connections[connection] = None
                _open.add(connection)
            except BaseException:
                client.close()
                raise
            try:
                await loop.connect_accepted_socket(lambda made=connection: made, client)  # type: ignore[misc]
            except OSError:
                connection.left()
                client.close()

    async def _has_room(self) -> None:
        while len(self.connections) >= self.most or len(_open) >= _budget():
            self.changed.clear()
            if not self._make_room():
                text = "%d connections are open, as many as may be, so further clients wait"
                _warn_once("most", text, len(self.connections))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await self.changed.wait()

    def _make_room(self) -> bool:
        """Close the oldest connection without a key. Return False if there is none."""
        stranger = next((one for one in self.connections if not one.proved and one.transport is not None), None)
        if stranger is not None:
            stranger.give_way()
        return stranger is not None


def http_log(name: str) -> logging.Logger:
    """Return a logger for aiohttp's server, which says in one quiet line that a client sent no HTTP or broke off."""
    http = logging.getLogger(f"{name}.http")

    def is_ours(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # By name, as this module needs no aiohttp. The error's text may show a key.
        if not any(kind.__name__ in ("HttpProcessingError", "ConnectionError") for kind in type(error).__mro__):
            return True
        log.info("a client's connection broke, or it sent no HTTP: %s", type(error).__name__)
        return False

    http.filters[:] = [is_ours]
    return http


def is_known_host(headers: Iterable[tuple[bytes, bytes]], names: Container[str]) -> bool:
    """True if the one ``Host`` header of a request is an address, or one of ``names`` (in lower case).

    A web page can make a browser send only its own name, which may point to this machine (DNS rebinding).
    """
    given = [value for name, value in headers if name.lower() == b"host"]
    match = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?", given[0].decode("latin-1")) if len(given) == 1 else None
    if match is None:
        return False
    name = match[1].strip("[]").removesuffix(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def _budget() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1 << 20
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if files == resource.RLIM_INFINITY else max(8, files // SHARE)


def _warn_once(kind: str, text: str, *values: object) -> None:
    if kind not in _warned:
        _warned.add(kind)
        log.warning(text, *values)


async def tcp_sockets(host: str, port: int, shared: bool = False) -> list[socket.socket]:
    """Return sockets that listen on the addresses of ``host``. Raises ``OSError`` for a port that is taken.

    With ``shared``, another socket of this user may keep the port, if it lets others have it and doesn't listen.
    """
    options = {"reuse_port": shared and hasattr(socket, "SO_REUSEPORT")}
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            sockets.append(socket.create_server(address[:2], family=family, backlog=1024, **options))
            sockets[-1].setblocking(False)
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


def unix_socket(path: str) -> socket.socket:
    """Return a socket that listens at ``path``."""
    listening = socket.socket(socket.AF_UNIX)
    listening.setblocking(False)
    try:
        listening.bind(path)
        listening.listen(128)
    except BaseException:
        listening.close()
        raise
    return listening
