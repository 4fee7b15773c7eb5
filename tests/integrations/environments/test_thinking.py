"""Every foreign environment, played by a model whose thoughts name moves: finished and cut."""

from __future__ import annotations

import pytest

from turnwise.inference import Reply

from .cases import CASES, LAKE, Case, param
from .helpers import played, random_reply, request_of

OTHERS = [case for case in CASES if case.task not in (LAKE.task, "gymnasium:Blackjack-v1")]
DOZEN = [param(case) for case in [LAKE, *OTHERS, Case("reasoning_gym:chain_sum", {"size": 20})]]


def outcome(rollouts):
    """What each actor was shown, said and earned."""
    return [
        (rollout.rewards, [(step.actor_id, step.prompt, step.completion.strip()) for step in rollout.steps])
        for rollout in rollouts
    ]


def reply_of(task):
    return (lambda request: "7") if "reasoning_gym" in task.name else random_reply(task)


async def played_by(task, script):
    requests = task.requests(1, 2, 1) if "reasoning_gym" in task.name else [request_of(task, seed) for seed in (1, 2)]
    return await played(task, requests, script, check_private=True)


@pytest.mark.parametrize("case", DOZEN)
async def test_a_finished_thought_changes_nothing(case, build):
    task = build(case, max_tokens=9999)
    reply = reply_of(task)

    def thinking(request):
        shown = request.messages[-1]["content"]
        thought = f"I read: {shown} My hidden plan is to play {shown[-40:]}, or <answer>3</answer>."
        return f"<think>{thought}</think>{reply(request)}"

    plain, thought = outcome(await played_by(task, reply)), outcome(await played_by(task, thinking))
    assert thought == plain and "hidden plan" not in str(thought)


@pytest.mark.parametrize("case", DOZEN)
async def test_a_cut_thought_is_no_move(case, build):
    task = build(case, max_tokens=9999)
    reply = reply_of(task)
    silent = await played_by(task, lambda request: Reply("", finish_reason="length"))
    cut = await played_by(task, lambda request: Reply(f"<think>{reply(request)}", finish_reason="length"))
    assert outcome(cut) == outcome(silent)
    assert all(step.in_thought for rollout in cut for step in rollout.steps)
