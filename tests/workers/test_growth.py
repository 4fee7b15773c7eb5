"""A batch of twice as many groups costs the loop's process twice as much, not four times."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.runtime.concurrency import FailureBudget
from turnwise.workers.link import EpisodeBatch, EpisodeGroup, Link
from turnwise.workers.messages import JobResult
from turnwise.workers.remote import RemoteWorkers, _all_outcomes, _read_results
from turnwise.workers.stores import GivenIds, apply_outcomes, dumps_pending

from .test_worker_stores import DECLARED, episode, outcome_of, worker_of

EMPTY = JobResult(dumps_pending([None]), 0, "", 0, frozenset(), [], frozenset())


def lines_run(work: Callable[[], Any]) -> int:
    """The lines of Python that ``work`` runs in this thread."""
    count = 0

    def trace(frame: Any, event: str, value: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def groups_of(count: int, most_episodes: float = float("inf")) -> list[EpisodeGroup]:
    batch = EpisodeBatch(most_episodes, 4, (0, b""))
    return [EpisodeGroup(batch, number, number, [number], b"", f"e{number}") for number in range(count)]


def changes(count: int) -> Callable[[], Any]:
    """Each group adds an artifact, and returns its id with a text."""
    store = ArtifactStore("s")
    worker, outcomes = worker_of(store), []
    for root in range(count):
        with episode(root):
            made = worker.add(f"new {root}")
            assert made is not None
        outcomes.append(outcome_of(worker, root, {"id": made.id, "text": "a-pending text " * 20}))

    def apply() -> None:
        ids = apply_outcomes({"s": store}, outcomes, DECLARED)
        assert [ids.results_of(each)[0]["id"] for each in outcomes] == [f"s-{root}" for root in range(count)]

    return apply


class _Link(Link):
    def __init__(self, workers: Any, name: str) -> None:
        self.workers, self.name, self.ready = workers, name, True
        self.groups, self.running = {}, 0

    async def send_group(self, group: EpisodeGroup, engines: Any) -> None: ...


def sending(count: int, most_episodes: float, busy: int) -> Callable[[], Any]:
    """Four workers, of which ``busy`` answer last, get groups as they have room."""
    workers = RemoteWorkers(dict, "key", None, tuple, own_episodes={}, count=4, episodes=8)  # type: ignore[arg-type]
    workers._thread.stop()
    links = [_Link(workers, f"worker-{number}") for number in range(4)]
    workers._links = {link.name: link for link in links}
    workers._start = lambda work: work.close()  # type: ignore[method-assign]
    groups = groups_of(count, most_episodes)

    def send() -> None:
        workers._submit(groups)
        for _ in groups:
            link = next(link for link in (*links[busy:], *links[:busy]) if link.groups)
            assert workers.answered(link, next(iter(link.groups))) is not None
        assert not workers._waiting and not any(link.groups for link in links)

    return send


def waiting(count: int) -> Callable[[], Any]:
    """The groups end one after another."""

    async def wait() -> None:
        groups = groups_of(count)

        async def answer() -> None:
            for group in groups:
                group.outcome.set_result(EMPTY)
                for _ in range(4):
                    await asyncio.sleep(0)

        found, _ = await asyncio.gather(_all_outcomes(groups, FailureBudget(count, 1.0), int), answer())
        assert len(found) == count

    return lambda: asyncio.run(wait())


KINDS = {
    "changes of stores": changes,
    "a batch at its limit": lambda count: sending(count, 4, 0),
    "workers that are full": lambda count: sending(count, float("inf"), 0),
    "a worker that is busy": lambda count: sending(count, float("inf"), 1),
    "answers one by one": waiting,
}


@pytest.mark.parametrize("kind", KINDS)
def test_twice_the_groups_are_twice_the_work(kind: str) -> None:
    some, twice = (lines_run(KINDS[kind](count)) for count in (150, 300))
    assert twice <= 2.2 * some


async def test_other_work_goes_on_while_results_are_read() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.ensure_future(others())
    assert len(await _read_results(groups_of(20), [EMPTY] * 20, GivenIds())) == 20
    working.cancel()
    assert turns >= 20
