"""Refusals of single requests through both SDKs: status, class of the exception, and number of requests."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from turnwise.types import Sampling

from .helpers import ADD, USER, play
from .sdks import Anthropic, OpenAI, both, refusal, refused


# -- keys and names ----------------------------------------------------------------------------------------------------
@both
@pytest.mark.parametrize("key", ["wrong", "of another session"])
def test_wrong_keys_and_unknown_sessions_look_the_same(api, key, requests):
    async def agent(seen, models):
        seen.append(models["solver"])
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        if seen[1] is not models["solver"]:
            return  # one of two sessions makes the requests
        model, wrong = seen[1], {"wrong": "x" * 43, "of another session": seen[0].api_key}[key]
        options = {"client": {"api_key": wrong}}
        refusals = [await refused(api, model, status=401, name="AuthenticationError", **options)]
        elsewhere = {url: getattr(model, url).replace(model.base_url.split("/")[4], "0" * 32) for url in URLS}
        nowhere = SimpleNamespace(**elsewhere, api_key=model.api_key)
        refusals.append(await refused(api, nowhere, status=401, name="AuthenticationError"))
        assert refusals[0].body == refusals[1].body

    played = play(agent, ["4"], attempts=2)
    assert len(requests) == 2
    assert played.steps == []


URLS = ("base_url", "anthropic_base_url")


@pytest.mark.parametrize(
    "header", [b"X: y", b"Authorization: Bearer", b"x-api-key: \xff\xfe", b"Authorization: \xc3\xbc"]
)
def test_missing_and_unreadable_keys(header):
    async def agent(seen, models):
        parts = urlsplit(models["solver"].base_url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: 2\r\n"
        writer.write(head.encode() + header + b"\r\n\r\n{}")
        seen.append((await reader.read()).split(b"\r\n")[0])
        writer.close()

    assert play(agent, ["4"]).seen == [b"HTTP/1.1 401 Unauthorized"]


def test_keys_differ_and_never_show():
    async def agent(seen, models):
        seen += models.values()

    played = play(agent, ["4"], attempts=3, actors=("solver", "checker"))
    keys = {model.api_key for model in played.seen}
    assert len(keys) == 6 and min(map(len, keys)) >= 43
    for model in played.seen:
        assert model.api_key not in repr(model) + model.base_url + model.anthropic_base_url


@both
def test_key_of_another_actor(api, requests):
    async def agent(seen, models):
        other = {"api_key": models["checker"].api_key}
        await refused(api, models["solver"], status=401, name="AuthenticationError", client=other)

    play(agent, ["4"], actors=("solver", "checker"))
    assert len(requests) == 1


@both
def test_unknown_actor_is_refused_with_the_known_names(api, requests):
    async def agent(seen, models):
        root = {"base_url": models["solver"].base_url.replace("/solver", "/judge")}
        if api is Anthropic:
            root = {"base_url": models["solver"].anthropic_base_url.replace("/solver", "/judge")}
        error = await refused(api, models["solver"], status=404, name="NotFoundError", client=root)
        assert "'solver', 'checker'" in str(error)
        # The session's own URL takes the actor from the body.
        root = {"base_url": root["base_url"].replace("/judge", "")}
        error = await refused(api, models["solver"], status=404, name="NotFoundError", client=root, actor="judge")
        assert "'solver', 'checker'" in str(error)
        async with api.client(models["checker"], **root) as client:
            await api.ask(client, actor="checker")

    played = play(agent, ["4"], actors=("solver", "checker"))
    assert [step.actor_id for step in played.steps] == ["checker"]
    assert len(requests) == 3


def test_unknown_route_names_the_known_ones():
    async def agent(seen, models):
        async with OpenAI.client(models["solver"]) as client:
            error = await refusal(OpenAI, client.embeddings.create(model="solver", input="x"), 404, "NotFoundError")
            assert "chat/completions" in str(error)

    play(agent, ["4"])


# -- what can't be served ----------------------------------------------------------------------------------------------
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
AUDIO = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]}]
TWO_SYSTEMS = [{"role": "system", "content": "a"}, *USER, {"role": "system", "content": "b"}]
OPENAI_CASES = {
    "messages[0].content[0]": [{"messages": IMAGE}, {"messages": AUDIO}],
    "messages[2].role": [{"messages": TWO_SYSTEMS}],
    "messages": [{"messages": [*USER, {"role": "assistant", "content": "4"}]}],
    "logit_bias": [{"logit_bias": {"7": 1}}],
    "response_format": [{"response_format": {"type": "json_object"}}],
    "n": [{"n": 17}],
    "tool_choice": [
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        {"tools": [ADD], "tool_choice": "required"},
    ],
    "top_logprobs": [{"logprobs": True, "top_logprobs": 2}],
    "frequency_penalty": [{"frequency_penalty": 0.5}],
    "previous_response_id": [{"extra_body": {"previous_response_id": "resp_1"}}],
    "tools[0]": [{"tools": [{"type": "custom", "custom": {"name": "add"}}]}],
}


@pytest.mark.parametrize("param", OPENAI_CASES)
def test_unsupported_part_is_named(param, requests):
    cases = OPENAI_CASES[param]

    async def agent(seen, models):
        for case in cases:
            error = await refused(OpenAI, models["solver"], status=400, name="BadRequestError", **case)
            assert (error.code, error.param) == ("unsupported", param)
            assert param in str(error)

    played = play(agent, ["4"])
    assert len(requests) == len(cases)
    assert played.steps == []
    assert played.metrics["gateway/refused/unsupported/solver"] == len(cases)


def test_unsupported_part_of_messages_is_named(requests):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    cases = {
        "messages[0].content[0]": {"messages": [{"role": "user", "content": [image]}]},
        "tool_choice": {"tools": Anthropic.tools, "tool_choice": {"type": "tool", "name": "sub"}},
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "top_k": {"extra_body": {"top_k": 3}},
        "tools[0]": {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "messages": {"messages": [*USER, {"role": "assistant", "content": "4"}]},
    }

    async def agent(seen, models):
        for param, case in cases.items():
            error = await refused(Anthropic, models["solver"], status=400, name="BadRequestError", **case)
            assert param in str(error)

    play(agent, ["4"])
    assert len(requests) == len(cases)


def test_unsupported_part_of_responses_is_named(requests):
    cases = {
        "previous_response_id": {"previous_response_id": "resp_1"},
        "text": {"text": {"format": {"type": "json_object"}}},
        "tools[0]": {"tools": [{"type": "web_search"}]},
        "input[0]": {"input": [{"type": "computer_call_output", "call_id": "x", "output": {}}]},
        "background": {"background": True},
    }

    async def agent(seen, models):
        for param, case in cases.items():
            async with OpenAI.client(models["solver"]) as client:
                call = client.responses.create(**{"model": "solver", "input": "x", **case})
                error = await refusal(OpenAI, call, 400, "BadRequestError")
                assert error.param == param

    play(agent, ["4"])
    assert len(requests) == len(cases)


@both
def test_template_without_tools_refuses_them(api, requests, monkeypatch):
    monkeypatch.setattr("turnwise.chat.formats.ChatFormat._shows_tools", False)

    async def agent(seen, models):
        error = await refused(api, models["solver"], status=400, name="BadRequestError", tools=api.tools)
        assert "tools" in str(error)

    play(agent, ["4"])
    assert len(requests) == 1


@both
def test_long_prompt_is_refused_with_both_numbers(api, requests):
    long = [{"role": "user", "content": "x" * 300}]

    async def agent(seen, models):
        error = await refused(api, models["solver"], status=400, name="BadRequestError", messages=long)
        assert "319 tokens" in str(error) and "199" in str(error)
        if api is OpenAI:
            assert error.code == "context_length_exceeded"

    played = play(agent, ["4"], arena_options={"max_context": 200, "sampling": Sampling(max_tokens=50)})
    assert len(requests) == 1 and played.steps == []


# -- requests that are no requests -------------------------------------------------------------------------------------
@both
def test_body_that_is_too_large(api, requests):
    name = {OpenAI: "APIStatusError", Anthropic: "ContentTooLargeError"}[api]

    async def agent(seen, models):
        long = [{"role": "user", "content": "x" * 3000}]
        error = await refused(api, models["solver"], status=413, name=name, messages=long)
        assert "max_body" in str(error)

    play(agent, ["4"], max_body=2000)
    assert len(requests) == 1


@both
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[1]", b'"x"', b"[" * 100_000, b'{"messages": ' + b"[" * 3000, b'{"n": ' + b"1" * 9999],
)
def test_body_that_is_no_json(api, body, requests):
    async def agent(seen, models):
        async with api.client(models["solver"]) as client:
            headers = {"headers": {"Content-Type": "application/json"}}
            call = client.post(api.path, cast_to=object, content=body, options=headers)
            await refusal(api, call, 400, "BadRequestError")

    play(agent, ["4"])
    assert len(requests) == 1


@both
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
def test_foreign_host_header(api, host, requests):
    async def agent(seen, models):
        headers = {"default_headers": {"Host": host}}
        await refused(api, models["solver"], status=421, name="APIStatusError", client=headers)

    play(agent, ["4"])
    assert len(requests) == 1


@both
@pytest.mark.parametrize("levels", [900, 970, 990])
def test_deeply_nested_request_is_answered(api, levels, requests):
    """A nest that Python's parser still takes must not break what reads it later."""
    nest = b'{"a":' * levels + b"1" + b"}" * levels
    tool = {OpenAI: b'{"type":"function","function":{"name":"add","parameters":%b}}'}.get(
        api, b'{"name":"add","input_schema":%b}'
    )
    body = (
        b'{"model":"solver","max_tokens":9,"messages":[{"role":"user","content":"x"}],"tools":[' + tool % nest + b"]}"
    )

    async def agent(seen, models):
        async with api.client(models["solver"]) as client:
            headers = {"headers": {"Content-Type": "application/json"}}
            with contextlib.suppress(api.sdk.BadRequestError):
                await client.post(api.path, cast_to=object, content=body, options=headers)
            await api.ask(client)

    play(agent, ["4"])
    assert len(requests) == 2
