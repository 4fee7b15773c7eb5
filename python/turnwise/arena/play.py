"""From a request to a result: an episode is opened, played, tried again where it fails, and continued by others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Any

from turnwise.arena.context import EpisodeContext, Luck, content_key, derive_seed, inside, outlasting
from turnwise.arena.privacy import LeakError, PrivateTexts, check_episode_end
from turnwise.arena.scheduler import FailureCount, run_all
from turnwise.arena.tape import Tape, Taping, time_limit
from turnwise.types import EpisodeRequest, EpisodeState, GenerateResult, Rollout

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena


def listed(requests: Any) -> list[EpisodeRequest]:
    """``requests`` as a list. Raises ``TypeError`` for what is no list of requests that can be told apart."""
    if isinstance(requests, EpisodeRequest) or not isinstance(requests, Iterable):
        raise TypeError(f"requests={requests!r}: expected a list of EpisodeRequests")
    found = list(requests)
    for request in found:
        if not isinstance(request, EpisodeRequest):
            raise TypeError(f"requests holds {request!r}: expected EpisodeRequests")
        try:
            hash(request.group_id)
        except TypeError:
            raise TypeError(f"group_id={request.group_id!r}: expected a hashable value, such as a string") from None
        if request.seed is not None and not isinstance(request.seed, Integral):
            raise TypeError(f"seed={request.seed!r}: expected a whole number, or None")
    return found


def open_episode(
    arena: Arena, request: EpisodeRequest, parent: EpisodeContext | None, seen: Counter[Any]
) -> EpisodeContext:
    """The context of one requested episode: its id, seed, question and lineage, fixed before anything runs.

    ``seen`` counts the copies of one question and seed in this call of ``generate_rollouts``.
    """
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
    uid = content_key(request.artifact) if request.group_id is None else request.group_id
    kind = "evaluation" if arena.is_evaluation else "episode"
    if parent is None:
        number, arena.started = arena.started, arena.started + 1
        rollout_id, seed = f"{kind[0]}{number}", derive_seed(arena.seed, kind, number)
    else:
        rollout_id, seed = parent.next_child()
    if request.seed is not None:
        # Copies of one question with one seed still differ, and do so whatever else is in the batch.
        copy_number = seen[request.episode_type, uid, request.seed]
        seen[request.episode_type, uid, request.seed] += 1
        seed = derive_seed(arena.seed, "request", request.seed, copy_number)
    rollout = Rollout(rollout_id, request.episode_type, outlasting(request.artifact), seed=seed)
    deadline = None if request.timeout is None else asyncio.get_running_loop().time() + request.timeout
    if parent is not None and parent.deadline is not None:
        deadline = parent.deadline if deadline is None else min(deadline, parent.deadline)
    if parent is None:
        versions = {policy: arena.client.version(policy) for policy in arena.policies}
    else:
        versions = parent.rollout.meta["policy_versions"]
    versions = {**versions, **{policy: arena.client.version(policy) for policy in request.policies.values()}}
    policies = {**(parent.policies if parent else {}), **request.policies}
    rollout.meta = {**request.meta, "policy_versions": versions, **({"policies": policies} if policies else {})}
    batch = parent.batch if parent else max(arena.batches - 1, 0)
    tape: Taping | None = parent.tape if parent else None
    if parent is None and arena.keep_tapes and not arena.is_evaluation:
        told = {"seed": arena.seed, "retries": arena.retries, "max_context": arena.max_context}
        told["batch"] = batch
        tape = Tape(request, seed, told)
    place = f"{parent.place}.{rollout_id.rpartition('.')[2]}" if parent else rollout_id
    return EpisodeContext(
        rollout,
        EpisodeState(),
        Luck(derive_seed(seed, "environment")),
        uid=uid,
        parent_id=parent.rollout.id if parent else None,
        is_trainable=request.is_trainable,
        priority=request.priority + (parent.priority if parent else 0),
        depth=parent.depth + 1 if parent else 0,
        root=parent.root if parent else number,
        batch=batch,
        deadline=deadline,
        private=parent.private.copy() if parent else PrivateTexts(),
        outer=parent.private if parent else None,
        tape=tape,
        place="" if tape is None else tape.claim(place),
        policies=policies,
    )


async def play(
    arena: Arena, request: EpisodeRequest, context: EpisodeContext, failures: FailureCount
) -> GenerateResult:
    """One episode and those that continue it, one after another, among its children.

    An exception becomes a result; only cancellation and leaks get through.
    """
    result, following = await _play_once(arena, request, context, failures)
    while following:
        failures.total += len(following)
        played = await run_all(_play_once(arena, *link, failures) for link in following)
        result.children.extend(link for link, _ in played)
        following = [link for _, links in played for link in links]
    return result


Link = tuple[EpisodeRequest, EpisodeContext]


async def _play_once(
    arena: Arena, request: EpisodeRequest, context: EpisodeContext, failures: FailureCount
) -> tuple[GenerateResult, list[Link]]:
    """One episode, tried again if asked, and what is to be played after it."""
    attempt, result = 0, None
    following: list[Link] = []
    while True:
        try:
            with inside(context):
                async with time_limit(context, context.deadline):
                    result = await arena.episodes[request.episode_type].generate(arena)
            following = _open_following(arena, context)
            if arena.check_private:
                check_episode_end(context)
            if context.outer is not None:
                context.outer.take(context.private)
            break
        except LeakError:
            raise
        except Exception as error:
            text, result, following = context.explain(error), None, []
        if attempt == arena.retries or context.out_of_time():
            break
        _end_attempt(context)
        attempt += 1
        context = context.again(attempt)
    _end_attempt(context)
    if result is None:
        result = context.result()
        result.rollout.error, result.continuation = text, []
        result.rollout.rewards = {}
        failures.add(text)
    if context.depth == 0:
        result.tape = context.tape
    return result, following


def _open_following(arena: Arena, before: EpisodeContext) -> list[Link]:
    """What the episode asked to run next. It is of the same level, so it has the same parent, or none."""
    seen: Counter[Any] = Counter()
    links = [(request, open_episode(arena, request, before, seen)) for request in before.following]
    for _, context in links:
        context.parent_id = before.parent_id
        context.rollout.meta["continues"] = before.rollout.id
    return links


def _end_attempt(context: EpisodeContext) -> None:
    if context.tape is not None:
        context.tape.ended(context)
