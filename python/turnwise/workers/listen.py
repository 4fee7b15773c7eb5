"""The worker's process: listens for the loop's process, checks it, and plays the jobs that it sends.

Connections run in a thread with its own event loop, so a worker gives signs of life while the code of an episode
computes. Episodes run in the main thread's loop.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from turnwise.arena import Arena, ArtifactStore
from turnwise.arena.rewards.group_rewards import score_groups, scored_groups
from turnwise.arena.runner import run_episode
from turnwise.arena.runtime.concurrency import FailureBudget, gather_or_cancel, run_limited
from turnwise.inference.common import listening
from turnwise.inference.common.http import LoopThread
from turnwise.types import GenerateResult
from turnwise.utils.copies import dumps
from turnwise.utils.threads import to_thread
from turnwise.workers.engines import WorkerClient
from turnwise.workers.messages import (
    ALIVE,
    CANCEL,
    ENGINES,
    FAILED,
    PLAY,
    PLAYED,
    READY,
    REFUSED,
    SETUP,
    STORES,
    Engines,
    Job,
    JobResult,
    Setup,
    StoreWrite,
)
from turnwise.workers.snapshots import SnapshotReader
from turnwise.workers.stores import BatchStore, dumps_pending
from turnwise.workers.wire import Channel, KeyRefused, accept

MAX_SNAPSHOTS = 16
"""Snapshots of stores that a worker keeps; several batches and evaluations may be under way."""

MAX_CONNECTIONS = 32
"""Connections that are open at once; those without the key give way."""
MAX_REFUSALS = 10
"""Refused connections that are shown."""


class Plays(Protocol):
    """The parts of the run that a worker needs."""

    def sub_teams(self, actors: tuple[str, ...]) -> Mapping[str, Any]:
        """Return the episodes that some of the task's actors play, by type."""
        ...

    def client(self, engines: Engines) -> WorkerClient:
        """Return the client of the run's engines."""
        ...

    def arena(self, setup: Setup, client: Any) -> Arena:
        """Return the run's arena. Raises ``ValueError`` if this process can't play what ``setup`` asks for."""
        ...


@dataclass(slots=True)
class _Connection:
    """One connection of the loop's process, after its setup."""

    channel: Channel
    arena: Arena
    client: WorkerClient
    snapshots: SnapshotReader = field(default_factory=SnapshotReader)
    stores: dict[int, Mapping[str, ArtifactStore]] = field(default_factory=dict)
    jobs: dict[int, Future[JobResult]] = field(default_factory=dict)
    answers: set[asyncio.Task[None]] = field(default_factory=set)


class Listener:
    """Listens on ``host`` and ``port`` (0: a free one) for a process that has the run's ``key``.

    A new connection replaces the earlier one, as after a restart of the loop's process.

    Example: ``await Listener(run, "127.0.0.1", 0, key, announce=print, say=print).serve()``
    """

    def __init__(
        self, run: Plays, host: str, port: int, key: str, *, announce: Callable[[str], Any], say: Callable[[str], Any]
    ) -> None:
        self._run, self._host, self._port, self._key = run, host, port, key
        self._announce, self._say = announce, say
        self._session: _Connection | None = None
        self._serving: asyncio.Task[None] | None = None
        self._refused = 0

    async def serve(self) -> None:
        """Serve until the task is cancelled. Calls ``announce`` with the address once it listens."""
        self._main = asyncio.get_running_loop()
        thread = LoopThread("turnwise-listener")
        try:
            address = await asyncio.wrap_future(thread.submit(self._listen()))
            self._announce(address)
            await asyncio.Event().wait()
        finally:
            await to_thread(thread.stop)

    async def _listen(self) -> str:
        sockets = await listening.tcp_sockets(self._host, self._port)
        self._listener = listening.Listener(sockets, self._protocol, MAX_CONNECTIONS)
        host, port = sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=2**20), self._connected)

    # -- one connection, in the listener's thread ----------------------------------------------------------------------
    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        try:
            channel = await accept(reader, writer, self._key)
        except (KeyRefused, ConnectionError, TimeoutError) as error:
            self._refused += 1
            if self._refused <= MAX_REFUSALS:
                last = "" if self._refused < MAX_REFUSALS else "; further ones are not shown"
                self._say(f"refused a connection from {peer}: {str(error) or 'it did not answer in time'}{last}")
            writer.close()
            return
        self._listener.prove(writer.transport)
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        self._serving = asyncio.ensure_future(self._serve(channel))
        with suppress(asyncio.CancelledError):
            await self._serving

    async def _serve(self, channel: Channel) -> None:
        session, alive = None, None
        try:
            [kind, setup] = await channel.receive()
            if kind != SETUP:
                raise ConnectionError(f"the first message is {kind!r}, expected {SETUP!r}")
            session = await self._set_up(channel, setup)
            if session is None:
                return
            alive = asyncio.ensure_future(_stay_alive(channel, setup.alive_every))
            while True:
                self._take(session, *await channel.receive())
        except ConnectionError as error:
            self._say(f"the run's process is gone: {error}")
        finally:
            channel.close()
            for task in [alive] if alive is not None else []:
                task.cancel()
            for job in list(session.jobs.values()) if session is not None else []:
                job.cancel()
            if session is not None:
                await session.client.close()

    async def _set_up(self, channel: Channel, setup: Setup) -> _Connection | None:
        """Build client and arena, in the main thread. If that fails, send the reason."""
        client = self._run.client(setup.engines)

        async def build() -> Arena:
            return self._run.arena(setup, client.client)

        try:
            arena = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(build(), self._main))
        except Exception as error:
            await client.close()
            await channel.send(REFUSED, f"{error}")
            self._say(f"refused the run: {error}")
            return None
        await channel.send(READY)
        return _Connection(channel, arena, client)

    def _take(self, session: _Connection, kind: str, *content: Any) -> None:
        if kind == PLAY:
            number, stores, job = content
            future = asyncio.run_coroutine_threadsafe(self._play(session, session.stores[stores], job), self._main)
            session.jobs[number] = future
            task = asyncio.ensure_future(self._answer(session, number, future))
            session.answers.add(task)
            task.add_done_callback(session.answers.discard)
        elif kind == CANCEL:
            if (running := session.jobs.get(content[0])) is not None:
                running.cancel()
        elif kind == ENGINES:
            session.client.follow(content[0])
        elif kind == STORES:
            session.stores[content[0]] = session.snapshots.read(content[1])
            while len(session.stores) > MAX_SNAPSHOTS:
                del session.stores[next(iter(session.stores))]
        elif kind != ALIVE:
            raise ConnectionError(f"a message is {kind!r}, which this worker does not know")

    async def _play(self, session: _Connection, stores: Mapping[str, ArtifactStore], job: bytes) -> JobResult:
        return await play(session.arena, pickle.loads(job), stores, self._run.sub_teams)

    async def _answer(self, session: _Connection, number: int, future: Future[JobResult]) -> None:
        try:
            outcome = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            return
        except Exception as error:
            await _send_quietly(session.channel, FAILED, number, *_portable(error))
        else:
            await _send_quietly(session.channel, PLAYED, number, outcome)
        finally:
            session.jobs.pop(number, None)


