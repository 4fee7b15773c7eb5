"""Connections between processes that share a key."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from turnwise.workers import wire
from turnwise.workers.listen import MAX_CONNECTIONS, MAX_REFUSALS, Listener
from turnwise.workers.wire import Channel, KeyRefused, accept, connect


class Bomb:
    """Fails the test where it is unpickled."""

    gone_off = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "gone_off", True))


@asynccontextmanager
async def listening(key: str) -> AsyncIterator[tuple[int, asyncio.Queue[Any]]]:
    """A port at which a peer with ``key`` accepts, and what it makes of connections: channels and errors."""
    made: asyncio.Queue[Any] = asyncio.Queue()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            made.put_nowait(await accept(reader, writer, key))
        except Exception as error:
            made.put_nowait(error)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], made


async def test_messages_arrive_in_order_both_ways() -> None:
    async with listening("k") as (port, made):
        one = await connect("127.0.0.1", port, "k")
        other: Channel = await made.get()
        sent = [("a", 1, b"x" * 3_000_000), ("b",), ("c", {"d": [1.5]})]
        for message in sent:
            await asyncio.gather(one.send(*message), other.send(*message))
            assert await other.receive() == await one.receive() == message
        one.close()
        with pytest.raises(ConnectionError, match="closed"):
            await other.receive()
        other.close()


async def test_another_key_is_refused_on_both_sides() -> None:
    async with listening("k") as (port, made):
        with pytest.raises(KeyRefused, match="refuses this run's key"):
            await connect("127.0.0.1", port, "other")
        assert isinstance(await made.get(), KeyRefused)


async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept everybody, and answer with what they sent."""
    writer.write(wire.HELLO + bytes(wire.NONCE))
    proof = await reader.readexactly(2 * wire.NONCE)
    writer.write(proof[wire.NONCE :])
    writer.close()  # the server waits for it, from Python 3.12.1 on


async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


@pytest.mark.parametrize(
    ("listener", "error", "message"),
    [(impostor, KeyRefused, "does not have this run's key"), (web_server, ConnectionError, "no turnwise worker")],
)
async def test_a_listener_without_the_key_is_refused(listener: Any, error: Any, message: str) -> None:
    async with await asyncio.start_server(listener, "127.0.0.1", 0) as server:
        with pytest.raises(error, match=message):
            await connect("127.0.0.1", server.sockets[0].getsockname()[1], "k")


ATTACKS = ["before the handshake", "after it", "of the other direction", "repeated", "of another length"]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_message_without_the_signature_is_never_unpickled(attack: str) -> None:
    Bomb.gone_off = False
    async with listening("k") as (port, made):
        if attack == "before the handshake":
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(pickle.dumps(Bomb()) * 4)
            assert isinstance(await made.get(), KeyRefused)
            writer.close()
        else:
            one = await connect("127.0.0.1", port, "k")
            other: Channel = await made.get()
            payload = pickle.dumps((Bomb(),))
            if attack == "after it":
                signatures = [bytes(32)] * 2
            else:
                direction = b"accepts" if attack == "of the other direction" else b"connects"
                signatures = one._signatures(direction, 0, len(payload), payload)
            if attack == "repeated":
                await one.send("first")
                assert await other.receive() == ("first",)
            length = 2**62 if attack == "of another length" else len(payload)  # more than the other side may wait for
            one._writer.write(wire._HEADER.pack(length, *signatures) + payload)
            with pytest.raises(ConnectionError, match="signature"):
                await other.receive()
            one.close()
            other.close()
    assert not Bomb.gone_off


async def test_idle_strangers_take_no_place_from_the_loop_and_are_shown_a_few_times() -> None:
    said: list[str] = []
    run: Any = None
    listener = Listener(run, "127.0.0.1", 0, "a key", announce=said.append, say=said.append)
    host, _, port = (await listener._listen()).rpartition(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(3 * MAX_CONNECTIONS)]
    channel = await connect(host, int(port), "a key")
    channel.close()
    await listener._listener.close()
    for _, writer in idle:
        writer.close()
    assert 0 < len(said) <= MAX_REFUSALS and all("refused a connection" in line for line in said)
