"""The connection to one worker, and the groups of episodes that it plays."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.workers.members import parse_address
from turnwise.workers.messages import (
    ALIVE,
    ENGINES,
    FAILED,
    PLAY,
    PLAYED,
    READY,
    REFUSED,
    SETUP,
    STORES,
    Engines,
    Outcome,
    Setup,
)
from turnwise.workers.wire import Channel, KeyRefused, connect

LOOK_SECONDS = 0.2
"""Seconds between two looks at the members and at the labels of the engines."""

SETUP_SECONDS = 120.0
"""The most seconds that a worker may take to build its arena."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of ``generate_rollouts``: its limits, and the episodes that run now."""

    most_episodes: float
    """Most episodes at once, over all workers."""
    most_workers: int
    stores: tuple[int, bytes]
    """Number and content of the snapshot of the stores."""
    running: int = 0


@dataclass(slots=True, eq=False)
class Group:
    """The episodes of one question; ``places`` are their indices in the call's requests."""

    call: Call
    number: int
    home: int
    places: list[int]
    job: bytes
    first: str
    """Id of the first episode, for messages."""
    outcome: Future[Outcome] = field(default_factory=Future)
    link: Link | None = None
    sent_as: int = -1
    """Number of the latest message with this group. Answers to earlier ones don't count."""
    deaths: list[str] = field(default_factory=list)

    @property
    def is_suspect(self) -> bool:
        return len(self.deaths) > 1


class Owner(Protocol):
    """What a link needs of the workers that it belongs to."""

    key: str
    setup: Setup
    dead_after: float

    def engines(self) -> Engines:
        """Return the present engines."""
        ...

    def dispatch(self) -> None:
        """Send waiting groups, as this worker is ready."""
        ...

    def answered(self, link: Link, number: int) -> Group | None:
        """Return the group of message ``number``, which is done; ``None`` if it was taken away meanwhile."""
        ...

    def lost(self, link: Link) -> None:
        """Give the groups of ``link`` to others."""
        ...


class Link:
    """The connection to one worker, which is made again when it ends."""

    def __init__(self, workers: Owner, name: str, address: str) -> None:
        self.workers, self.name, self.address = workers, name, address
        self.ready = self.refused = False
        self.error = "it has not answered yet"
        self.engines: Engines | None = None
        self.groups: dict[int, Group] = {}
        self.running = 0
        """Episodes that it has."""
        self._snapshots: set[int] = set()
        self._channel: Channel | None = None
        self._lock = asyncio.Lock()
        self._task = asyncio.ensure_future(self._run())

    def end(self, reason: str) -> None:
        self.error = reason
        self._task.cancel()
        self._drop()

    async def _run(self) -> None:
        pause = LOOK_SECONDS
        while True:
            try:
                await self._connect()
                pause = LOOK_SECONDS
                await self._receive()
            except (OSError, EOFError, TimeoutError) as error:
                self.error = str(error) or f"it gave no sign of life for {self.workers.dead_after:g} seconds"
                self.refused = isinstance(error, KeyRefused)
            except _Refused as error:
                self.error, self.refused = str(error), True
            except Exception as error:  # such as a message that does not unpickle here
                self.error = f"{type(error).__name__}: {error}"
            self._drop()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def _connect(self) -> None:
        workers = self.workers
        self._channel = await connect(*parse_address(self.address), workers.key)
        self.engines = workers.engines()
        self._snapshots = set()
        setup = Setup(**{**_fields(workers.setup), "engines": self.engines})
        await self._channel.send(SETUP, setup)
        async with asyncio.timeout(SETUP_SECONDS):
            kind, *told = await self._channel.receive()
        if kind == REFUSED:
            raise _Refused(told[0])
        if kind != READY:
            raise ConnectionError(f"it answered {kind!r} to the setup")
        self.ready, self.refused = True, False
        workers.dispatch()

    async def _receive(self) -> None:
        assert self._channel is not None
        while True:
            async with asyncio.timeout(self.workers.dead_after):
                kind, *content = await self._channel.receive()
            if kind == ALIVE:
                continue
            group = self.workers.answered(self, content[0])
            if group is None or group.outcome.done():
                continue
            if kind == PLAYED:
                with suppress(InvalidStateError):  # its call was cancelled just now
                    group.outcome.set_result(content[1])
            elif kind == FAILED:
                fail(group, _error(self.name, *content[1:]))

    def _drop(self) -> None:
        """End the connection. What it had goes to others."""
        self.ready = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.workers.lost(self)

    # -- groups --------------------------------------------------------------------------------------------------------
    def take(self, group: Group, number: int) -> None:
        group.link, group.sent_as = self, number
        group.call.running += len(group.places)
        self.running += len(group.places)
        self.groups[number] = group

    def release(self, group: Group) -> None:
        del self.groups[group.sent_as]
        group.link = None
        group.call.running -= len(group.places)
        self.running -= len(group.places)

    async def send_group(self, group: Group, engines: Engines) -> None:
        """Send a group, after what it needs: the engines' present labels, and the stores of its batch."""
        number, content = group.call.stores
        async with self._lock:
            if self.engines != engines:
                self.engines = engines
                await self._send(ENGINES, engines)
            if number not in self._snapshots:
                self._snapshots.add(number)
                await self._send(STORES, number, content)
            if self.groups.get(group.sent_as) is group:
                await self._send(PLAY, group.sent_as, number, group.job)

    async def send_engines(self, engines: Engines) -> None:
        async with self._lock:
            if self.engines != engines:
                self.engines = engines
                await self._send(ENGINES, engines)

    async def send(self, *message: Any) -> None:
        async with self._lock:
            await self._send(*message)

    async def _send(self, *message: Any) -> None:
        if self._channel is not None:
            with suppress(ConnectionError):  # the receiving side notices it too
                await self._channel.send(*message)


class _Refused(Exception):
    """The worker refused the setup."""


def _fields(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in Setup.__dataclass_fields__}


def fail(group: Group, error: BaseException) -> None:
    with suppress(InvalidStateError):  # its call has ended
        group.outcome.set_exception(error)


def _error(worker: str, content: bytes | None, text: str) -> Exception:
    """Return the exception that a worker sent, with a note of its name."""
    try:
        error: Exception = RuntimeError(text) if content is None else pickle.loads(content)
    except Exception:
        error = RuntimeError(text)
    error.add_note(f"raised in {worker}")
    return error