async def _stay_alive(channel: Channel, every: float) -> None:
    with suppress(ConnectionError):
        while True:
            await channel.send(ALIVE)
            await asyncio.sleep(every)


async def _send_quietly(channel: Channel, *message: Any) -> None:
    with suppress(ConnectionError):  # the connection ended, so no call waits for the answer
        await channel.send(*message)


def _portable(error: Exception) -> tuple[bytes | None, str]:
    """Return the pickle of ``error``, ``None`` if it has none, and its text."""
    text = f"{type(error).__name__}: {error}"
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:
        return None, text
    return content, text


EpisodesOf = Callable[[tuple[str, ...]], Mapping[str, Any]]
"""Returns the episodes that some of a task's actors play, by type."""


async def play(arena: Arena, job: Job, stores: Mapping[str, ArtifactStore], sub_teams: EpisodesOf) -> JobResult:
    """Play the episodes of ``job`` as ``arena`` would among all others of their batch.

    An episode that fails becomes a result with ``error``. Raises ``LeakError`` as an arena does, and ``TypeError`` for
    results that can't be pickled.
    """
    view = arena.evaluation(job.evaluation_sampling) if job.is_evaluation else copy.copy(arena)
    view.sampling, view.started, view.batches = job.sampling, job.started, job.batches
    view.stores = dict(stores)
    if job.sub_team is not None:
        view.actors = {actor: arena.actors[actor] for actor in job.sub_team}
        view.episodes = dict(sub_teams(job.sub_team))
    arena.budget.bound = job.calls
    roots = [context.root for context in job.contexts]
    batch_stores = [store for store in stores.values() if isinstance(store, BatchStore)]
    for store in batch_stores:
        store.begin(roots)
    # Time limits begin here, by the clock of this process.
    now = asyncio.get_running_loop().time()
    for request, context in zip(job.requests, job.contexts, strict=True):
        context.deadline = None if request.timeout is None else now + request.timeout
    # The loop's process decides if too many episodes of the batch have failed.
    failures = FailureBudget(len(job.requests), threshold=1.0)
    pairs = zip(job.requests, job.contexts, strict=True)
    running = run_limited([partial(run_episode, view, *pair, failures) for pair in pairs], job.episodes)
    results = await gather_or_cancel(running)
    groups = frozenset(scored_groups(view, results))
    await score_groups(view, results, job.contexts, None, failures)
    writes: list[StoreWrite] = []
    reads: set[tuple[int, str, str]] = set()
    for store in batch_stores:
        new_writes, new_reads = store.take(roots)
        writes, reads = writes + new_writes, reads | new_reads
    return JobResult(
        _dumps(results, pending=bool(writes)),
        failures.failed,
        failures.first,
        failures.total - len(job.requests),
        groups,
        writes,
        frozenset(reads),
    )


def _dumps(results: list[GenerateResult], *, pending: bool) -> bytes:
    try:
        return dumps_pending(results) if pending else dumps(results)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        kinds = Counter(result.rollout.episode_type for result in results)
        raise TypeError(
            f"results of the episode {next(iter(kinds))!r} can't be sent from the worker that played it: {error}; "
            "what episodes record must be picklable"
        ) from error
