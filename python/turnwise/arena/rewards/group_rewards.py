"""Group rewards: calls the rubric's functions of ``rollouts`` once all rollouts of a question are finished."""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from turnwise.arena.recording.recorder import ASK, READ, EpisodeRecorder, RecordedInput, empty_step, input_to_json
from turnwise.arena.recording.rollouts_jsonl import jsonable
from turnwise.arena.rewards.inherit import fail_children, inherit_rewards
from turnwise.arena.rewards.invalid_action import INVALID
from turnwise.arena.rewards.token_rewards import check_reward, check_rewarded, keep_tokens
from turnwise.arena.runtime.concurrency import FailureBudget, gather_or_cancel
from turnwise.arena.runtime.context import EpisodeContext, ModelCall, use_context
from turnwise.arena.runtime.private_text import LeakError
from turnwise.samples.ledger import noted
from turnwise.types import EpisodeRequest, GenerateResult
from turnwise.types.protocols import ArenaRuntime
from turnwise.utils.signals import exits_as_errors


async def score_groups(
    arena: ArenaRuntime,
    results: Sequence[GenerateResult],
    contexts: Sequence[EpisodeContext],
    parent: EpisodeContext | None,
    failures: FailureBudget,
) -> None:
    """Add the group functions' values to the rewards of ``results``, all from one ``generate_rollouts`` call.

    A group is the finished rollouts of one episode type and one question (``GenerateResult.group_id``), without those
    that an invalid action ended. If a function fails, its whole group fails, unless ``on_error`` says otherwise.
    ``rollout.meta["group"]`` records the functions' values, because a replay of one episode lacks the other rollouts.
    At the top level, the group's first rollout also records the functions' calls of judges and tools
    (:func:`recorded_calls`). These calls never train.
    """
    groups = scored_groups(arena, results)
    running = []
    for members in groups.values():
        index, first = members[0]
        # A separate branch gives the group's judge calls their own seeds. A parent episode records these calls. At the
        # top, each episode is replayed alone, so the group gets its own recorder, which is saved in ``meta``.
        name = "group" if parent is None and first is results[index] else f"group {first.rollout.id}"
        part = (contexts[index] if parent is None else parent).branch(name)
        if parent is None:
            part.recorder = EpisodeRecorder(
                EpisodeRequest(first.rollout.episode_type, first.rollout.artifact), part.rollout.seed, {}
            )
        running.append(_score(arena, [result for _, result in members], part, parent, failures))
    await gather_or_cancel(running)


def scored_groups(
    arena: ArenaRuntime, results: Sequence[GenerateResult]
) -> dict[Hashable, list[tuple[int, GenerateResult]]]:
    """Return the groups that group functions score, continuations included: by type and question, results with places.

    A place is the index in ``results`` of the episode itself, or of the one that it continues.
    """
    groups: dict[Hashable, list[tuple[int, GenerateResult]]] = {}
    for index, head in enumerate(results):
        for result in with_continuations(head):
            rollout = result.rollout
            played = rollout.error is None and rollout.facts.dropped is None and rollout.meta.get("ended") != INVALID
            if played and arena.episodes[rollout.episode_type].rubric.is_grouped:
                groups.setdefault((rollout.episode_type, result.group_id), []).append((index, result))
    return groups


def with_continuations(head: GenerateResult) -> list[GenerateResult]:
    """Return an episode and the episodes that continue it."""
    return [head, *(child for child in head.children if "continues" in child.rollout.meta)]


async def _score(
    arena: ArenaRuntime,
    group: Sequence[GenerateResult],
    part: EpisodeContext,
    parent: EpisodeContext | None,
    failures: FailureBudget,
) -> None:
    rubric = arena.episodes[group[0].rollout.episode_type].rubric
    outcomes: list[dict[str, Any]]
    # An error counts for each rollout of the group.
    try:
        with use_context(part), exits_as_errors("a group function"):
            scores = await rubric.score_group([result.rollout for result in group], arena)
        outcomes = [asdict(score) for score in scores]
    except LeakError:
        raise
    except Exception as error:
        outcomes = [{"error": "".join(traceback.format_exception(error))} for _ in group]
    finally:
        if parent is not None:
            parent.merge(part, selected=False)
    # The group's first rollout keeps the calls that the functions made.
    if parent is None and isinstance(part.recorder, EpisodeRecorder):
        outcomes[0] |= recorded_calls(part.recorder)
    for result, said in zip(group, outcomes, strict=True):
        apply_group_scores(result, said)
        if result.rollout.error is not None:
            failures.add(result.rollout.error)


def recorded_calls(recorder: EpisodeRecorder) -> dict[str, Any]:
    """Return the recorded model calls and inputs as JSON, in the order in which they began, and their sampled tokens.

    ``"asked"`` lists them: a call is its step, with ``"error"`` if it failed; an input is
    ``{"read", "of", "value", "error"}``. ``"sampled_tokens"`` does not count cached answers.
    """
    calls = [thing for kind, thing in recorder.events if kind == ASK and isinstance(thing, ModelCall)]
    sampled = [call.step.completion_token_ids for call in calls if call.step and not call.step.facts.cached]
    asked = [_plain(thing) for kind, thing in recorder.events if kind in (ASK, READ)]
    return {"sampled_tokens": sum(map(len, sampled)), **({"asked": asked} if asked else {})}


def _plain(thing: ModelCall | RecordedInput) -> dict[str, Any]:
    if isinstance(thing, RecordedInput):
        return input_to_json(thing)
    failed = {} if thing.error is None else {"error": list(thing.error)}
    return {**jsonable(thing.step or empty_step(thing)), **failed}


def apply_group_scores(result: GenerateResult, said: Mapping[str, Any]) -> None:
    """Add the group functions' values ``said`` to this rollout's rewards and ``meta``."""
    rollout = result.rollout
    rollout.meta["group"] = dict(said)
    rollout.metrics.update(said.get("metrics", {}))
    try:
        if "error" not in said and said["dropped"] is None:
            with noted(rollout, "group"):
                for actor, reward in said["rewards"].items():
                    total = rollout.rewards.get(actor, 0.0) + reward
                    where = f"the rewards of {rollout.id!r} with its group's, actor {actor!r}"
                    rollout.rewards[actor] = check_reward(total, where)
            keep_tokens(rollout, said.get("token_rewards", {}))
            check_rewarded(rollout)
            inherit_rewards(result)
            return
    except (TypeError, ValueError) as error:
        spent = {name: said[name] for name in ("sampled_tokens", "asked") if name in said}
        rollout.meta["group"] = said = {"error": "".join(traceback.format_exception(error)), **spent}
    rollout.rewards = {}
    if "error" in said:
        rollout.error = said["error"]
        fail_children(result)
    else:
        rollout.facts.dropped, result.is_trainable = said["dropped"], False
        inherit_rewards(result)
