"""Prompts to token ids, responses to steps. What a client leaves out is an error, never made up."""

from __future__ import annotations

import asyncio
from collections import UserDict

import numpy as np
import pytest

from turnwise.arena.runtime.prompts import Prompts, to_messages
from turnwise.chat import ChatRenderer
from turnwise.chat.messages import ChatError, well_formed_texts
from turnwise.types import Actor, ModelError, Sampling


@pytest.mark.parametrize(
    "answer",
    [[1, 2], np.array([1, 2]), {"input_ids": [1, 2]}, UserDict(input_ids=[1, 2]), {"input_ids": [[1, 2]]}],
    ids=["list", "array", "mapping", "batch encoding", "batch of one"],
)
def test_token_ids_from_whatever_the_tokenizer_returns(answer):
    class Tokenizer:
        eos_token_id = 0

        def apply_chat_template(self, conversation, **kwargs):
            assert kwargs == {"add_generation_prompt": True, "tokenize": True}
            return answer

        def decode(self, token_ids, **kwargs):
            return ""

    ids = ChatRenderer(Tokenizer()).prompt_ids([{"role": "user", "content": "x"}])
    assert ids == [1, 2] and all(type(token) is int for token in ids)


def test_siblings_prompts_are_encoded_once_and_none_can_spoil_the_others():
    class Counting:
        eos_token_id = 0
        calls = 0

        def apply_chat_template(self, conversation, **kwargs):
            self.calls += 1
            return [len(conversation[0]["content"])]

        def decode(self, token_ids, **kwargs):
            return ""

    cache, tokenizer = Prompts(), Counting()
    format = ChatRenderer(tokenizer)
    first = cache.token_ids(format, [{"role": "user", "content": "x"}])
    first.tolist().append(99)
    assert cache.token_ids(format, [{"role": "user", "content": "x"}]) == [1] and tokenizer.calls == 1
    assert cache.token_ids(format, [{"role": "assistant", "content": "x"}]) == [1], "another role, another prompt"
    calls = tokenizer.calls
    assert cache.token_ids(format, [{"role": "assistant", "content": "x"}]) == [1] and tokenizer.calls == calls
    for length in range(2, 2 + cache.SIZE):
        assert cache.token_ids(format, [{"role": "user", "content": "x" * length}]) == [length]
    assert len(cache._kept) == cache.SIZE
    other = Counting()
    cache.token_ids(ChatRenderer(other), [{"role": "user", "content": "xx"}])
    assert other.calls == 1, "another format, other ids"


@pytest.mark.parametrize("actor", ["solver", None], ids=["actor", "judge"])
def test_text_parts_are_shown_as_one_text_and_other_parts_are_refused(make_arena, actor):
    """Templates showed them as nothing, as Python's repr, or left them out."""
    arena = make_arena()
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2"}]
    asked = [{"role": "developer", "content": "Add."}, {"role": "user", "content": parts, "name": "ann"}]
    response = asyncio.run(arena.call_model(actor, asked))
    assert "".join(map(chr, response.prompt_token_ids)) == "<system>Add.\n<user>2 + 2\n<assistant>"
    assert arena.client.requests[0].messages[1] == {"role": "user", "content": "2 + 2"}
    picture = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    for content, told in ((picture, r"content\[2\]: got a part of type 'image_url'"), (None, "content: got None")):
        with pytest.raises(ChatError, match=rf"messages\[0\].{told}, expected "):
            asyncio.run(arena.call_model(actor, [{"role": "user", "content": content}]))
    with pytest.raises(ChatError, match=r"messages\[0\].role: got 'human', expected one of"):
        asyncio.run(arena.call_model(actor, [{"role": "human", "content": "2 + 2"}]))
    assert len(arena.client.requests) == 1


@pytest.mark.parametrize("prompt", [None, 5, b"hi", {"role": "user", "content": "hi"}])
def test_a_prompt_that_is_no_chat_is_refused(prompt):
    with pytest.raises(TypeError, match="expected a string or a list of messages"):
        to_messages(prompt, None)


def test_text_is_decoded_without_special_tokens_and_the_stop_token_is_kept(make_arena):
    arena = make_arena(lambda prompt, request: "four")
    response = asyncio.run(arena.call_model("solver", "2 + 2"))
    assert response.text == "four"
    assert response.completion_token_ids == [*map(ord, "four"), 0]
    assert "".join(map(chr, response.prompt_token_ids)) == "<user>2 + 2\n<assistant>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_token_ids": []}, "no completion token ids"),
        ({"logprobs": [-0.5]}, "5 completion token ids but 1 log-probabilities"),
        ({"logprobs": []}, "5 completion token ids but 0 log-probabilities"),
        ({"logprobs": [-0.5, -0.5, float("nan"), -0.5, -0.5]}, "not finite"),
        ({"logprobs": [None] * 5}, "not finite"),
        ({"policy_versions": [(4, 7)]}, "policy versions"),
        ({"finish_reason": "eos"}, "the finish reason 'eos'"),
        ({"prompt_token_ids": [1, 2, 3]}, "other prompt token ids"),
    ],
)
def test_a_response_that_is_incomplete_is_an_error(make_arena, response, changes, message):
    arena = make_arena(lambda prompt, request: response("four", **changes))
    with pytest.raises(ModelError, match=message):
        asyncio.run(arena.call_model("solver", "2 + 2"))


def test_sampling_is_the_arenas_then_the_actors_then_the_calls(make_arena):
    actors = (Actor("plain"), Actor("own", sampling=Sampling(temperature=0.3)), Actor("short", max_tokens=5))
    arena = make_arena(actors=actors, sampling=Sampling(temperature=0.7, max_tokens=20))

    async def calls():
        for actor in ("plain", "own", "short"):
            await arena.call_model(actor, "hi")
        await arena.call_model("short", "hi", temperature=0.0, max_tokens=6, seed=3)
        with pytest.raises(TypeError, match="temprature"):
            await arena.call_model("plain", "hi", temprature=0.0)

    asyncio.run(calls())
    drawn = [(request.sampling.temperature, request.sampling.max_tokens) for request in arena.client.requests]
    assert drawn == [(0.7, 20), (0.3, 256), (0.7, 5), (0.0, 6)]
    assert arena.client.requests[3].sampling.seed == 3


def test_the_policy_is_the_actors_unless_the_call_says_otherwise(make_arena):
    arena = make_arena(actors=(Actor("a", policy="small"), Actor("b")))

    async def calls():
        await arena.call_model("a", "hi")
        await arena.call_model("a", "hi", policy="big")
        await arena.call_model(None, "hi")

    asyncio.run(calls())
    assert [request.policy for request in arena.client.requests] == ["small", "big", "default"]
    assert arena.policies == ["small", "default"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plain", "plain"),
        ("\ufeffÄ 💥 ٣\x00", "\ufeffÄ 💥 ٣\x00"),
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\ud83d\udca5", "💥"),
    ],
)
def test_text_that_no_tokenizer_can_encode_is_mended(text, told):
    assert well_formed_texts(text) == told
    assert told.encode().decode() == told
