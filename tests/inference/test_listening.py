"""Listeners for strangers: how many they take, who gives way, and what they do without file descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import sys

import pytest

from turnwise.inference.common import listening
from turnwise.inference.common.listening import Listener, is_known_host, tcp_sockets, unix_socket

KEY = b"key\n"


class Echo:
    """A server of streams: a line that is the key proves the client; each line is sent back."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.came = 0

    def protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self.serve)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came += 1
        try:
            while line := await reader.readline():
                if line == KEY:
                    assert self.listener is not None
                    self.listener.prove(writer.transport)
                writer.write(line)
        except ConnectionError:
            pass
        finally:
            writer.close()


async def started(most: int, sockets=None) -> tuple[Echo, int]:
    echo = Echo()
    sockets = await tcp_sockets("127.0.0.1", 0) if sockets is None else sockets
    echo.listener = Listener(sockets, echo.protocol, most)
    return echo, sockets[0].getsockname()[1]


async def says(client, line: bytes = KEY) -> bytes:
    reader, writer = client
    writer.write(line)
    return await reader.readline()


async def test_strangers_give_way_and_who_has_the_key_stays():
    echo, port = await started(4)
    honest = await asyncio.open_connection("127.0.0.1", port)
    assert await says(honest) == KEY
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
    late = await asyncio.open_connection("127.0.0.1", port)
    assert await says(late) == KEY and await says(honest, b"x\n") == b"x\n"
    assert len(echo.listener.connections) <= 4
    for _, writer in (*strangers, honest, late):
        writer.close()
    await echo.listener.close()


async def test_further_clients_wait_while_all_places_are_taken(caplog):
    listening._warned.clear()
    echo, port = await started(2)
    taken = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    assert [await says(client) for client in taken] == [KEY, KEY]
    waiting = await asyncio.open_connection("127.0.0.1", port)  # in the kernel's queue
    answer = asyncio.ensure_future(says(waiting))
    await asyncio.sleep(3 * listening.PAUSE)
    assert not answer.done() and echo.came == 2
    taken[0][1].close()
    assert await answer == KEY
    assert [record.levelname for record in caplog.records if record.name == listening.__name__] == ["WARNING"]
    for _, writer in (*taken, waiting):
        writer.close()
    await echo.listener.close()


async def test_no_file_descriptor_left_is_one_warning_and_no_end(monkeypatch, caplog):
    listening._warned.clear()
    monkeypatch.setattr(listening, "PAUSE", 0.001)
    loop, failed = asyncio.get_running_loop(), []
    accept = loop.sock_accept

    async def full(sock):
        if len(failed) < 50:
            failed.append(sock)
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", full)
    echo, port = await started(4)
    client = await asyncio.open_connection("127.0.0.1", port)
    assert await says(client) == KEY and len(failed) == 50
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no file descriptor is left" in record.getMessage()
    client[1].close()
    await echo.listener.close()


async def test_all_listeners_together_have_a_part_of_the_descriptors(monkeypatch):
    monkeypatch.setattr(listening, "_budget", lambda: 3)
    (first, port), (second, other) = await started(100), await started(100)
    clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    assert [await says(client) for client in clients] == [KEY] * 3
    waiting = await asyncio.open_connection("127.0.0.1", other)
    answer = asyncio.ensure_future(says(waiting))
    await asyncio.sleep(2 * listening.PAUSE)
    assert second.came == 0
    clients[0][1].close()
    assert await answer == KEY
    for _, writer in (*clients, waiting):
        writer.close()
    for echo in (first, second):
        await echo.listener.close()


async def test_a_stranger_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(listening, "PROVE_SECONDS", 0.01)
    echo, port = await started(4)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(ConnectionError):
        assert await reader.read(1) == b""
        raise ConnectionError
    writer.close()
    await echo.listener.close()


async def test_a_client_that_takes_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(listening, "STALL_SECONDS", 0.02)
    lost = asyncio.Event()

    class Endless(asyncio.Protocol):
        def connection_made(self, transport):
            listener.prove(transport)
            transport.write(bytes(2**26))

        def connection_lost(self, error):
            lost.set()

    sockets = await tcp_sockets("127.0.0.1", 0)
    listener = Listener(sockets, Endless, 4)
    _reader, writer = await asyncio.open_connection(*sockets[0].getsockname(), limit=1)
    await asyncio.wait_for(lost.wait(), 20)
    assert not listener.connections
    writer.close()
    await listener.close()


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *[(host, True) for host in ("127.0.0.1", "10.1.2.3:80", "[::1]:9", "gpu1:80", "GPU1.", "gpu1:")],
        *[(host, False) for host in ("evil.example", "a:b:c", "[", "gpu1:x", "127.0.0.1@evil.example", "\xff", "")],
    ],
)
def test_hosts(host, known):
    header = (b"Host", host.encode("latin-1"))
    assert is_known_host([header, (b"X", b"gpu1")], {"gpu1"}) is known
    assert not is_known_host([header, header], {"gpu1"}) and not is_known_host([], {"gpu1"})


@pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets")
async def test_unix_sockets_and_taken_ports(tmp_path):
    echo, _ = await started(4, [unix_socket(str(tmp_path / "s"))])
    client = await asyncio.open_unix_connection(str(tmp_path / "s"))
    assert await says(client) == KEY
    client[1].close()
    await echo.listener.close()
    [taken] = await tcp_sockets("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        await tcp_sockets("127.0.0.1", taken.getsockname()[1])
    taken.close()
