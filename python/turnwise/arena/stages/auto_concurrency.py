"""``rollout.max_concurrency = "auto"``: a limit of concurrent model calls that follows the engines' queue and cache."""

from __future__ import annotations

import asyncio
import contextvars
import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, cast

from turnwise.arena.runtime.concurrency import Order, PrioritySemaphore
from turnwise.arena.stages.stage import Stage
from turnwise.arena.stages.stages import Stages
from turnwise.types import EngineReport, InferenceClient, PooledClient, ReportingClient, RoutedClient
from turnwise.types.play import MAX_CONCURRENCY

EVERY = 1.0
"""Seconds between two looks at the engines, while calls run."""

START = 8
"""A run begins with the bound divided by this."""

STEP = 64
"""The limit grows by the bound divided by this, in the time in which as many calls end as the limit allows."""

ROOM, CAUTION = 0.8, 0.25
"""Above this share of an engine's cache the limit grows at this part of its pace, as running calls still fill it."""

LOST, FADE = 0.1, 0.99
"""The part of all prompt tokens that prefix caches may hold less than at their best. The best fades by this factor in
each round of calls, as the work changes."""

CRAMPED = 0.5
"""Share of an engine's cache above which lost prefixes cut the limit. Below it, running calls are not the cause."""

CUT = 0.75
"""Factor of a cut after preemptions or lost prefixes."""

QUEUE = 8
"""An engine may have one waiting request for this many running ones, so that it never idles."""

PATIENCE = 3
"""Looks at a longer queue in a row before it lowers the limit. Prompts that all come at once queue for a moment."""


