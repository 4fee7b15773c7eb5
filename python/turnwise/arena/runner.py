"""Runs one request: creates the episode's context, runs it, retries it if it fails, then runs its continuations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from numbers import Integral
from typing import Any

from turnwise.arena.recording.recorder import EpisodeRecorder
from turnwise.arena.rewards.inherit import fail_children
from turnwise.arena.runtime.concurrency import FailureBudget, gather_or_cancel
from turnwise.arena.runtime.context import EpisodeContext, Recorder, own_artifact, use_context
from turnwise.arena.runtime.hashing import LazyRandom, content_key, derive_seed, detach_from_state
from turnwise.arena.runtime.privacy import check_episode_end
from turnwise.arena.runtime.private_text import LeakError, PrivateTexts
from turnwise.arena.runtime.recording_hooks import recorded_timeout
from turnwise.arena.runtime.user_code import close_episode, in_own_task, own_cancellation_contained
from turnwise.arena.runtime.watch import count_without_calls
from turnwise.types import (
    ContextLengthError,
    EpisodeRequest,
    EpisodeState,
    GenerateResult,
    ModelError,
    Rollout,
    RolloutFacts,
)
from turnwise.types.protocols import ArenaRuntime
from turnwise.utils.copies import own_copy
from turnwise.utils.signals import exits_as_errors


def check_requests(requests: Any) -> list[EpisodeRequest]:
    """Return ``requests`` as a list. Raises ``TypeError`` unless it is an iterable of valid EpisodeRequests."""
    if isinstance(requests, EpisodeRequest) or not isinstance(requests, Iterable):
        raise TypeError(f"requests={requests!r}: expected a list of EpisodeRequests")
    checked = list(requests)
    for request in checked:
        if not isinstance(request, EpisodeRequest):
            raise TypeError(f"requests holds {request!r}: expected EpisodeRequests")
        try:
            hash(request.group_id)
        except TypeError:
            raise TypeError(f"group_id={request.group_id!r}: expected a hashable value, such as a string") from None
        if request.seed is not None and not isinstance(request.seed, Integral):
            raise TypeError(f"seed={request.seed!r}: expected a whole number, or None")
    return checked


def create_context(
    arena: ArenaRuntime,
    request: EpisodeRequest,
    parent: EpisodeContext | None,
    seen: Counter[Any],
    *,
    of_episode: bool = True,
) -> EpisodeContext:
    """Create the context of one requested episode. It fixes id, seed, question and lineage before anything runs.

    ``seen`` counts the copies of one question and seed in this call of ``generate_rollouts``. Without ``of_episode``,
    the request is for a part of ``parent`` that no episode of the arena plays.
    """
    if of_episode:
        _check_request(arena, request)
    group_id = content_key(request.artifact) if request.group_id is None else request.group_id
    kind = "evaluation" if arena.is_evaluation else "episode"
    if parent is None:
        number, arena.started = arena.started, arena.started + 1
        rollout_id, seed = f"{kind[0]}{number}", derive_seed(arena.seed, kind, number)
    else:
        rollout_id, seed = parent.next_child()
    if request.seed is not None:
        # Copies of one question with one seed get different seeds that do not depend on the rest of the batch.
        copy_number = seen[request.episode_type, group_id, request.seed]
        seen[request.episode_type, group_id, request.seed] += 1
        seed = derive_seed(arena.seed, "request", request.seed, copy_number)
    policies = {**(parent.policies if parent else {}), **request.policies}
    artifact = detach_from_state(request.artifact)
    if parent is not None:  # the parent may change its object afterwards
        artifact = own_copy(artifact)
    rollout = Rollout(rollout_id, request.episode_type, artifact, seed=seed)
    rollout.meta = {**own_copy(request.meta)}
    versions = _policy_versions(arena, request, parent)
    rollout.facts = RolloutFacts(**request.facts.known(), policy_versions=versions, policies=policies)

    # A nested episode shares the recorder, the batch and the deadline of its parent.
    batch = parent.batch if parent else max(arena.batches - 1, 0)
    recorder: Recorder | None = parent.recorder if parent else None
    if parent is None and arena.record_episodes and not arena.is_evaluation:
        settings = {"seed": arena.seed, "retries": arena.retries, "max_context": arena.max_context, "batch": batch}
        recorder = EpisodeRecorder(request, seed, settings)
    record_key = f"{parent.record_key}.{rollout_id.rpartition('.')[2]}" if parent else rollout_id
    return EpisodeContext(
        rollout,
        EpisodeState(),
        LazyRandom(derive_seed(seed, "environment")),
        group_id=group_id,
        parent_id=parent.rollout.id if parent else None,
        is_trainable=request.is_trainable,
        priority=request.priority + (parent.priority if parent else 0),
        depth=parent.depth + 1 if parent else 0,
        root=parent.root if parent else number,
        batch=batch,
        deadline=_deadline(request, parent),
        private=parent.private.copy() if parent else PrivateTexts(),
        parent_private=parent.private if parent else None,
        recorder=recorder,
        record_key="" if recorder is None else recorder.unique_key(record_key),
        policies=policies,
    )


def _check_request(arena: ArenaRuntime, request: EpisodeRequest) -> None:
    if request.episode_type not in arena.episodes:
        raise ValueError(
            f"episode_type={request.episode_type!r}: no such episode, expected one of {sorted(arena.episodes)}"
        )
    if unknown := [actor for actor in request.policies if actor not in arena.actors]:
        raise ValueError(
            f"policies={dict(request.policies)!r}: no actor {unknown[0]!r}, expected some of {sorted(arena.actors)}"
        )
    if request.timeout is not None and not request.timeout > 0:
        raise ValueError(f"timeout={request.timeout!r}: expected seconds > 0, or None")


def _policy_versions(arena: ArenaRuntime, request: EpisodeRequest, parent: EpisodeContext | None) -> dict[str, int]:
    """Return the policy versions at the start of the top episode, and those of policies that this request adds."""
    if parent is None:
        versions = {policy: arena.client.version(policy) for policy in arena.policies}
    else:
        versions = parent.rollout.facts.policy_versions
    return {**versions, **{policy: arena.client.version(policy) for policy in request.policies.values()}}


def _deadline(request: EpisodeRequest, parent: EpisodeContext | None) -> float | None:
    """Return the earlier of the request's and its parent's deadline, in seconds of the event loop."""
    deadline = None if request.timeout is None else asyncio.get_running_loop().time() + request.timeout
    if parent is None or parent.deadline is None:
        return deadline
    return parent.deadline if deadline is None else min(deadline, parent.deadline)


Continuation = tuple[EpisodeRequest, EpisodeContext]


async def run_episode(
    arena: ArenaRuntime,
    request: EpisodeRequest,
    context: EpisodeContext,
    failures: FailureBudget,
    next_level: list[Continuation] | None = None,
) -> GenerateResult:
    """Run one episode up to ``1 + arena.retries`` times, then the episodes that continue it, which become its children.

    With ``next_level``, the continuations are added to it and do not run here. A failed model call is not repeated
    here: the client already retried it if it could succeed. An exception becomes a result with ``error``. Only
    cancellation, ``LeakError`` and ``BatchFailedError`` are raised.
    """
    attempt, result = 0, None
    following: list[Continuation] = []
    episode, what = arena.episodes[request.episode_type], f"episode {request.episode_type!r}"
    while True:
        try:
            with use_context(context), own_artifact(context):
                async with own_cancellation_contained(what), recorded_timeout(context, context.deadline):
                    with exits_as_errors(what):
                        playing = episode.generate(arena)
                        result = await (playing if context.deadline is None else in_own_task(playing, what))
                has_parts = bool(result.children or context.continuations)
                count_without_calls(result.rollout, has_parts, arena.is_evaluation)
            # Checks that fail here fail the attempt, except a leak, which stops the batch.
            following = _create_continuations(arena, context)
            if arena.check_private:
                check_episode_end(context)
            if context.parent_private is not None:
                context.parent_private.merge(context.private)
            break
        except LeakError:
            raise
        except Exception as error:
            text, result, following = context.explain(error), None, []
            final = isinstance(error, ModelError) and not isinstance(error, ContextLengthError)
        finally:
            await close_episode(episode, context)
        # Try again with a fresh context, unless no attempt or no time is left.
        if final or attempt == arena.retries or context.out_of_time():
            break
        _end_attempt(context)
        attempt += 1
        context = context.for_retry(attempt)
    _end_attempt(context)
    # After the last failure, return the records of that attempt, without rewards.
    if result is None:
        result = context.result()
        result.rollout.error, result.continuation = text, []
        result.rollout.rewards = {}
        fail_children(result)
        failures.add(text)
    if context.depth == 0:
        result.recording = context.recorder
    # Run the continuations level by level.
    if next_level is not None:
        next_level += following
        return result
    while following:
        failures.total += len(following)
        levels: list[list[Continuation]] = [[] for _ in following]
        links = zip(following, levels, strict=True)
        result.children += await gather_or_cancel(run_episode(arena, *link, failures, level) for link, level in links)
        following = list(chain.from_iterable(levels))
    return result


def _create_continuations(arena: ArenaRuntime, before: EpisodeContext) -> list[Continuation]:
    """Create contexts of the episodes to run next, on the level and under the parent of the episode that asked."""
    seen: Counter[Any] = Counter()
    links = [(request, create_context(arena, request, before, seen)) for request in before.continuations]
    for _, context in links:
        context.parent_id = before.parent_id
        context.rollout.meta["continues"] = before.rollout.id
    return links


def _end_attempt(context: EpisodeContext) -> None:
    if context.recorder is not None:
        context.recorder.finish_episode(context)
