"""Sessions that are over, calls that wait, and models that fail, through both SDKs."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import httpx
import pytest

from turnwise.inference.scripted import Reply
from turnwise.integrations.gateway import AgentEpisode, Gateway, GatewaySession
from turnwise.types import EpisodeRequest, ModelError

from .helpers import USER, Hanging, arena_of, play
from .wires import Chat, both, every, refusal, refused


# -- sessions that are over --------------------------------------------------------------------------------------------
@both
def test_too_many_calls(wire, requests):
    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            for _ in range(2):
                await wire.ask(client)
            error = await refusal(wire, wire.ask(client), 410, "APIStatusError")
            assert "max_calls=2" in str(error)

    played = play(agent, ["4"], max_calls=2)
    assert len(requests) == 3 and len(played.steps) == 2


@both
@pytest.mark.parametrize("ends", ["returns", "fails", "passes its deadline"])
def test_call_after_the_end(wire, ends, requests):
    kept, error = [], {"returns": "has ended", "fails": "RuntimeError", "passes its deadline": "deadline"}[ends]

    async def agent(seen, models):
        kept.append(models["solver"])
        if ends == "fails":
            raise RuntimeError("no agent")
        if ends == "passes its deadline":
            await asyncio.sleep(60)

    async def after():
        assert error in str(await refused(wire, kept[0], status=410, name="APIStatusError"))
        wrong = {"api_key": "x" * 43}
        await refused(wire, kept[0], status=401, name="AuthenticationError", client=wrong)

    play(agent, ["4"], timeout=0.2 if "deadline" in ends else 60.0, fails=True, after=after)
    assert len(requests) == 2


@both
def test_call_that_runs_past_the_end_of_its_session(wire, requests, monkeypatch):
    monkeypatch.setattr(GatewaySession, "grace", 0.1)
    tasks = []

    async def agent(seen, models):
        call = refused(wire, models["solver"], status=410, name="APIStatusError")
        tasks.append(asyncio.ensure_future(call))
        while not requests:
            await asyncio.sleep(0.01)

    async def after():
        assert "over" in str(await tasks[0])

    played = play(agent, [Reply("4", delay=float("inf"))], after=after)
    assert len(requests) == 1
    assert played.metrics["gateway/aborted/solver"] == 1 and played.steps == []


# -- the model ---------------------------------------------------------------------------------------------------------
@both
def test_more_than_max_parallel_wait_and_are_refused_past_call_timeout(wire, requests):
    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            first = asyncio.ensure_future(wire.ask(client, [{"role": "user", "content": "hang"}]))
            while not requests:
                await asyncio.sleep(0.01)
            error = await refusal(wire, wire.ask(client), 429, "RateLimitError")
            assert error.response.headers["retry-after"] == "1"
            assert len(requests) == 4  # the hanging one, and three attempts
            first.cancel()
            await asyncio.sleep(0.1)
            seen.append(wire.text(await wire.ask(client)))

    script = {"hang": Reply("4", delay=float("inf")), "2 + 2": "5"}
    played = play(agent, played_script(script), max_parallel=1, call_timeout=0.3)
    assert played.seen == ["5"]
    # The attempts at one call share its number, and the hanging one spent its own.
    assert [step.turn for step in played.steps] == [2]


def played_script(script):
    def answer(request):
        text = request.messages[-1]["content"]
        return next(line for key, line in script.items() if key in text)

    return answer


@both
def test_waiting_call_is_answered_when_another_one_ends(wire, requests):
    running, most = [0], [0]

    async def slow(request):
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.05)
        running[0] -= 1
        return "4"

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            await asyncio.gather(*(wire.ask(client) for _ in range(8)))

    played = play(agent, slow, max_parallel=2)
    assert (len(played.steps), most[0], len(requests)) == (8, 2, 8)
    assert sorted(step.turn for step in played.steps) == list(range(8))
    assert played.metrics["gateway/parallel_calls/solver"] == 7


@both
@pytest.mark.parametrize("retries", [0, 2])
def test_failure_of_the_model_is_told_once_and_fails_the_episode(wire, retries, requests):
    async def agent(seen, models):
        options = {"client": {"max_retries": retries}}
        status, name = (410, "APIStatusError") if retries else (502, "InternalServerError")
        error = await refused(wire, models["solver"], status=status, name=name, **options)
        assert "out of memory" in str(error)
        error = await refused(wire, models["solver"], status=410, name="APIStatusError", messages=[*USER, *USER])
        assert "out of memory" in str(error)
        return 1.0

    played = play(agent, [ModelError("out of memory")], fails=True)
    assert "ModelError: out of memory" in played.error
    assert played.ended == 1
    assert len(requests) == (3 if retries else 2)
    assert played.results[0].rollout.rewards == {} and played.steps == []


@every
@pytest.mark.parametrize("fails", [False, True])
def test_streams_that_wait_for_their_answer(wire, fails, monkeypatch):
    """Comments keep the connection open; the SDKs skip them, and get an error that comes after them."""
    monkeypatch.setattr("turnwise.integrations.gateway.service.server.KEEP_ALIVE", 0.02)

    async def slow(request):
        await asyncio.sleep(0.1)
        return ModelError("out of memory") if fails else "4"

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            if not fails:
                seen.append(wire.text(await wire.streamed(client)))
                return
            with pytest.raises(wire.sdk.APIError, match="out of memory"):
                async for _ in await wire.ask(client, stream=True):
                    pass

    played = play(agent, slow, fails=fails)
    assert played.ended == 1
    assert "out of memory" in played.error if fails else played.seen == ["4"]


def test_a_stream_that_waits_begins_with_comments(monkeypatch):
    monkeypatch.setattr("turnwise.integrations.gateway.service.server.KEEP_ALIVE", 0.02)

    async def slow(request):
        return await asyncio.sleep(0.1, "4")

    async def agent(seen, models):
        model, body = models["solver"], {"model": "solver", "messages": USER, "stream": True}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {model.api_key}"}) as client:
            seen.append((await client.post(f"{model.base_url}/chat/completions", json=body)).text)

    assert play(agent, slow).seen[0].startswith(": keep-alive\n\n: keep-alive\n\n")


def test_answers_say_that_the_connection_closes():
    """A client must not send its next request on a connection that the server closes."""

    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            for options in ({}, {"stream": True}):
                answer = await client.chat.completions.with_raw_response.create(
                    model="solver", messages=USER, **options
                )
                seen.append(answer.headers["connection"].lower())
            with pytest.raises(Chat.sdk.BadRequestError) as error:
                await Chat.ask(client, n=99)
            seen.append(error.value.response.headers["connection"].lower())

    assert play(agent, ["4"]).seen == ["close"] * 3


@pytest.mark.parametrize("cancels", [1, 2, 3])
def test_cancelled_batch_leaves_no_session_no_call_and_no_port(cancels, monkeypatch):
    monkeypatch.setattr(GatewaySession, "grace", 0.5)
    script, urls = Hanging(), []

    async def agent(question, models):
        urls.append(models["solver"].base_url)
        async with Chat.client(models["solver"], max_retries=0) as client:
            await Chat.ask(client)

    arena, gateway = arena_of(script), Gateway(renderer="template")
    arena.add_episode(AgentEpisode(agent, gateway, actors=["solver"]))

    async def run():
        playing = asyncio.ensure_future(arena.generate_rollouts([EpisodeRequest("agent", "x")]))
        while not script.asked:
            await asyncio.sleep(0.01)
        for _ in range(cancels):
            playing.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await playing
        await asyncio.sleep(0.1)
        assert not gateway.sessions and len(script.cancelled) == 1
        parts = urlsplit(urls[0])
        with pytest.raises(OSError):
            await asyncio.open_connection(parts.hostname, parts.port)

    asyncio.run(run())
