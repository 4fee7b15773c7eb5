"""Samples ahead of training: whole batches in order, or with ``rollout.oversample`` the groups that are whole first.

In order, step ``b`` trains batch ``b``, which may start once the client has the weights of step ``b - max_ahead``: its
tokens are then at most ``max_ahead`` versions old. No batch is thrown away. ``max_ahead`` 0 is the synchronous loop.

A step of ``G`` groups so waits for its longest episode. With ``oversample`` above 1, ``oversample * G`` groups are
under way at once. A step begins once ``G`` are whole, and the others go on into later steps. Every group trains once: a
group that the weights of step ``s`` started by step ``s + max_ahead``, so a step waits for a group whose time is up.
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
from turnwise.train.interrupt import wait_or_abandon
from turnwise.types import EpisodeRequest, GenerateResult

Results = list[GenerateResult]


def check_step_not_overridden(arena: Arena) -> None:
    """Raise ``TypeError`` for an arena that overrides ``step``: training calls the stages instead."""
    if type(arena).step is not Arena.step or "step" in vars(arena):
        raise TypeError(
            f"arena={type(arena).__name__}: training never calls step(), as it samples ahead of the updates: it calls "
            "sample() and then assign_credit_and_pack(results). Override these, or a stage of them: "
            "get_batch, generate_rollouts, assign_credit, build_training_batch"
        )


@dataclass(slots=True, eq=False)
class Group:
    """The episodes of one group of a draw, which had ``of`` groups with ``episodes`` in all.

    ``started`` is the step whose weights it began with, -1 before. ``results`` is set once it is whole. In order, a
    group is the whole draw for step ``draw``. It has no ``requests``, nor has one of a batch that was sampled in order.
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


@dataclass(frozen=True, slots=True)
class Pending:
    """The part of a queue that a checkpoint keeps: the results of each whole batch, or the groups if it oversamples.

    ``before`` is the sampler's state from which the run draws on, ``None`` if that is the present one.
    """

    batches: list[Any]
    before: Any | None


def _key_of(request: EpisodeRequest) -> Hashable:
    return content_key(request.artifact) if request.group_id is None else request.group_id


def _split(batches: Sequence[Results], step: int, max_ahead: int) -> list[Group]:
    """Return the groups of batches in order, which train from ``step`` on."""
    groups = []
    for index, results in enumerate(batches):
        by_group: dict[Hashable, Results] = {}
        for result in results:
            by_group.setdefault(result.group_id, []).append(result)
        started = step + index - max_ahead
        groups += [Group([], -1, len(by_group), len(results), started, each) for each in by_group.values()]
    return groups


def _join(groups: Sequence[Group]) -> list[Results]:
    """Return batches of the whole ones among ``groups``. The rest is left out."""
    oldest_first = sorted(groups, key=lambda group: group.started)
    whole = [group.results for group in oldest_first if group.results is not None]
    size = groups[-1].of
    ends = range(size, len(whole) + 1, size)
    return [[result for results in whole[end - size : end] for result in results] for end in ends]


