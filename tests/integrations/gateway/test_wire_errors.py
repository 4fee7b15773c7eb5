"""Refusals of single requests through the SDKs: status, class of the exception, and number of requests."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from urllib.parse import urlsplit

from turnwise.types import Sampling

from .helpers import ADD, USER, play
from .wires import Chat, Messages, Responses, both, every, refusal, refused

URLS = ("base_url", "anthropic_base_url")


# -- keys and names ----------------------------------------------------------------------------------------------------
@both
def test_wrong_keys_and_unknown_sessions_look_the_same(wire, requests):
    async def agent(seen, models):
        seen.append(models["solver"])
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        if seen[1] is not models["solver"]:
            return  # one of two sessions makes the requests
        model, elsewhere = seen[1], {}
        for url in URLS:
            elsewhere[url] = getattr(model, url).replace(model.base_url.split("/")[4], "0" * 32)
        wrong = [{"api_key": "x" * 43}, {"api_key": seen[0].api_key}, {"api_key": models["checker"].api_key}]
        nowhere = SimpleNamespace(**elsewhere, api_key=model.api_key)
        calls = [(model, client) for client in wrong] + [(nowhere, {})]
        refusals = [
            await refused(wire, place, status=401, name="AuthenticationError", client=client) for place, client in calls
        ]
        assert all(error.body == refusals[0].body for error in refusals)

    played = play(agent, ["4"], attempts=2, actors=("solver", "checker"))
    assert len(requests) == 4 and played.ended == 2
    assert played.steps == []


def test_missing_and_unreadable_keys():
    headers = [b"X: y", b"Authorization: Bearer", b"x-api-key: \xff\xfe", b"Authorization: \xc3\xbc"]

    async def agent(seen, models):
        parts = urlsplit(models["solver"].base_url)
        for header in headers:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: 2\r\n"
            writer.write(head.encode() + header + b"\r\n\r\n{}")
            seen.append((await reader.read()).split(b"\r\n")[0])
            writer.close()

    assert play(agent, ["4"]).seen == [b"HTTP/1.1 401 Unauthorized"] * len(headers)


def test_keys_differ_and_never_show():
    async def agent(seen, models):
        seen += models.values()

    played = play(agent, ["4"], attempts=3, actors=("solver", "checker"))
    keys = {model.api_key for model in played.seen}
    assert len(keys) == 6 and min(map(len, keys)) >= 43
    for model in played.seen:
        assert model.api_key not in repr(model) + model.base_url + model.anthropic_base_url


@both
def test_unknown_actor_is_refused_with_the_known_names(wire, requests):
    async def agent(seen, models):
        url = models["solver"].base_url if wire is Chat else models["solver"].anthropic_base_url
        # The session's own URL takes the actor from the body.
        for part, actor in (("/judge", "solver"), ("", "judge")):
            root = {"base_url": url.replace("/solver", part)}
            error = await refused(wire, models["solver"], status=404, name="NotFoundError", client=root, actor=actor)
            assert "'solver', 'checker'" in str(error)
        async with wire.client(models["checker"], **root) as client:
            await wire.ask(client, actor="checker")

    played = play(agent, ["4"], actors=("solver", "checker"))
    assert [step.actor_id for step in played.steps] == ["checker"]
    assert len(requests) == 3


def test_unknown_route_names_the_known_ones():
    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            error = await refusal(Chat, client.embeddings.create(model="solver", input="x"), 404, "NotFoundError")
            assert "chat/completions" in str(error)

    play(agent, ["4"])


# -- what can't be served ----------------------------------------------------------------------------------------------
def user(**part):
    return {"messages": [{"role": "user", "content": [part]}]}


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLING = {"messages": [*USER, {"role": "assistant", "content": "4", "tool_calls": [CALL]}]}
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def results(wire, *ids):
    """A chat whose second message calls ``a`` and ``b``, and the results of ``ids``."""
    named = [wire.results({name: "4"})[0] for name in ids]
    if wire is Messages:
        calls = [{"type": "tool_use", "id": name, "name": "add", "input": {}} for name in "ab"]
        content = [block for message in named for block in message["content"]] or "y"
        return {"messages": [*USER, {"role": "assistant", "content": calls}, {"role": "user", "content": content}]}
    if wire is Responses:
        calls = [{"type": "function_call", "call_id": name, "name": "add", "arguments": "{}"} for name in "ab"]
        return {"messages": [*USER, *calls, *named, *USER]}
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in "ab"]
    return {"messages": [*USER, {"role": "assistant", "tool_calls": calls}, *named, *USER]}


def wrong_results(wire):
    wrong = [("messages[3].tool_call_id", ids) for ids in ("ax", "aa")]
    return [(param, results(wire, *ids)) for param, ids in [*wrong, ("messages[1].tool_calls", "b")]]


UNSUPPORTED = {
    Chat: [
        ("messages[0].content[0]", user(type="image_url", image_url={"url": "data:image/png;base64,AA=="})),
        ("messages[0].content[0]", user(type="input_audio", input_audio={"data": "AA==", "format": "wav"})),
        *wrong_results(Chat),
        ("messages[1].tool_calls", results(Chat)),
        ("messages", CALLING),
        ("logit_bias", {"logit_bias": {"7": 1}}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("n", {"n": 17}),
        ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}),
        ("tool_choice", {"tools": [ADD], "tool_choice": "sometimes"}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 2}),
        *((name, {"extra_body": {name: 0.5}}) for name in PENALTIES),
        ("previous_response_id", {"extra_body": {"previous_response_id": "resp_1"}}),
        ("tools[0]", {"tools": [{"type": "custom", "custom": {"name": "add"}}]}),
    ],
    Messages: [
        (
            "messages[0].content[0]",
            user(type="image", source={"type": "base64", "media_type": "image/png", "data": "AA=="}),
        ),
        ("tool_choice", {"tools": Messages.tools, "tool_choice": {"type": "tool", "name": "sub"}}),
        ("container", {"extra_body": {"container": "x"}}),
        ("context_management", {"extra_body": {"context_management": {"edits": [{"type": "compact_20260112"}]}}}),
        ("tools[0]", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        *wrong_results(Messages),
    ],
    Responses: [
        *wrong_results(Responses),
        ("text.format", {"text": {"format": {"type": "grammar"}}}),
        ("conversation", {"conversation": "conv_1"}),
        ("tools[0]", {"tools": [{"type": "web_search"}]}),
        ("input[0]", {"messages": [{"type": "computer_call_output", "call_id": "x", "output": {}}]}),
        ("background", {"background": True}),
    ],
}


@every
def test_unsupported_part_is_named(wire, requests):
    async def agent(seen, models):
        for param, options in UNSUPPORTED[wire]:
            error = await refused(wire, models["solver"], status=400, name="BadRequestError", **options)
            assert param in str(error)
            assert wire is Messages or (error.code, error.param) == ("unsupported", param)

    played = play(agent, ["4"])
    assert len(requests) == len(UNSUPPORTED[wire])
    assert played.steps == []
    assert played.metrics["gateway/refused/unsupported/solver"] == len(requests)


@both
def test_template_without_tools_refuses_them(wire, requests, monkeypatch):
    monkeypatch.setattr("turnwise.chat.formats.ChatFormat._shows_tools", False)

    async def agent(seen, models):
        error = await refused(wire, models["solver"], status=400, name="BadRequestError", tools=wire.tools)
        assert "tools" in str(error)

    play(agent, ["4"])
    assert len(requests) == 1


@both
def test_prompts_and_bodies_that_are_too_long(wire, requests):
    prompt, body = ([{"role": "user", "content": "x" * length}] for length in (300, 3000))
    large = {Chat: "APIStatusError", Messages: "ContentTooLargeError"}[wire]

    async def agent(seen, models):
        options = {"max_tokens": 50}
        error = await refused(wire, models["solver"], status=400, name="BadRequestError", messages=prompt, **options)
        assert "319 tokens" in str(error) and "199" in str(error)
        assert wire is Messages or error.code == "context_length_exceeded"
        assert "max_body" in str(await refused(wire, models["solver"], status=413, name=large, messages=body))

    options = {"max_context": 200, "sampling": Sampling(max_tokens=50)}
    played = play(agent, ["4"], max_body=2000, arena_options=options)
    assert len(requests) == 2 and played.steps == []


# -- requests that are no requests -------------------------------------------------------------------------------------
def post(wire, client, body):
    headers = {"headers": {"Content-Type": "application/json"}}
    return client.post(wire.path, cast_to=object, content=body, options=headers)


NO_JSON = [b"", b"{", b"\xff\xfe", b"[1]", b'"x"', b"[" * 100_000, b'{"messages": ' + b"[" * 3000,
           b'{"n": ' + b"1" * 9999]  # fmt: skip


@every
def test_body_that_is_no_json(wire, requests):
    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            for body in NO_JSON:
                await refusal(wire, post(wire, client, body), 400, "BadRequestError")

    play(agent, ["4"])
    assert len(requests) == len(NO_JSON)


@both
def test_foreign_host_header(wire, requests):
    async def agent(seen, models):
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
            headers = {"default_headers": {"Host": host}}
            await refused(wire, models["solver"], status=421, name="APIStatusError", client=headers)

    play(agent, ["4"])
    assert len(requests) == 3


@both
def test_deeply_nested_request_is_answered(wire, requests):
    """A nest that Python's parser still takes must not break what reads it later."""
    tool = {Chat: b'{"type":"function","function":{"name":"add","parameters":%b}}'}.get(
        wire, b'{"name":"add","input_schema":%b}'
    )
    body = b'{"model":"solver","max_tokens":9,"messages":[{"role":"user","content":"x"}],"tools":[%b]}'

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            for levels in (900, 970, 990):
                nest = b'{"a":' * levels + b"1" + b"}" * levels
                with contextlib.suppress(wire.sdk.BadRequestError):
                    await post(wire, client, body % (tool % nest))
                await wire.ask(client)

    play(agent, ["4"])
    assert len(requests) == 6
