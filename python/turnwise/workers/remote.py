"""The loop's side of the workers: sends them groups of episodes, and joins the results.

A group is the episodes of one question. Its worker is the group's index modulo the number of workers. If a worker dies,
its unfinished groups are played again from the same contexts, on the others or on the same one once it is back.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from turnwise.arena import Arena
from turnwise.arena.runtime.concurrency import FailureBudget
from turnwise.arena.runtime.context import EpisodeContext
from turnwise.inference.common.http import LoopThread
from turnwise.types import EpisodeRequest, GenerateResult
from turnwise.utils.threads import to_thread
from turnwise.workers.link import LOOK_SECONDS, EpisodeBatch, EpisodeGroup, Link, Members, by_number, fail
from turnwise.workers.messages import (
    CANCEL,
    Engines,
    Job,
    JobResult,
    Setup,
)
from turnwise.workers.snapshots import StoreSnapshot
from turnwise.workers.stores import GivenIds, apply_outcomes, share_artifacts
from turnwise.workers.waiting import WaitingGroups

MAX_DEATHS = 5
"""Workers that may die while they play one group, before the group counts as the cause."""


class WorkersLostError(RuntimeError):
    """Raised if no worker is left to play episodes, or if a group of episodes kills each worker that plays it."""


class RemoteWorkers:
    """Plays the top episodes of an arena in the processes of ``members``, as :attr:`Arena.workers`.

    - ``setup``: the facts that each worker must agree with; ``engines`` returns the present engines.
    - ``own_episodes``: the episodes that the workers have too. Other episodes are those of some actors of the task.
    - ``count``: workers that the run has in the end; limits are divided by it.
    - ``episodes``: the most episodes that one worker plays at the same time.
    - ``wait``: seconds without any worker after which waiting calls raise :class:`WorkersLostError`.
    - ``dead_after``: seconds without a sign of life after which a worker counts as dead.
    """

    def __init__(
        self,
        members: Members,
        key: str,
        setup: Setup,
        engines: Callable[[], Engines],
        *,
        own_episodes: Mapping[str, Any],
        count: int,
        episodes: int = 64,
        wait: float = 180.0,
        dead_after: float = 30.0,
    ) -> None:
        self._members, self.key, self.setup, self.engines = members, key, setup, engines
        self.count, self._episodes, self._wait, self.dead_after = count, episodes, wait, dead_after
        self._own_episodes = dict(own_episodes)
        self._links: dict[str, Link] = {}
        self._waiting = WaitingGroups()
        self._numbers, self._messages, self._snapshots = itertools.count(), itertools.count(), itertools.count()
        self._latest: StoreSnapshot | None = None
        self._alone_since = time.monotonic()
        self._looking: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.deaths = 0
        """Workers that died while they had episodes."""
        self._thread = LoopThread("turnwise-workers")
        self._thread.call(self._begin)

    # -- called by the arena -------------------------------------------------------------------------------------------
    async def play(
        self,
        arena: Arena,
        requests: Sequence[EpisodeRequest],
        contexts: Sequence[EpisodeContext],
        failures: FailureBudget,
        concurrency: int | None,
        ended: Callable[[], None],
    ) -> list[GenerateResult]:
        """Return one result per request, as the arena itself would play ``contexts``, and apply changes to its stores.

        Raises ``BatchFailedError`` by ``failures``, :class:`WorkersLostError`, ``TypeError`` for requests that can't be
        pickled, and ``RuntimeError`` if workers can't give the same results as one arena.
        """
        if self._closed:
            raise RuntimeError("the workers' connections are closed")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency={concurrency!r}: expected at least 1, or None")
        groups = self._groups(arena, requests, contexts, concurrency)
        try:
            self._thread.call(lambda: self._submit(groups))
            outcomes = await _all_outcomes(groups, failures, ended)
        except BaseException:
            self._thread.call(lambda: self._forget(groups))
            raise
        _reject_divided(outcomes)
        declared = {name: episode.reads_earlier_batches for name, episode in arena.episodes.items()}
        stores = {} if arena.is_evaluation else arena.stores
        results = await _read_results(groups, outcomes, apply_outcomes(stores, outcomes, declared))
        share_artifacts(stores, results.values())
        return [results[index] for index in range(len(requests))]

    def _groups(
        self,
        arena: Arena,
        requests: Sequence[EpisodeRequest],
        contexts: Sequence[EpisodeContext],
        concurrency: int | None,
    ) -> list[EpisodeGroup]:
        """Divide the episodes into the groups of one question, and pickle what decides each."""
        indices_of: dict[Hashable, list[int]] = {}
        for index, context in enumerate(contexts):
            indices_of.setdefault(context.group_id, []).append(index)
        # A call that may make fewer model calls at once than there are workers uses only as many workers.
        workers = max(1, min(self.count, arena.budget.bound))
        stores = StoreSnapshot(next(self._snapshots), arena.stores, evaluation=arena.is_evaluation)
        stores.since(self._latest)  # most workers have the latest one, and what is new must be picklable
        self._latest = stores
        batch = EpisodeBatch(float("inf") if concurrency is None else concurrency, workers, stores)
        own = self._own_episodes
        whole = arena.episodes.keys() == own.keys() and all(arena.episodes[name] is own[name] for name in own)
        sub_team = None if whole else tuple(arena.actors)
        groups = []
        for home, indices in enumerate(indices_of.values()):
            job = Job(
                [requests[index] for index in indices],
                [contexts[index] for index in indices],
                sub_team,
                arena.is_evaluation,
                arena._evaluation_sampling,
                arena.sampling,
                arena.started,
                arena.batches,
                episodes=int(min(batch.most_episodes, self._episodes)),
                calls=max(1, arena.budget.bound // workers),
            )
            first = contexts[indices[0]].rollout
            try:
                content = pickle.dumps(job, protocol=5)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise TypeError(
                    f"request {first.id!r} of episode {first.episode_type!r} can't be sent to a worker: {error}; "
                    "artifacts and meta must be picklable"
                ) from error
            groups.append(EpisodeGroup(batch, next(self._numbers), home, indices, content, first.id))
        return groups

    async def close(self) -> None:
        """End the connections, not the workers. May be called again."""
        if not self._closed:
            self._closed = True
            self._thread.call(self._end)
            await to_thread(self._thread.stop)

    def playing(self) -> list[str]:
        """Return the names of the workers that can play now."""
        return [name for name, link in list(self._links.items()) if link.ready]

    # -- in the thread of the connections ------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._looking = asyncio.ensure_future(self._look())

    def _submit(self, groups: Iterable[EpisodeGroup]) -> None:
        if not self._waiting:  # the wait for a worker begins with the first group that needs one
            self._alone_since = time.monotonic()
        for group in groups:
            self._waiting.add(group)
        self.dispatch()

    def _forget(self, groups: Iterable[EpisodeGroup]) -> None:
        """Drop groups whose call has ended, and cancel those that run."""
        gone = set(groups)
        self._waiting.forget({group.batch for group in gone})
        for group in gone:
            group.outcome.cancel()
            if (link := group.link) is not None:
                link.release(group)
                self._start(link.send(CANCEL, group.sent_as))
        self.dispatch()

    async def _look(self) -> None:
        """Follow members and engines until the end, and fail calls for which no worker is left."""
        while True:
            error: Exception | None
            try:
                self._follow()
                error = self._lost_error() if self._waiting else None
            except Exception as failed:  # of the members or the client: waiting calls raise it
                error = failed
            if error is not None:
                for group in self._waiting.take_all():
                    fail(group, error)
            await asyncio.sleep(LOOK_SECONDS)

    def _follow(self) -> None:
        members = dict(self._members())
        for name, link in list(self._links.items()):
            if members.get(name) != link.address:
                link.end("it left, or its address changed")
                del self._links[name]
        for name, address in members.items():
            if name not in self._links:
                self._links[name] = Link(self, name, address)
        if any(link.ready for link in self._links.values()):
            self._alone_since = time.monotonic()
        engines = self.engines()
        for link in self._links.values():
            if link.ready and link.engines != engines:
                self._start(link.send_engines(engines))
        self.dispatch()

    def _lost_error(self) -> WorkersLostError | None:
        """Return the error of calls that no worker can play, or ``None`` if one may still come."""
        links = list(self._links.values())
        if any(link.ready for link in links):
            return None
        refused = bool(links) and all(link.refused for link in links)
        alone = time.monotonic() - self._alone_since
        if not refused and alone < self._wait:
            return None
        reasons = "; ".join(f"{link.name} at {link.address}: {link.error}" for link in links) or "none has an address"
        return WorkersLostError(
            f"no worker can play this run: {reasons}" if refused else f"no worker for {alone:.0f} seconds: {reasons}"
        )

    def dispatch(self) -> None:
        """Send waiting groups, in order, to workers that have room."""
        names = sorted(self._links, key=by_number)
        ready = [self._links[name] for name in names if self._links[name].ready]
        while ready and (found := self._next(names, ready)) is not None:
            group, link = found
            self._waiting.remove_first(group)
            link.take(group, next(self._messages))
            self._start(link.send_group(group, self.engines()))

    def _next(self, names: Sequence[str], ready: Sequence[Link]) -> tuple[EpisodeGroup, Link] | None:
        """Return the first waiting group for which its worker has room, with the worker."""
        for group in self._waiting.first():
            home, size = self._links[names[group.lane % len(names)]], len(group.indices)
            link = home if home.ready else min(ready, key=lambda link: link.running)
            # A group whose workers died twice plays alone, so that others don't die with it.
            shares = not group.is_suspect and not any(other.is_suspect for other in link.groups.values())
            fits = not link.running or (shares and link.running + size <= self._episodes)
            if fits and (not group.batch.running or group.batch.running + size <= group.batch.most_episodes):
                return group, link
        return None

    def lost(self, link: Link) -> None:
        """Play the unfinished groups of a worker that died again."""
        groups = list(link.groups.values())
        if groups:
            self.deaths += 1
            warnings.warn(f"{link.name} is lost, and others get its episodes: {link.error}", stacklevel=2)
        for group in groups:
            link.release(group)
            group.deaths.append(f"{link.name}: {link.error}")
            if len(group.deaths) >= MAX_DEATHS:
                deaths = "; ".join(group.deaths)
                fail(group, WorkersLostError(f"{MAX_DEATHS} workers died while they played {group.first}: {deaths}"))
            else:
                self._waiting.add(group)
        self.dispatch()

    def answered(self, link: Link, number: int) -> EpisodeGroup | None:
        """Release the group of message ``number`` from its worker; ``None`` if no call waits for it."""
        group = link.groups.get(number)
        if group is not None:
            link.release(group)
            self.dispatch()
        return group

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _end(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        waiting = self._waiting.take_all()
        for link in self._links.values():
            waiting += link.groups.values()
            link.end("the run has ended")
        for group in waiting:
            fail(group, RuntimeError("the workers' connections were closed before this call was done"))


async def _all_outcomes(
    groups: Sequence[EpisodeGroup], failures: FailureBudget, ended: Callable[[], None]
) -> list[JobResult]:
    """Wait for all groups, and count their failures. Raises the first error."""
    waiting = {asyncio.wrap_future(group.outcome): group for group in groups}
    done: asyncio.Queue[asyncio.Future[JobResult]] = asyncio.Queue()
    for future in waiting:
        future.add_done_callback(done.put_nowait)
    try:
        while waiting:
            future = await done.get()
            outcome, group = future.result(), waiting.pop(future)
            failures.total += outcome.continuations
            for _ in range(outcome.failed):
                failures.add(outcome.first_error)
            for _ in group.indices:
                ended()
    finally:
        for future in waiting:
            future.cancel()
    return [group.outcome.result() for group in groups]


async def _read_results(
    groups: Sequence[EpisodeGroup], outcomes: Sequence[JobResult], ids: GivenIds
) -> dict[int, GenerateResult]:
    """Return the results by their indices in the batch's requests. Other work of the loop goes on between groups."""
    results: dict[int, GenerateResult] = {}
    for group, outcome in zip(groups, outcomes, strict=True):
        results |= zip(group.indices, ids.results_of(outcome), strict=True)
        await asyncio.sleep(0)
    return results


def _reject_divided(outcomes: Sequence[JobResult]) -> None:
    """Raise ``RuntimeError`` if group functions saw parts of one group on several workers, through continuations."""
    seen: set[Hashable] = set()
    for outcome in outcomes:
        if divided := seen & outcome.scored_groups:
            group: Any = next(iter(divided))
            kind, question = group
            raise RuntimeError(
                f"episode {kind!r} has group functions, and its group {str(question)[:80]!r} holds episodes that "
                "continue episodes of other groups, which other workers played: give the requests of both the same "
                "group_id, or play in the process of the loop (cluster.arena.count = 0)"
            )
        seen |= outcome.scored_groups