class GroupQueue:
    """Runs what ``arena`` draws ahead of training, and returns it by steps.

    With ``oversample`` 1 it runs ``arena.sample(on_requests_fixed)`` for each batch, and returns the batches in order.
    The next batch draws once ``on_requests_fixed`` was called. ``snapshot`` returns the sampler's state, which the
    queue takes before each draw: a run that ends keeps finished batches, and draws the others again when it resumes.

    Above 1, and at most ``1 + max_ahead`` so that no step has to wait for more groups than it trains, it plays each
    group by itself. A run that ends keeps all groups, and starts those that aren't whole again.

    ``async with`` cancels what runs on every exit, and waits until it has ended.

    Example::

        async with GroupQueue(arena, arena.state_dict, max_ahead=1) as rollouts:
            rollouts.start_up_to(0, until=10)
            results = await rollouts.get_oldest()
            rollouts.pop_oldest()
    """

    def __init__(
        self, arena: Arena, snapshot: Callable[[], Any], *, max_ahead: int, oversample: float = 1.0, first: int = 0
    ) -> None:
        if max_ahead < 0:
            raise ValueError(f"max_ahead={max_ahead!r}: expected a count >= 0")
        if not 1 <= oversample <= 1 + max_ahead:
            raise ValueError(f"oversample={oversample!r}: expected 1 (in order) to 1 + max_ahead={1 + max_ahead}")
        self.max_ahead, self._in_order = max_ahead, oversample == 1
        if not self._in_order:
            _check_plays_groups(arena)
        self._arena, self._snapshot, self._oversample = arena, snapshot, oversample
        self._states: dict[int, Any] = {}  # the sampler's states before draws that may have to be repeated
        self._step, self._until, self._draws = first, first, first
        self._fixed: asyncio.Event | None = None  # set once the requests of the last draw in order are fixed
        self._size, self._drawn = int(self._in_order), 0  # groups of a step and of each draw, 0 before the first draw
        self._waiting: list[Group] = []  # not started
        self._running: list[Group] = []
        self._whole: list[Group] = []  # in the order of draws, or of their ends
        self._chosen: list[Group] = []
        self._popped: list[Group] = []
        self._changed = asyncio.Event()
        self._filling: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await wait_or_abandon(self.discard()[1])

    def restore(self, saved: Sequence[Any]) -> int:
        """Add the batches of a :class:`Pending`, of a queue of either mode, before any is drawn. Return the number of
        groups that are dropped: in order, those that make no whole batch."""
        if not saved:
            return 0
        grouped = isinstance(saved[0], Group)
        if self._in_order:
            batches: Sequence[Results] = _join(saved) if grouped else saved
            for results in batches:
                self._whole.append(Group([], self._draws, 1, len(results), self._step, results))
                self._draws += 1
            return len(saved) - len(batches) * saved[-1].of if grouped else 0
        groups: Sequence[Group] = saved if grouped else _split(saved, self._step, self.max_ahead)
        self._size, self._draws = groups[-1].of, 1 + max(group.draw for group in groups)
        self._whole += [group for group in groups if group.results is not None]
        self._wait([group for group in groups if group.results is None])
        return 0

    # -- starting ------------------------------------------------------------------------------------------------------
    def start_up_to(self, step: int, *, until: int, spare: bool = False) -> None:
        """Start what trains up to step ``step + max_ahead``, below ``until``; the client has the weights of ``step``.

        With ``spare``, also start batches from ``until`` on. Only an extended run trains on them: a run with that
        length from its start would sample them with the present weights. See :meth:`failed_spare`.
        """
        assert self._in_order or not spare, "a deterministic run can't train the groups that are whole first"
        self._step, self._until = step, until
        if self._in_order:
            self._states = {draw: state for draw, state in self._states.items() if draw >= step}
            end = step + 1 + self.max_ahead
            for draw in range(self._draws, end if spare else min(end, until)):
                group, previous, self._fixed = Group([], draw, 1, 0, step), self._fixed, asyncio.Event()
                group.running = asyncio.ensure_future(self._sample(group, previous, self._fixed))
                self._running.append(group)
                self._draws += 1
            return
        if self._filling is None or (self._filling.done() and not self._filling.exception()):
            self._filling = asyncio.ensure_future(self._fill())
            self._filling.add_done_callback(lambda _: self._changed.set())

    async def _fill(self) -> None:
        while not self._size or self._under_way < self._wanted:
            if not self._waiting:
                await asyncio.sleep(0)  # the groups that have just started get their numbers
                self._states[self._draws] = self._snapshot()
                self._add(await self._arena.draw())
                self._states.clear()
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
        for key in groups.keys() & {_key_of(e.requests[0]) for e in (*self._running, *self._whole) if e.requests}:
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

    async def _sample(self, group: Group, previous: asyncio.Event | None, fixed: asyncio.Event) -> None:
        try:
            if previous is not None:
                await previous.wait()
            self._states[group.draw] = self._snapshot()
            self._end(group, await self._arena.sample(fixed.set))
        finally:
            fixed.set()
            self._changed.set()

    async def _play(self, group: Group) -> None:
        try:
            self._end(group, await self._arena.play(group.requests, group.failures))
        finally:
            self._changed.set()

    def _end(self, group: Group, results: Results) -> None:
        if group in self._running:  # else it was discarded
            group.results = results
            self._running.remove(group)
            self._whole.append(group)
            if self._in_order:
                self._whole.sort(key=lambda each: each.draw)

    # -- taking --------------------------------------------------------------------------------------------------------
    async def get_oldest(self) -> Results:
        """Wait until a step's groups are whole, and return their results; they stay until :meth:`pop_oldest`.

        Cancelling the wait is safe. Raises the error of a group that fails before; spare ones are not watched.
        """
        if self._filling is None and not self._under_way:
            raise RuntimeError("nothing was started: call start_up_to(step, until=...) first")
        while True:
            self._changed.clear()
            if chosen := self._choose():
                self._chosen = chosen
                return [result for group in chosen for result in group.results or ()]
            watched = [group for group in self._running if not self._is_spare(group)] or self._running[:1]
            for task in (self._filling, *(group.running for group in watched)):
                if task is not None and task.done():
                    task.result()
            await self._changed.wait()

    def _is_spare(self, group: Group) -> bool:
        return self._in_order and group.draw >= self._until

    @property
    def _ready(self) -> list[Group]:
        """The whole groups that may train: in order, those before the first one that isn't whole."""
        if not (self._in_order and self._running):
            return self._whole
        first = self._running[0].draw
        return [group for group in self._whole if group.draw < first]

    def _choose(self) -> list[Group]:
        """Return the groups of the next step, those that were whole first; none if some are not whole yet.

        After it, the groups that have to train within ``n`` more steps fill at most ``n`` steps.
        """
        if self._in_order:
            return self._ready[:1]
        if self._filling is None or not self._filling.done() or self._filling.exception():
            return []
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
        assert self._chosen, "no finished step was returned"
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
        """Of the step that was removed last: ``carried_groups``, those that earlier weights began. None in order."""
        return {} if self._in_order else {"carried_groups": sum(group.started < self._step for group in self._popped)}

    @property
    def finished(self) -> int:
        """The number of steps whose groups are whole and wait to be trained."""
        return len(self._ready) // max(self._size, 1)

    # -- stopping ------------------------------------------------------------------------------------------------------
    @property
    def _tasks(self) -> list[asyncio.Future[None]]:
        return [task for task in (*(group.running for group in self._running), self._filling) if task is not None]

    async def wait_idle(self) -> None:
        """Wait until nothing runs. :meth:`get_oldest` raises the error of what failed."""
        while running := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(running)

    def failed_spare(self) -> BaseException | None:
        """Return the error of the first spare batch that failed, which does not end the run, or ``None``."""
        done = (group.running for group in self._running if self._is_spare(group))
        return next((task.exception() for task in done if task and task.done() and not task.cancelled()), None)

    def discard(self, index: int | None = None) -> tuple[Any | None, list[asyncio.Future[None]]]:
        """Stop what runs, and forget the results of whole batches or groups from ``index`` on, by default of none.

        In order, what comes behind the first one that isn't whole is forgotten too. Returns the sampler's state from
        which to draw it again, ``None`` if that is the present one, and the tasks, which still run.
        """
        tasks, kept, pending = self._tasks, self._ready[:index], self.pending(index)
        discarded = self._under_way - len(kept)
        self._running, self._whole, self._waiting, self._filling = [], [], [], None
        if self._in_order:
            self._whole, self._draws, self._fixed = kept, self._draws - discarded, None
        else:
            self.restore(pending.batches)
        self._states = {draw: state for draw, state in self._states.items() if draw < self._draws}
        return pending.before, tasks

    def pending(self, most: int | None = None) -> Pending:
        """Return what a checkpoint must keep now, with the results of at most ``most`` whole batches or groups."""
        kept = self._ready[:most]
        if self._in_order:
            left = {group.draw for group in (*self._whole, *self._running)} - {group.draw for group in kept}
            return Pending([group.results for group in kept], self._states.get(min(left, default=self._draws)))
        others = [*self._whole[len(kept) :], *self._running, *self._waiting]
        groups = [*(group.saved(True) for group in kept), *(group.saved(False) for group in others)]
        return Pending(groups, self._states.get(self._draws))


def _check_plays_groups(arena: Arena) -> None:
    """Raise ``TypeError`` for an arena that can't play groups by themselves."""
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
