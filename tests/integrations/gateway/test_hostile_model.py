"""Model texts that no parser expects, through the SDKs: nothing crashes, and the chat goes on."""

from __future__ import annotations

import json

import pytest

from turnwise.inference.scripted import Reply
from turnwise.types import Sampling

from ...chat.families import chat_tokenizer
from .helpers import FAMILIES, USER, play
from .wires import Chat, both, every

NEST = '{"a":' * 500 + "1" + "}" * 500
HOSTILE = [
    f'<tool_call>{{"name": "add", "arguments": {NEST}}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
    "<tool_call>" + "[" * 10_000,
    "</think>\x00\u2028\ufeff</tool_call>",
]


@every
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_model_text_crashes_nothing(wire, family):
    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            for _ in HOSTILE:
                answer = await wire.ask(client, tools=wire.tools, **{wire.limit: 20_000})
                back = wire.sent_back(answer)
                json.loads(json.dumps(back))
                results = wire.results({call: "x" for call, _ in wire.calls(answer)})
                again = [*USER, *back, *(results or USER)]
                await wire.ask(client, again, tools=wire.tools)
                assert [chunk async for chunk in await wire.ask(client, again, tools=wire.tools, stream=True)]

    texts = [text for hostile in HOSTILE for text in (hostile, "4", "4")]
    played = play(agent, texts, family=family, arena_options={"sampling": Sampling(max_tokens=20_000)})
    assert len(played.steps) == 3 * len(HOSTILE)


@both
def test_control_tokens_that_the_model_samples(wire):
    tokenizer = chat_tokenizer("template")
    start, end = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "<|im_end|>"))
    hi = tokenizer.encode("hi", add_special_tokens=False)

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            seen.append(wire.text(await wire.ask(client)))
            await wire.ask(client, [*USER, {"role": "assistant", "content": seen[0]}, *USER])

    # The completion opens a turn of its own, and goes on after its end.
    script = [Reply(token_ids=(*hi, start, *hi, end)), Reply(token_ids=(*hi, end))]
    played = play(agent, script)
    assert played.seen == ["hihi"]
    stream = played.steps[0].prompt_token_ids + played.steps[0].completion_token_ids
    assert played.steps[1].prompt_token_ids[: len(stream)] == stream


def test_lone_surrogates_in_a_request_are_replaced():
    body = b'{"model": "solver", "messages": [{"role": "user", "content": "a\\ud800b \\ud83d\\ude00"}]}'

    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            headers = {"headers": {"Content-Type": "application/json"}}
            await client.post("/chat/completions", cast_to=object, content=body, options=headers)

    played = play(agent, ["4"])
    assert "a\ufffdb \U0001f600" in played.text(played.steps[0].prompt_token_ids)
