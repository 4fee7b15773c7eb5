"""Samples more groups than a step trains, and trains those that are whole first: ``rollout.oversample``.

A step of ``G`` groups otherwise waits for its longest episode. Here ``oversample * G`` groups are under way at the same
time. A step begins once ``G`` of them are whole, and the others go on into later steps. Weights that are ``s`` steps
old started a group of step ``s``, which so has to train by step ``s + max_staleness``: a step waits for a group whose
time is up. Every group trains once, so long episodes are not left out: they train later.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from turnwise.arena import Arena
from turnwise.arena.runtime.concurrency import FailureBudget
from turnwise.arena.runtime.hashing import content_key
from turnwise.train.interrupt import leave
from turnwise.train.rollout_queue import Pending, Results
from turnwise.types import EpisodeRequest


@dataclass(slots=True, eq=False)
class Group:
    """The episodes of one group of a draw, which had ``of`` groups with ``episodes`` in all.

    ``started`` is the step whose weights it began with, -1 before. ``results`` is set once it is whole. A whole group
    of a run without oversampling has no ``requests``.
    """

    requests: list[EpisodeRequest]
    draw: int
    of: int
    episodes: int
    started: int = -1
    results: Results | None = None
    failures: FailureBudget | None = field(default=None, repr=False)
    running: asyncio.Future[None] | None = field(default=None, repr=False)

    def saved(self, results: bool) -> Group:
        """Return what a checkpoint keeps: without its ``results``, the group starts again."""
        kept = replace(self, failures=None, running=None)
        return kept if results or not self.requests else replace(kept, started=-1, results=None)


def _key_of(request: EpisodeRequest) -> Hashable:
    return content_key(request.artifact) if request.group_id is None else request.group_id


def groups_of(batches: Sequence[Results], step: int, max_ahead: int) -> list[Group]:
    """Return the groups of whole batches, of a run without oversampling, that train from ``step`` on."""
    groups = []
    for index, results in enumerate(batches):
        by_group: dict[Hashable, Results] = {}
        for result in results:
            by_group.setdefault(result.group_id, []).append(result)
        groups += [
            Group([], -1, len(by_group), len(results), step + index - max_ahead, each) for each in by_group.values()
        ]
    return groups


def batches_of(groups: Sequence[Group]) -> list[Results]:
    """Return whole batches of ``groups``, for a run without oversampling. The rest is left out."""
    oldest_first = sorted(groups, key=lambda group: group.started)
    whole = [group.results for group in oldest_first if group.results is not None]
    size = groups[-1].of
    ends = range(size, len(whole) + 1, size)
    return [[result for results in whole[end - size : end] for result in results] for end in ends]


class GroupQueue:
    """Runs the groups that ``arena`` draws, ``oversample`` times as many as a step trains, and returns them by steps.

    It has the methods of :class:`~turnwise.train.rollout_queue.RolloutQueue`. ``oversample`` is above 1 and at most
    ``1 + max_ahead``, so that no step has to wait for more groups than it trains. A run that ends keeps whole groups,
    and starts the others again when it resumes.
    """

    def __init__(
        self, arena: Arena, snapshot: Callable[[], Any], *, oversample: float, max_ahead: int, first: int = 0
    ) -> None:
        if not 1 < oversample <= 1 + max_ahead:
            raise ValueError(f"oversample={oversample!r}: expected above 1, and at most 1 + max_ahead={1 + max_ahead}")
        if type(arena).sample is not Arena.sample or "sample" in vars(arena):
            raise TypeError(
                f"arena={type(arena).__name__}: with rollout.oversample > 1 training never calls sample(), as a step "
                "takes groups of several draws: override draw(), play(requests) or get_batch() instead"
            )
        if "failures" not in inspect.signature(arena.generate_rollouts).parameters:
            raise TypeError(
                f"arena={type(arena).__name__}: rollout.oversample > 1 counts the failures of a draw over several "
                "calls: expected generate_rollouts(requests, concurrency=None, *, failures=None)"
            )
        self.max_ahead = max_ahead
        self._arena, self._snapshot, self._oversample = arena, snapshot, oversample
        self._before: Any | None = None  # the sampler's state before a draw that is under way
        self._step, self._until, self._size, self._draws = first, first, 0, 0
        self._drawn = 0  # groups of each draw
        self._waiting: list[Group] = []  # drawn, and not started
        self._running: list[Group] = []
        self._whole: list[Group] = []  # in the order in which they ended
        self._chosen: list[Group] = []
        self._popped: list[Group] = []
        self._changed = asyncio.Event()
        self._filling: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await leave(self.discard()[1])

    def restore(self, groups: Sequence[Group]) -> None:
        """Add the groups of a checkpoint, before any group is drawn."""
        self._size, self._draws = groups[-1].of, 1 + max(group.draw for group in groups)
        self._whole += [group for group in groups if group.results is not None]
        self._wait([group for group in groups if group.results is None])

    # -- starting ------------------------------------------------------------------------------------------------------
    def start_up_to(self, step: int, *, until: int, spare: bool = False) -> None:
        """Start groups, once the client has the weights of ``step``, until enough are under way for the steps below
        ``until``."""
        assert not spare, "a deterministic run can't train the groups that are whole first"
        self._step, self._until = step, until
        if self._filling is None or (self._filling.done() and not self._filling.exception()):
            self._filling = asyncio.ensure_future(self._fill())
            self._filling.add_done_callback(lambda _: self._changed.set())

    async def _fill(self) -> None:
        while not self._size or self._under_way < self._wanted:
            if not self._waiting:
                await asyncio.sleep(0)  # the groups that have just started get their numbers
                self._before = self._snapshot()
                self._add(await self._arena.draw())
                self._before = None
            while self._waiting and self._under_way < self._wanted:
                group = self._waiting.pop(0)
                group.started, group.running = self._step, asyncio.ensure_future(self._play(group))
                self._running.append(group)

    @property
    def _under_way(self) -> int:
        return len(self._running) + len(self._whole)

    @property
    def _wanted(self) -> int:
        """The number of groups that should be under way."""
        return min(math.ceil(self._oversample * self._size), (self._until - self._step) * self._size)

    def _add(self, requests: Sequence[EpisodeRequest]) -> None:
        groups: dict[Hashable, list[EpisodeRequest]] = {}
        for request in requests:
            groups.setdefault(_key_of(request), []).append(request)
        if not groups:
            raise ValueError("get_batch() returned no requests: rollout.oversample > 1 needs groups to choose from")
        if len(groups) != (self._drawn or len(groups)):
            raise ValueError(
                f"get_batch() returned {len(groups)} groups, and {self._drawn} before: rollout.oversample > 1 needs as "
                "many in each draw"
            )
        try:
            pickle.dumps(requests)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(
                f"requests can't be saved: {error}; with rollout.oversample > 1 they must be picklable, as a run that "
                "ends keeps the groups that are under way"
            ) from error
        # Groups of two draws are never compared with each other, even if the source names them alike.
        taken = {_key_of(each.requests[0]) for each in (*self._running, *self._whole) if each.requests}
        for key in taken & groups.keys():
            groups[key] = [replace(request, group_id=(key, self._draws)) for request in groups[key]]
        self._size = self._drawn = len(groups)
        self._wait([Group(group, self._draws, len(groups), len(requests)) for group in groups.values()])
        self._draws += 1

    def _wait(self, groups: Sequence[Group]) -> None:
        threshold = self._arena.failure_threshold
        budgets = {group.draw: FailureBudget(group.episodes, threshold) for group in groups}
        for group in groups:
            group.failures = budgets[group.draw]
        self._waiting += groups

    async def _play(self, group: Group) -> None:
        try:
            results = await self._arena.play(group.requests, group.failures)
            if group in self._running:  # else it was discarded
                group.results = results
                self._running.remove(group)
                self._whole.append(group)
        finally:
            self._changed.set()

    # -- taking --------------------------------------------------------------------------------------------------------
    async def get_oldest(self) -> Results:
        """Wait until a step's groups are whole, and return their results; they stay until :meth:`pop_oldest`.

        Cancelling the wait is safe. Raises the error of a group that failed.
        """
        if self._filling is None:
            raise RuntimeError("no group was started: call start_up_to(step, until=...) first")
        while True:
            self._changed.clear()
            for task in (self._filling, *(group.running for group in self._running)):
                if task is not None and task.done():
                    task.result()
            if self._filling.done() and (chosen := self._choose()):
                self._chosen = chosen
                return [result for group in chosen for result in group.results or ()]
            await self._changed.wait()

    def _choose(self) -> list[Group]:
        """Return the groups of the next step, those that were whole first; none if some are not whole yet.

        After it, the groups that have to train within ``n`` more steps fill at most ``n`` steps.
        """
        size = min(self._size, self._under_way)
        if len(self._whole) < size:
            return []
        chosen: dict[Group, None] = {}
        for later in range(self.max_ahead + 1):
            last = self._step + later
            due = sum(self._due(group) <= last for group in (*self._running, *self._whole))
            able = [group for group in self._whole if self._due(group) <= last]
            needed = due - later * self._size - sum(group in chosen for group in able)
            able = [group for group in able if group not in chosen]
            if len(able) < needed:
                return []
            chosen |= dict.fromkeys(able[: max(needed, 0)])
        others = [group for group in self._whole if group not in chosen]
        return [*chosen, *others[: max(size - len(chosen), 0)]]

    def _due(self, group: Group) -> int:
        """Return the last step that may train ``group``."""
        return min(group.started + self.max_ahead, self._until - 1)

    def pop_oldest(self) -> None:
        """Remove the groups that :meth:`get_oldest` returned. :meth:`put_back` undoes it."""
        assert self._chosen, "no step was returned"
        self._popped, self._chosen = self._chosen, []
        popped = set(self._popped)
        self._whole = [group for group in self._whole if group not in popped]

    def put_back(self) -> None:
        """Put the groups of the last :meth:`pop_oldest` back in front, as they were not trained."""
        assert self._popped, "no groups were removed, or they were already put back"
        self._whole[:0] = self._popped
        self._popped = []

    @property
    def metrics(self) -> dict[str, float]:
        """Of the step that was removed last: ``carried_groups``, those that earlier weights began."""
        return {"carried_groups": sum(group.started < self._step for group in self._popped)}

    @property
    def finished(self) -> int:
        """The number of steps whose groups are whole and wait to be trained."""
        return len(self._whole) // max(self._size, 1)

    # -- stopping ------------------------------------------------------------------------------------------------------
    async def wait_idle(self) -> None:
        """Wait until no group runs. :meth:`get_oldest` raises the error of a failed one."""
        if running := [group.running for group in self._running if group.running and not group.running.done()]:
            await asyncio.wait(running)

    def failed_spare(self) -> None:
        """Return ``None``: no group is past the run's end."""

    def discard(self, index: int | None = None) -> tuple[Any | None, list[asyncio.Future[Any]]]:
        """Stop the groups that run, and forget the results of whole ones from ``index`` on. All can start again.

        Returns the sampler's state before a draw that is under way, else ``None``, and the tasks, which still run.
        """
        tasks: list[asyncio.Future[Any]] = [group.running for group in self._running if group.running]
        tasks += [] if self._filling is None else [self._filling]
        groups, before = self.pending(index).batches, self._before
        self._running, self._whole, self._waiting, self._filling, self._before = [], [], [], None, None
        if groups:
            self.restore(groups)
        return before, tasks

    def pending(self, most: int | None = None) -> Pending:
        """Return all groups, with the results of at most ``most`` whole ones, and the state before a draw under way."""
        whole = self._whole[:most]
        others = [*self._whole[len(whole) :], *self._running, *self._waiting]
        groups = [*(group.saved(True) for group in whole), *(group.saved(False) for group in others)]
        return Pending(groups, self._before)
