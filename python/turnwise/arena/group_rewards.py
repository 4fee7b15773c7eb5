"""Rewards that need all answers to a question: the rubric's functions of ``rollouts``, once all of them are played."""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from turnwise.arena.context import EpisodeContext, inside
from turnwise.arena.episode import check_rewarded
from turnwise.arena.invalid_action import INVALID
from turnwise.arena.plain import jsonable
from turnwise.arena.privacy import LeakError
from turnwise.arena.reward_values import check_reward, keep_tokens
from turnwise.arena.scheduler import FailureCount, run_all
from turnwise.arena.tape import ASK, READ, Call, Reading, Tape, empty_step, reading_to_json
from turnwise.types import EpisodeRequest, GenerateResult

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena


async def score_groups(
    arena: Arena,
    results: Sequence[GenerateResult],
    contexts: Sequence[EpisodeContext],
    parent: EpisodeContext | None,
    failures: FailureCount,
) -> None:
    """Add what group functions say to the rewards of ``results``, which are those of one ``generate_rollouts``.

    A group is the rollouts of one episode type and one question (``GenerateResult.uid``) that came to their end; those
    that a text ended which is no action are none of it. Where a function fails, all of its group do; as with other
    reward functions, ``on_error`` may say otherwise. What was said
    stands in ``rollout.meta["group"]``, since a replay of one top episode can't ask the others. There the first of the
    group also has what the functions asked of judges and tools (:func:`what_was_asked`), none of which trains.
    """
    groups: dict[Hashable, list[tuple[int, GenerateResult]]] = {}
    for place, head in enumerate(results):
        for result in chain_of(head):
            rollout = result.rollout
            played = rollout.error is None and "dropped" not in rollout.meta and rollout.meta.get("ended") != INVALID
            if played and arena.episodes[rollout.episode_type].rubric.is_grouped:
                groups.setdefault((rollout.episode_type, result.uid), []).append((place, result))
    running = []
    for members in groups.values():
        place, first = members[0]
        # Judges get seeds of the group's own. Their answers stand with the parent; at the top, where each episode is
        # played again alone, on a tape of the group's, which is told in ``meta``.
        name = "group" if parent is None and first is results[place] else f"group {first.rollout.id}"
        part = (contexts[place] if parent is None else parent).branch(name)
        if parent is None:
            part.tape = Tape(EpisodeRequest(first.rollout.episode_type, first.rollout.artifact), part.rollout.seed, {})
        running.append(_score(arena, [result for _, result in members], part, parent, failures))
    await run_all(running)


def chain_of(head: GenerateResult) -> list[GenerateResult]:
    """An episode and those that continue it."""
    return [head, *(child for child in head.children if "continues" in child.rollout.meta)]


async def _score(
    arena: Arena,
    group: Sequence[GenerateResult],
    part: EpisodeContext,
    parent: EpisodeContext | None,
    failures: FailureCount,
) -> None:
    rubric = arena.episodes[group[0].rollout.episode_type].rubric
    told: list[dict[str, Any]]
    try:
        with inside(part):
            scores = await rubric.score_group([result.rollout for result in group], arena)
        told = [asdict(score) for score in scores]
    except LeakError:
        raise
    except Exception as error:
        told = [{"error": "".join(traceback.format_exception(error))} for _ in group]
    finally:
        if parent is not None:
            parent.adopt(part, selected=False)
    if parent is None and isinstance(part.tape, Tape):
        told[0] |= what_was_asked(part.tape)
    for result, said in zip(group, told, strict=True):
        tell(result, said)
        if result.rollout.error is not None:
            failures.add(result.rollout.error)


def what_was_asked(tape: Tape) -> dict[str, Any]:
    """Every model call and reading on ``tape`` in the order in which they began, as JSON can hold them, and how many
    tokens were sampled for them.

    ``"asked"`` has a call as its step, with ``"error"`` where it failed, and a reading as ``{"read", "of", "value",
    "error"}``.
    """
    calls = [thing for kind, thing in tape.events if kind == ASK and isinstance(thing, Call)]
    sampled = [call.step.completion_token_ids for call in calls if call.step and "cached" not in call.step.info]
    asked = [_plain(thing) for kind, thing in tape.events if kind in (ASK, READ)]
    return {"sampled_tokens": sum(map(len, sampled)), **({"asked": asked} if asked else {})}


def _plain(thing: Call | Reading) -> dict[str, Any]:
    if isinstance(thing, Reading):
        return reading_to_json(thing)
    failed = {} if thing.error is None else {"error": list(thing.error)}
    return {**jsonable(thing.step or empty_step(thing)), **failed}


def tell(result: GenerateResult, said: Mapping[str, Any]) -> None:
    """Add what group functions ``said`` of this rollout, which then stands in its ``meta``."""
    rollout = result.rollout
    rollout.meta["group"] = dict(said)
    rollout.metrics.update(said.get("metrics", {}))
    try:
        if "error" not in said and said["dropped"] is None:
            for actor, reward in said["rewards"].items():
                total = rollout.rewards.get(actor, 0.0) + reward
                where = f"the rewards of {rollout.id!r} with its group's, actor {actor!r}"
                rollout.rewards[actor] = check_reward(total, where)
            keep_tokens(rollout, said.get("token_rewards", {}))
            check_rewarded(rollout)
            return
    except (TypeError, ValueError) as error:
        spent = {name: said[name] for name in ("sampled_tokens", "asked") if name in said}
        rollout.meta["group"] = said = {"error": "".join(traceback.format_exception(error)), **spent}
    rollout.rewards = {}
    if "error" in said:
        rollout.error = said["error"]
    else:
        rollout.meta["dropped"], result.is_trainable = said["dropped"], False
