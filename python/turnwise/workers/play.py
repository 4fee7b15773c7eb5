"""Plays one job in a worker: a group of sibling episodes, on a view of the worker's arena."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from turnwise.arena import Arena, ArtifactStore
from turnwise.arena.rewards.group_rewards import score_groups, scored_groups
from turnwise.arena.runner import run_episode
from turnwise.arena.runtime.concurrency import FailureBudget, gather_or_cancel, run_limited
from turnwise.types import GenerateResult
from turnwise.utils.copies import dumps
from turnwise.workers.messages import Job, Outcome, StoreWrite
from turnwise.workers.stores import BatchStore, dumps_pending

EpisodesOf = Callable[[tuple[str, ...]], Mapping[str, Any]]
"""Returns the episodes that some of a task's actors play, by type."""


async def play(arena: Arena, job: Job, stores: Mapping[str, ArtifactStore], sub_teams: EpisodesOf) -> Outcome:
    """Play the episodes of ``job`` as ``arena`` would among all others of their batch.

    An episode that fails becomes a result with ``error``. Raises ``LeakError`` as an arena does, and ``TypeError`` for
    results that can't be pickled.
    """
    view = _view(arena, job, stores)
    if job.sub_team is not None:
        view.actors = {actor: arena.actors[actor] for actor in job.sub_team}
        view.episodes = dict(sub_teams(job.sub_team))
    arena.budget.limit = job.calls
    roots = [context.root for context in job.contexts]
    own = [store for store in stores.values() if isinstance(store, BatchStore)]
    for store in own:
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
    for store in own:
        made, read = store.take(roots)
        writes, reads = writes + made, reads | read
    return Outcome(
        _dumps(results, pending=bool(writes)),
        failures.failed,
        failures.first,
        failures.total - len(job.requests),
        groups,
        writes,
        frozenset(reads),
    )


def _view(arena: Arena, job: Job, stores: Mapping[str, ArtifactStore]) -> Arena:
    view = arena.evaluation(job.evaluation_sampling) if job.is_evaluation else copy.copy(arena)
    view.sampling, view.started, view.batches = job.sampling, job.started, job.batches
    view.stores = dict(stores)
    return view


def _dumps(results: list[GenerateResult], *, pending: bool) -> bytes:
    try:
        return dumps_pending(results) if pending else dumps(results)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        kinds = Counter(result.rollout.episode_type for result in results)
        raise TypeError(
            f"results of the episode {next(iter(kinds))!r} can't be sent from the worker that played it: {error}; "
            "what episodes record must be picklable"
        ) from error