class FollowingSemaphore(PrioritySemaphore):
    """A semaphore whose limit follows the load of the engines of ``client``, and never exceeds :attr:`bound`.

    Additive increase and multiplicative decrease, as in TCP. Chiu and Jain (1989) show that users of a shared resource
    who follow this rule alone reach equal shares, so the workers of a run need not talk to each other. CONCUR (Chen et
    al., 2026, arXiv:2601.22705) controls agents by an engine's cache in this way.

    - Preemptions cut the limit to 3/4 of the calls that ran. Each one costs the computation of a prompt. No further cut
      follows until enough calls have ended for the first to take effect.
    - So do prefix caches that hold a tenth less of the prompts than at their best, for two rounds of calls: between two
      turns of an episode its keys and values stay only while running calls leave room.
    - A queue of the engines that stays longer than 1/8 of what runs lowers the limit to leave that: calls wait here,
      where earlier episodes go first.
    - Else each call that ends while others wait here raises the limit, up to the first cut by one, later by
      ``bound / 64 / limit``. Ended calls set the pace because a cache fills while calls run: the young calls of a new
      batch take little of it. Above 80% of an engine's cache a quarter of this counts.

    A client that makes no reports leaves the limit at the bound, with one warning.
    """

    def __init__(self, client: InferenceClient) -> None:
        self._client, self._cap = client, math.inf
        super().__init__(max(1, self.bound // START))
        self._exact = float(self.limit)  # the rule's own limit, which a lower bound leaves as it is
        self._learned = False  # True after the first look, or with a saved limit
        self._ramps = True  # no cut yet
        self._ended = self._queued = 0
        self._most_in_use = 0  # since the last look
        self._preemptions: dict[str, int] = {}
        self._round = 0  # calls that ended since the prefix cache was judged
        self._prompts: dict[str, tuple[int, int]] = {}  # prompt tokens and cached ones at that time
        self._best, self._lost = 0.0, 0  # the largest share of cached ones, and rounds with less
        self._follower: asyncio.Task[None] | None = None
        self.fixed = not isinstance(client, ReportingClient)
        """True if the client makes no reports, also as a checkpoint says."""
        self._told = False  # said so, after a look at the client
        self._apply()
        self.counts = dict.fromkeys(("cuts", "unread"), 0)
        """Cuts, and looks at which no engine answered."""

    # -- the bound -----------------------------------------------------------------------------------------------------
    def _most(self) -> int:
        routed = self._client.clients.values() if isinstance(self._client, RoutedClient) else [self._client]
        distinct = {id(each): each for each in routed}.values()
        engines = sum(len(each.serving()) if isinstance(each, PooledClient) else 1 for each in distinct)
        return MAX_CONCURRENCY * max(1, engines)

    @property
    def bound(self) -> int:
        """``MAX_CONCURRENCY`` calls for each engine that serves now, or less if that was set."""
        return int(min(self._cap, self._most()))

    @bound.setter
    def bound(self, bound: int) -> None:
        self._cap = bound if bound < self._most() else math.inf
        if not self._learned:
            self._exact = max(1.0, self.bound // START)
        self._apply()

    def _set(self, limit: float) -> None:
        self._exact = max(1.0, limit)
        self._apply()

    def _apply(self) -> None:
        bound = self.bound
        self.limit = bound if self.fixed else min(int(self._exact), bound)
        if self._waiting and self.in_use < self.limit:
            self._grant_soon()

    # -- calls ---------------------------------------------------------------------------------------------------------
    async def acquire(self, order: Order) -> None:
        loop = asyncio.get_running_loop()
        if self.fixed and not self._told:
            self._without_reports({type(self._client).__name__: None})
        elif not self._told and (
            self._follower is None or self._follower.done() or self._follower.get_loop() is not loop
        ):
            self._follower = loop.create_task(self._follow(), context=contextvars.Context())
        await super().acquire(order)

    def release(self) -> None:
        self._ended += bool(self._waiting)
        self._most_in_use = max(self._most_in_use, self.in_use)
        super().release()

    async def _follow(self) -> None:
        """Look at the engines until nothing runs."""
        while (self.in_use or self._waiting) and not self._told:
            self.adjust(await self._reports())
            await asyncio.sleep(EVERY)

    async def _reports(self) -> Mapping[str, EngineReport | None]:
        try:
            return await cast(ReportingClient, self._client).load()
        except Exception as error:  # of any client: the calls themselves will say what is wrong
            if not self.counts["unread"]:
                warnings.warn(f"{type(self._client).__name__}.load() failed: {error!r}", RuntimeWarning, stacklevel=1)
            return {}

    # -- the rule ------------------------------------------------------------------------------------------------------
    def adjust(self, reports: Mapping[str, EngineReport | None]) -> None:
        """Move the limit by the engines' ``reports``, which are those of :meth:`ReportingClient.load`."""
        ended, self._ended = self._ended, 0
        # What the reports are about: at the end of a batch few calls still run.
        ran, self._most_in_use = min(self.limit, max(self._most_in_use, self.in_use)), self.in_use
        known = {name: report for name, report in reports.items() if report is not None}
        if not known:
            self._without_reports(reports)
            return
        self._learned, self.fixed = True, False
        running = sum(report.running for report in known.values())
        waiting = sum(report.waiting for report in known.values())
        allowed = max(1, running // QUEUE)
        cramped = [self._is_cramped(name, report) for name, report in known.items()]
        use = max(report.kv_cache_use for report in known.values())
        self._queued = self._queued + 1 if waiting > allowed else 0
        forgets = self._forgets(known, ended) and use > CRAMPED
        if self.in_use > self.limit:  # the last cut has not taken effect yet
            return
        if any(cramped) or forgets:
            self._cut(CUT * ran)
        elif self._queued >= PATIENCE:
            self._cut(ran * (running + allowed) / (running + waiting))
        elif waiting <= allowed and self.limit < (bound := self.bound):
            pace = 1.0 if self._ramps and use < ROOM else (CAUTION if use >= ROOM else 1.0) * bound / STEP / self._exact
            self._set(min(bound, self._exact + pace * ended))
        else:
            self._apply()  # engines may have left

    def _is_cramped(self, name: str, report: EngineReport) -> bool:
        """Return True if the engine preempted calls for lack of memory since the last look.

        New weights in flight preempt all running calls at once, which says nothing of the memory.
        """
        new = report.preemptions - self._preemptions.get(name, report.preemptions)
        self._preemptions[name] = report.preemptions
        return 0 < new < max(2, report.running / 2)

    def _forgets(self, known: Mapping[str, EngineReport], ended: int) -> bool:
        """Return True if the prefix caches held fewer of the prompts than before, in two rounds of calls in a row.

        New weights empty the caches, which lasts for one.
        """
        self._round += ended
        if self._round < self.limit:
            return False
        before, self._round = self._prompts, 0
        self._prompts = {name: (report.prompt_tokens, report.cached_tokens) for name, report in known.items()}
        pairs = [(now, before.get(name, now)) for name, now in self._prompts.items()]
        prompts, cached = (sum(max(0, now[i] - then[i]) for now, then in pairs) for i in range(2))
        held = cached / prompts if prompts else 0.0
        self._best = max(held, FADE * self._best)
        self._lost = self._lost + 1 if held < self._best - LOST else 0
        return self._lost >= 2

    def _cut(self, limit: float) -> None:
        self.counts["cuts"] += 1
        self._ramps, self._queued = False, 0
        self._set(limit)

    def _without_reports(self, reports: Mapping[str, EngineReport | None]) -> None:
        if not reports:  # no engine answers now
            self.counts["unread"] += 1
            return
        self.fixed = self._told = True
        self._apply()
        warnings.warn(
            f"max_concurrency='auto': {', '.join(reports)} reports no load, so the limit stays at {self.bound} calls "
            "at once. Give a number, or sample with vLLM",
            RuntimeWarning,
            stacklevel=1,
        )

    # -- state ---------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any] | None:
        if self.fixed:
            return {"fixed": True}
        return {"limit": self._exact, "ramps": self._ramps} if self._learned else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("fixed"):  # until a client makes reports
            self.fixed = True
            self._apply()
            return
        self._learned, self._ramps = True, state["ramps"]
        self._set(state["limit"])


class AutoConcurrency(Stage):
    """Logs the limit of a :class:`FollowingSemaphore`, and saves it, so that a resumed run goes on from there."""

    name = "auto_concurrency"
    rewinds = False

    def __init__(self, budget: FollowingSemaphore) -> None:
        self.budget = budget

    def trained(self) -> Mapping[str, float]:
        """Return the limit now, and what was counted since the last step."""
        if self.budget.state_dict() is None:  # workers play, and have limits of their own
            return {}
        counts, self.budget.counts = self.budget.counts, dict.fromkeys(self.budget.counts, 0)
        return {"concurrency/limit": self.budget.limit} | {f"concurrency/{name}": n for name, n in counts.items()}

    def state_dict(self) -> dict[str, Any] | None:
        return self.budget.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.budget.load_state_dict(state)


def auto_note(reports: bool) -> str:
    """Describe the limit of a run, whose client ``reports`` its engines' load."""
    if not reports:
        return f"rollout.max_concurrency = 'auto': {MAX_CONCURRENCY}, as the client reports no load of its engine"
    return (
        f"rollout.max_concurrency = 'auto': {MAX_CONCURRENCY // START} for each engine at the start, then by their "
        f"queue and cache, at most {MAX_CONCURRENCY} for each"
    )


def limit_of_calls(
    max_concurrency: int | Literal["auto"], client: InferenceClient, stages: Stages
) -> PrioritySemaphore:
    """Return the limit of an arena's model calls; ``"auto"`` adds its stage to ``stages``."""
    if max_concurrency != "auto":
        if isinstance(max_concurrency, str):
            raise ValueError(f"max_concurrency={max_concurrency!r}: expected 'auto' or a number")
        return PrioritySemaphore(max_concurrency)
    budget = FollowingSemaphore(client)
    stages.add(AutoConcurrency(budget))
    return budget
