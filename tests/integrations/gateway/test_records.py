"""Records of an agent's calls: a prompt has what is new in it, also where two chats of one actor take turns."""

from __future__ import annotations

import json

import openai

from turnwise.types.short_prompts import FOLLOWS, whole_episode

from ...arena.replaying import row_of
from .helpers import play


def agent_of(turns: int):
    async def agent(seen, models):
        async with openai.AsyncOpenAI(base_url=models["solver"].base_url, api_key=models["solver"].api_key) as client:
            chats = [[{"role": "system", "content": "Be brief."}] for _ in range(2)]
            for turn in range(turns):
                for chat, name in zip(chats, "ab", strict=True):
                    chat.append({"role": "user", "content": f"Question {turn} of {name}"})
                    answer = await client.chat.completions.create(model="solver", messages=chat)
                    chat.append({"role": "assistant", "content": answer.choices[0].message.content})

    return agent


def test_a_line_grows_as_the_turns_of_an_agents_chats_and_gives_them_back():
    sizes = []
    for turns in (4, 16):
        [result] = play(agent_of(turns), ["It is 4.", "It is 5.", "No."]).results
        row = row_of(result)
        sizes.append(len(json.dumps(row)))
        assert [FOLLOWS in step for step in row["steps"]] == [False] + [True] * (2 * turns - 1)
        earlier = [step[FOLLOWS]["step"] for step in row["steps"][2:]]
        assert earlier == list(range(2 * turns - 2)), "each goes on in its own chat"
        for step, whole in zip(result.rollout.steps, whole_episode(row)["steps"], strict=True):
            assert (step.prompt, step.prompt_token_ids) == (list(whole["prompt"]), list(whole["prompt_token_ids"]))
    assert sizes[1] / sizes[0] < 4**1.1
