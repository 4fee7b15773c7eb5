"""The addresses of a run's workers, the connection to each, and the groups of episodes that it plays."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

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
    JobResult,
    Setup,
)
from turnwise.workers.snapshots import StoreSnapshot
from turnwise.workers.wire import Channel, KeyRefused, connect

LOOK_SECONDS = 0.2
"""Seconds between two checks of the members and of the engines' labels."""

SETUP_SECONDS = 120.0
"""The most seconds that a worker may take to build its arena."""


@dataclass(slots=True, eq=False)
class EpisodeBatch:
    """The episodes of one call of ``generate_rollouts``: their limits, and how many run now."""

    most_episodes: float
    """Most episodes at once, over all workers."""
    most_workers: int
    stores: StoreSnapshot
    running: int = 0


@dataclass(slots=True, eq=False)
class EpisodeGroup:
    """The episodes of one question."""

    batch: EpisodeBatch
    number: int
    home: int
    """Index among the groups of its batch."""
    indices: list[int]
    """Indices of its episodes in the batch's requests."""
    job: bytes
    first: str
    """Id of its first episode, for messages."""
    outcome: Future[JobResult] = field(default_factory=Future)
    link: Link | None = None
    sent_as: int = -1
    """Number of the latest message with this group. Answers to earlier ones don't count."""
    deaths: list[str] = field(default_factory=list)

    @property
    def lane(self) -> int:
        """Index of its worker, modulo the number of workers that are there."""
        return self.home % self.batch.most_workers

    @property
    def is_suspect(self) -> bool:
        return len(self.deaths) > 1


class Owner(Protocol):
    """The workers that a link belongs to."""

    key: str
    setup: Setup
    dead_after: float

    def engines(self) -> Engines:
        """Return the present engines."""
        ...

    def dispatch(self) -> None:
        """Send waiting groups, because a worker is ready."""
        ...

    def answered(self, link: Link, number: int) -> EpisodeGroup | None:
        """Return the group of message ``number``, which is done; ``None`` if it was released before."""
        ...

    def lost(self, link: Link) -> None:
        """Give the groups of ``link`` to other workers."""
        ...


class Link:
    """The connection to one worker. It reconnects when the connection ends."""

    def __init__(self, workers: Owner, name: str, address: str) -> None:
        self.workers, self.name, self.address = workers, name, address
        self.ready = self.refused = False
        self.error = "it has not answered yet"
        self.engines: Engines | None = None
        self.groups: dict[int, EpisodeGroup] = {}
        self.running = 0
        """Number of its episodes."""
        self._snapshots: set[int] = set()
        self._latest: StoreSnapshot | None = None
        """The snapshot that it got last."""
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
        self._snapshots, self._latest = set(), None
        await self._channel.send(SETUP, replace(workers.setup, engines=self.engines))
        async with asyncio.timeout(SETUP_SECONDS):
            kind, *content = await self._channel.receive()
        if kind == REFUSED:
            raise _Refused(content[0])
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
        """End the connection. Its groups go to other workers."""
        self.ready = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.workers.lost(self)

    # -- groups --------------------------------------------------------------------------------------------------------
    def take(self, group: EpisodeGroup, number: int) -> None:
        group.link, group.sent_as = self, number
        group.batch.running += len(group.indices)
        self.running += len(group.indices)
        self.groups[number] = group

    def release(self, group: EpisodeGroup) -> None:
        del self.groups[group.sent_as]
        group.link = None
        group.batch.running -= len(group.indices)
        self.running -= len(group.indices)

    async def send_group(self, group: EpisodeGroup, engines: Engines) -> None:
        """Send a group, after the engines' present labels and the stores of its batch."""
        stores = group.batch.stores
        async with self._lock:
            if self.engines != engines:
                self.engines = engines
                await self._send(ENGINES, engines)
            if stores.number not in self._snapshots:
                self._snapshots.add(stores.number)
                before, self._latest = self._latest, stores
                await self._send(STORES, stores.number, stores.since(before))
            if self.groups.get(group.sent_as) is group:
                await self._send(PLAY, group.sent_as, stores.number, group.job)

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
            with suppress(ConnectionError):  # the receiving side raises it, too
                await self._channel.send(*message)


class _Refused(Exception):
    """The worker refused the setup."""


def fail(group: EpisodeGroup, error: BaseException) -> None:
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


Members = Callable[[], Mapping[str, str]]
"""Returns the workers' present addresses by name: ``{"worker-0": "10.0.0.2:40001"}``."""


def fixed_members(addresses: Sequence[str]) -> Members:
    """Return workers at fixed ``addresses``. Raises ``ValueError`` for one that is not ``host:port``."""
    for address in addresses:
        parse_address(address)
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"addresses={list(addresses)!r}: expected each worker once")
    named = {f"worker-{index}": address for index, address in enumerate(addresses)}
    return lambda: named


class WatchedMembers:
    """The workers in the file at ``path``, which is replaced as a whole when one joins, leaves or restarts.

    The file is JSON, ``{"workers": {"worker-0": "10.0.0.2:40001"}}``; other keys are ignored. Until it exists, there
    are no workers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._workers: dict[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        try:
            workers = json.loads(self.path.read_text(encoding="utf-8")).get("workers", {})
            addresses = {str(name): str(address) for name, address in workers.items()}
            for address in addresses.values():
                parse_address(address)
            self._workers = addresses
        except FileNotFoundError:
            self._workers = {}
        except (OSError, ValueError, AttributeError):  # a shared folder may show a file before its content
            pass
        return self._workers


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[IPv6]:port``. Raises ``ValueError``."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\s\[\]]+)):(\d+)", address)
    if match is None or not 0 < int(match[3]) < 2**16:
        raise ValueError(f"address={address!r}: expected host:port, such as '10.0.0.2:40001'")
    return match[1] or match[2], int(match[3])


def by_number(name: str) -> tuple[str, int, str]:
    """Sort key of names: ``worker-2`` comes before ``worker-10``."""
    number = re.search(r"(\d+)$", name)
    return (name[: number.start()], int(number[0]), name) if number else (name, -1, name)
