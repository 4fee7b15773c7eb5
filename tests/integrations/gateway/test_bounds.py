"""One client can't take the gateway from the others: its connections, its requests, its long chats."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from urllib.parse import urlsplit

import openai
import pytest

from turnwise.chat.continuation import Conversations, LongChatError
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.integrations.gateway.service import reading
from turnwise.integrations.gateway.service.standing import standing
from turnwise.integrations.gateway.sessions import limits
from turnwise.integrations.gateway.sessions.limits import LONG
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.gateway.wire import openai_chat

from .helpers import ADD, USER, Hanging, arena_of, play, scripted


async def sent(model, path: str, body: bytes, length: int | None = None, more: str = "", host: str | None = None):
    """Send a body as it is. Return the connection."""
    url = urlsplit(model.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        f"POST {url.path}{path} HTTP/1.1\r\nHost: {host or url.netloc}\r\nAuthorization: Bearer {model.api_key}\r\n"
        f"{more}Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return reader, writer


async def raw(model, path: str, body: bytes, length: int | None = None, **head: str) -> tuple[int, dict]:
    """Send a body as it is. Return the status and the answer."""
    reader, writer = await sent(model, path, body, length, **head)
    head, _, begun = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n\r\n")
    lines = dict(line.split(b": ", 1) for line in head.splitlines()[1:])
    answer = json.loads(begun + await reader.readexactly(int(lines[b"Content-Length"])))
    status = int(head.split()[1])
    writer.close()
    return status, answer


async def asks(model):
    chat = model.async_openai_client().chat.completions
    return (await chat.create(model=model.name, messages=USER)).choices[0].message.content


def test_idle_connections_take_no_place_from_an_agent():
    async def agent(seen, models):
        url = urlsplit(models["solver"].base_url)
        idle = []
        for _ in range(60):
            idle.append(socket.create_connection((url.hostname, url.port)))
            idle[-1].sendall(b"G")
            await asyncio.sleep(0)
        seen.append(await asks(models["solver"]))
        for one in idle:
            one.close()

    assert play(agent, ["4"], max_connections=8).seen == ["4"]


def test_idle_connections_take_no_place_from_clients_of_a_standing_server():
    async def run():
        arena = arena_of(scripted("4"))
        arena.add_episode(AgentEpisode(lambda question, models: 1.0, Gateway(), actors=["solver"]))
        settings = GatewaySettings(renderer="template", max_connections=4)
        async with (
            standing(arena, settings, "k" * 43) as url,
            openai.AsyncOpenAI(base_url=url, api_key="k" * 43) as client,
        ):
            parts = urlsplit(url)
            idle = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(20)]
            answer = await client.chat.completions.create(model="solver", messages=USER)
            for _, writer in idle:
                writer.close()
            return answer.choices[0].message.content

    assert asyncio.run(run()) == "4"


def test_the_prompts_of_a_session_are_bounded_together():
    async def agent(seen, models):
        client = models["solver"].async_openai_client()
        answer = await client.responses.create(model="solver", input="a " * 100)
        ask = {"model": "solver", "input": "on", "previous_response_id": answer.id}
        for _ in range(2):  # a short request of a long chat
            status, counted = await raw(models["solver"], "/responses/input_tokens", json.dumps(ask).encode())
            seen += [status, counted.get("error", {}).get("message", "")]

    seen = play(agent, ["4"], max_total_tokens=300).seen
    assert seen == [200, "", 410, "the session is over: its prompts have max_total_tokens=300 tokens"]


def test_the_requests_of_a_session_are_bounded_together():
    async def agent(seen, models):
        model, body = models["solver"], json.dumps({"model": "solver", "input": "a " * 400}).encode()
        for _ in range(2):
            seen.append((await raw(model, "/responses/input_tokens", body))[0])
        status, answer = await raw(model, "/responses/input_tokens", body)
        seen += [status, answer["error"]["message"]]

    seen = play(agent, ["4"], max_total_body=2000).seen
    assert seen == [200, 200, 410, "the session is over: its requests have max_total_body=2000 bytes"]


def test_a_request_that_does_not_arrive_is_given_up():
    async def agent(seen, models):
        seen.append(await raw(models["solver"], "/chat/completions", b"{", length=100))

    [(status, answer)] = play(agent, ["4"], call_timeout=0.2).seen
    assert status == 408 and answer["error"]["code"] == "body_too_slow"


@pytest.mark.parametrize("path", ["/responses/input_tokens", "/responses"])
def test_long_chats_are_rendered_in_a_thread_one_at_a_time(monkeypatch, path):
    prompt, running, threads = Conversations.prompt, [], {}

    def noted(self, messages, *arguments, **options):
        key = "long" if len(messages[0]["content"]) > LONG else "short"
        running.append(key)
        at_once = running.count(key)
        threads.setdefault(key, set()).add((threading.current_thread() is threading.main_thread(), at_once))
        try:
            return prompt(self, messages, *arguments, **options)
        finally:
            running.remove(key)

    monkeypatch.setattr(Conversations, "prompt", noted)

    async def agent(seen, models):
        bodies = [json.dumps({"model": "solver", "input": "a " * count}).encode() for count in (LONG, LONG, 1)]
        answers = await asyncio.gather(*(raw(models["solver"], path, body) for body in bodies))
        seen += [status for status, _ in answers]

    played = play(agent, ["4"])
    assert played.seen == [200, 200, 200]
    assert threads["long"] == {(False, 1)} and {main for main, _ in threads["short"]} == {True}
    if path.endswith("input_tokens"):
        assert played.metrics["gateway/token_counts/solver"] == 3


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def chat(**fields) -> bytes:
    return json.dumps({"model": "solver", "messages": USER, **fields}).encode()


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": "b" * LONG})}}
TURNS = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": ""},
]
LONG_CHATS = {
    "texts": chat(messages=[{"role": "user", "content": "a " * LONG}]),
    "arguments": chat(messages=[*USER, *TURNS]),
    "reasoning": chat(messages=[*USER, {"role": "assistant", "content": "", "reasoning_content": "b" * LONG}, *USER]),
    "many messages": chat(messages=[{"role": "user", "content": ""}] * 2000),
    "tools": chat(tools=[{"type": "function", "function": {"name": f"t{index}"}} for index in range(1000)]),
    "a schema": chat(response_format={"type": "json_schema", "json_schema": {"schema": {"a": "b" * LONG}}}),
}


@pytest.mark.parametrize("body", LONG_CHATS.values(), ids=LONG_CHATS)
def test_no_long_request_is_read_or_rendered_in_the_event_loop(monkeypatch, body):
    in_loop = []

    def noted(function):
        def note(*arguments, **options):
            in_loop.append(threading.current_thread() is threading.main_thread())
            return function(*arguments, **options)

        return note

    monkeypatch.setattr(Conversations, "prompt", noted(Conversations.prompt))
    for name in ("parse_body", "attempt_from"):
        monkeypatch.setattr(reading, name, noted(getattr(reading, name)))
    monkeypatch.setattr(openai_chat, "parse", noted(openai_chat.parse))

    async def agent(seen, models):
        seen.append((await raw(models["solver"], "/chat/completions", body))[0])

    assert play(agent, ["4"]).seen == [200] and in_loop == [False] * 4


def test_a_short_request_that_continues_a_long_one_is_rendered_in_a_thread(monkeypatch):
    prompt, in_loop = Conversations.prompt, []

    def noted(*arguments, **options):
        in_loop.append(threading.current_thread() is threading.main_thread())
        return prompt(*arguments, **options)

    monkeypatch.setattr(Conversations, "prompt", noted)

    async def agent(seen, models):
        client = models["solver"].async_openai_client().responses
        items = [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c", "name": "f"}]
        items[1]["arguments"] = json.dumps({"a": "b" * LONG})
        items.append({"type": "function_call_output", "call_id": "c", "output": ""})
        answer = await client.create(model="solver", input=items)
        await client.create(model="solver", input="on", previous_response_id=answer.id)

    play(agent, ["4"])
    assert in_loop == [False, False]


def test_a_long_chat_that_goes_on_is_rendered_in_the_event_loop_unless_all_of_it_must_be(monkeypatch):
    prompt, rendered = Conversations.prompt, []

    def noted(*arguments, **options):
        in_loop = threading.current_thread() is threading.main_thread()
        try:
            found = prompt(*arguments, **options)
        except LongChatError:
            rendered.append((in_loop, "too long"))
            raise
        rendered.append((in_loop, "whole" if not found.reused else "new"))
        return found

    monkeypatch.setattr(Conversations, "prompt", noted)

    async def agent(seen, models):
        client = models["solver"].async_openai_client().chat.completions
        messages = [{"role": "user", "content": "a " * LONG}]
        for tools in ([], [], [], [ADD]):
            answer = await client.create(model="solver", messages=messages, tools=tools)
            messages += [answer.choices[0].message.to_dict(), *USER]
            seen.append(answer.usage.prompt_tokens_details.cached_tokens > LONG)

    assert play(agent, ["4"]).seen == [False, True, True, False]
    assert rendered == [(False, "whole"), (False, "new"), (True, "new"), (True, "too long"), (False, "whole")]


STRANGE = {
    "more objects than may be": (
        "/chat/completions",
        chat(messages=[{"role": "user", "content": ""}] * 20_000),
        413,
        "",
    ),
    "deep": ("/chat/completions", chat()[:-1] + f', "tools": {nested(200)}}}'.encode(), 400, "nested too deeply"),
    "deeper": ("/chat/completions", nested(200_000).encode(), 400, "is no JSON"),
    "another encoding": ("/chat/completions", json.dumps({"user": "\ud800"}).encode("utf-16"), 400, "is no JSON"),
    "many stops": ("/chat/completions", chat(stop=["a"] * 65), 400, "more than 64 texts"),
    "a long stop": ("/chat/completions", chat(stop="a" * 1001), 400, "of more than 1000 characters"),
    "a turn of no int64": ("/chat/completions", chat(metadata={"turn": 2**31}), 400, "a whole number from 0 to"),
    "no list": ("/responses", json.dumps({"model": "solver", "input": "x", "include": True}).encode(), 400, "include"),
}


@pytest.mark.parametrize(("path", "body", "status", "said"), STRANGE.values(), ids=STRANGE)
def test_strange_requests_are_refused_and_fail_no_episode(path, body, status, said):
    async def agent(seen, models):
        seen += await raw(models["solver"], path, body)
        seen.append(await asks(models["solver"]))

    got, answer, after = play(agent, ["4"]).seen
    assert (got, after) == (status, "4") and said in answer["error"]["message"]


HEADS = {
    "a host of two ports": ({"host": "a:b:c"}, 421),
    "a host without its port": ({"host": "127.0.0.1:x"}, 421),
    "a port beyond all": ({"host": "127.0.0.1:99999999"}, 200),
    "a host that is no name": ({"host": "xn--"}, 421),
    "a host beyond ASCII": ({"host": "\u00e9\ufeff.."}, 421),
    "a compressed body": ({"more": "Content-Encoding: gzip\r\n"}, 415),
    "more retries than a number has digits": ({"more": f"x-stainless-retry-count: {'9' * 5000}\r\n"}, 200),
}


@pytest.mark.parametrize(("head", "status"), HEADS.values(), ids=HEADS)
def test_strange_headers_leave_no_traceback(head, status, caplog):
    async def agent(seen, models):
        seen.append((await raw(models["solver"], "/chat/completions", chat(), **head))[0])

    assert play(agent, ["4"]).seen == [status]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_requests_that_do_not_arrive_take_no_place_from_others():
    async def agent(seen, models):
        begun = [await sent(models["solver"], "/chat/completions", b"{", 100) for _ in range(20)]
        seen.append(await asks(models["solver"]))
        for _, writer in begun:
            writer.close()

    assert play(agent, ["4"], max_connections=4).seen == ["4"]


def test_requests_count_while_they_arrive():
    async def agent(seen, models):
        _, writer = await sent(models["solver"], "/chat/completions", b"{", 1900)
        body = chat()
        while (status := (await raw(models["solver"], "/responses/input_tokens", body))[0]) != 410:
            assert status == 200 or status == 400  # the first one may not be read yet
        seen.append(status)
        writer.close()

    assert play(agent, ["4"], max_total_body=2000).seen == [410]


def test_requests_under_way_are_bounded_also_those_that_repeat_one(monkeypatch):
    monkeypatch.setattr(limits, "LEAST_UNDER_WAY", 2)
    script = Hanging()

    async def agent(seen, models):
        name = {"more": "Idempotency-Key: one\r\n"}
        begun = [await sent(models["solver"], "/chat/completions", chat(), **name) for _ in range(3)]
        read = [asyncio.ensure_future(reader.readuntil(b"\r\n\r\n")) for reader, _ in begun]
        [refused], _ = await asyncio.wait(read, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        seen += [refused.result().split()[1], len(script.asked)]
        for task, (_, writer) in zip(read, begun, strict=True):
            task.cancel()
            writer.close()

    assert play(agent, script, max_calls=1).seen == [b"429", 1]


def test_settings_are_numbers_above_zero():
    for name in ("max_total_body", "max_total_tokens", "max_connections", "max_children", "max_depth"):
        with pytest.raises(ValueError, match=f"{name}=0: expected a number > 0"):
            GatewaySettings(**{name: 0})
