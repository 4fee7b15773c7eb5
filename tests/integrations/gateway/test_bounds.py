"""One client can't take the gateway from the others: its connections, its requests, its long chats."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from urllib.parse import urlsplit

import openai
import pytest

from turnwise.chat.continuation import Conversations
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.integrations.gateway.server import standing
from turnwise.integrations.gateway.session import LONG
from turnwise.integrations.gateway.settings import GatewaySettings

from .helpers import USER, arena_of, play, scripted


async def raw(model, path: str, body: bytes, length: int | None = None) -> tuple[int, dict]:
    """Send a body as it is. Return the status and the answer."""
    url = urlsplit(model.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        f"POST {url.path}{path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {model.api_key}\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    writer.write(head.encode() + body)
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


def test_settings_are_numbers_above_zero():
    for name in ("max_total_body", "max_total_tokens", "max_connections", "max_children", "max_depth"):
        with pytest.raises(ValueError, match=f"{name}=0: expected a number > 0"):
            GatewaySettings(**{name: 0})
