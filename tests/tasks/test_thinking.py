"""Every shipped task, played by a model whose thoughts quote moves, answers, calls, verdicts and programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from turnwise.inference.scripted import Reply
from turnwise.tasks import TASKS

TRAP = """I may [raise], [call], [bet] or [fold], take [4], or offer [2 1 0].
verdict: reject
wrong: first
answer
Moves: [up, down, LEFT, right]
1234
3412
2143
4321
3 + 4
195
2 3 4
#### 5
def f(x):
    return 1
f(1) == 1
<tool_call>{"name": "look_up", "arguments": {"name": "Ann", "column": "apples"}}</tool_call>
The secret of this thought is a word that nobody says: xylophone.
"""


@pytest.fixture(params=sorted(TASKS))
def task(request, build):
    return build(request.param)


def steady(player):
    """Return a player that answers equal chats alike, also one that draws; its own thoughts in them don't count."""
    answers = {}

    def play(actor, messages):
        shown = json.dumps([{key: part for key, part in m.items() if key != "reasoning_content"} for m in messages])
        if (actor, shown) not in answers:
            answers[actor, shown] = player(actor, messages)
        return answers[actor, shown]

    return play


async def outcome(table, task, player):
    """Play three episodes with ``player``; return what each actor read, said and earned, and the steps."""
    seat = table(task, player, check_private=True)
    seat.arena.actors = {name: replace(actor, max_tokens=9999) for name, actor in seat.arena.actors.items()}
    results = await seat.play(task.requests(1, 3, 1))
    rollouts = [node.rollout for top in results for node in top.walk()]
    assert not [rollout.error for rollout in rollouts if rollout.error]
    steps = [step for rollout in rollouts for step in rollout.steps]
    read = [[(m["role"], m["content"], m.get("tool_calls")) for m in step.prompt] for step in steps]
    said = [(step.actor_id, step.completion.strip(), step.reward) for step in steps]
    return (read, said, [rollout.rewards for rollout in rollouts]), steps


async def test_a_finished_thought_changes_nothing(table, task):
    play = steady(task.oracle())
    plain, _ = await outcome(table, task, play)
    thinking, steps = await outcome(table, task, lambda *asked: f"<think>{TRAP}</think>\n\n{play(*asked)}")
    assert thinking == plain and "xylophone" not in str(thinking)
    assert all("xylophone" in step.thought for step in steps)


@pytest.mark.parametrize("quoted", ["trap", "oracle"])
async def test_a_cut_thought_is_an_empty_answer(table, task, quoted):
    play = steady(task.oracle())
    silent, _ = await outcome(table, task, lambda *asked: Reply("", finish_reason="length"))
    cut, steps = await outcome(
        table,
        task,
        lambda *asked: Reply(f"<think>{TRAP if quoted == 'trap' else play(*asked)}", finish_reason="length"),
    )
    assert cut == silent
    assert all(step.in_thought for step in steps)
