"""Repeated requests and clients that hang up: each answer is one row, and what nobody waits for is not sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import asdict
from urllib.parse import urlsplit

import pytest

from turnwise.arena.recording.lossless_json import decode
from turnwise.arena.recording.recorder import RecordedInput
from turnwise.arena.runtime.context import require_context
from turnwise.arena.runtime.recording_hooks import record_input
from turnwise.integrations.gateway import AgentEpisode, Gateway, GatewaySession
from turnwise.types import EpisodeRequest

from .helpers import USER, Hanging, arena_of, play
from .wires import Chat, Messages, asked, both


def counting(delay=0.0):
    """Return a script that says the number of its call, after ``delay`` seconds."""
    asked = []

    async def answer(request):
        asked.append(request)
        number = str(len(asked))
        await asyncio.sleep(delay)
        return number

    answer.asked = asked
    return answer


async def lost(model, wire=Chat, headers=(), body=None, wait_for=None, read=False):
    """Send a request, and close the connection: at once after ``wait_for()``, or when the answer has arrived."""
    url = model.base_url + ("/chat/completions" if wire is Chat else "/messages")
    parts = urlsplit(url)
    content = json.dumps(body or {"model": "solver", "messages": USER, "max_tokens": 50}).encode()
    lines = [
        f"POST {parts.path} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"Authorization: Bearer {model.api_key}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    answer = b""
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        await writer.drain()
        if wait_for is not None:
            while not wait_for():
                await asyncio.sleep(0.01)
        elif read:
            answer = await reader.read()
    finally:
        writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()


def text_of(answer):
    body = json.loads(answer)
    return body["choices"][0]["message"]["content"] if "choices" in body else body["content"][0]["text"]


RESENT = [("x-stainless-retry-count", "1")]
NAMED = [("Idempotency-Key", "k1")]
OTHER = [("Idempotency-Key", "k2")]
A, B = ({"model": "solver", "messages": [{"role": "user", "content": text}], "max_tokens": 9} for text in "ab")
TURNED = dict(reversed(A.items()))
"""The same request in another order."""

# Calls with their answers, which are the number of the sample.
REPEATED = {
    "sent again": [([], A, "1"), (RESENT, A, "1"), (RESENT, A, "1")],
    "named": [(NAMED, A, "1"), (NAMED, A, "1"), (NAMED, A, "1")],
    "named and sent again": [(NAMED, A, "1"), ([*NAMED, *RESENT], A, "1"), (NAMED, A, "1")],
    "equal, but no repetition": [([], A, "1"), ([], A, "2"), ([], A, "3")],
    "another body sent again": [(RESENT, A, "1"), (RESENT, B, "2"), (RESENT, A, "1")],
    "another body of one name": [(NAMED, A, "1"), (NAMED, B, "2"), (NAMED, A, "1")],
    "another name": [(NAMED, A, "1"), (OTHER, A, "2"), (NAMED, A, "1")],
    "the latest of equal ones": [([], A, "1"), ([], A, "2"), (RESENT, A, "2")],
    "another order": [([], A, "1"), (RESENT, TURNED, "1")],
}


@both
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_requests_get_the_answer_of_the_first(wire, name):
    script, calls = counting(), REPEATED[name]

    async def agent(seen, models):
        for headers, body, _ in calls:
            seen.append(text_of(await lost(models["solver"], wire, headers, body=body, read=True)))

    played = play(agent, script)
    samples = int(max(answer for *_, answer in calls))
    assert played.seen == [answer for *_, answer in calls]
    assert len(script.asked) == samples and [step.turn for step in played.steps] == list(range(samples))
    assert played.metrics.get("gateway/retries_joined/solver", 0) == len(calls) - samples
    assert played.metrics["gateway/calls/solver"] == samples


def test_a_name_holds_in_one_dialect():
    async def agent(seen, models):
        for wire in (Chat, Messages, Chat):
            seen.append(text_of(await lost(models["solver"], wire, NAMED, read=True)))

    assert play(agent, counting()).seen == ["1", "2", "1"]


@both
def test_running_call_is_joined(wire):
    script = counting(delay=0.2)

    async def agent(seen, models):
        answers = await asyncio.gather(
            lost(models["solver"], wire, read=True),
            soon(lambda: lost(models["solver"], wire, RESENT, read=True), lambda: script.asked),
            soon(lambda: lost(models["solver"], wire, RESENT, read=True), lambda: script.asked),
        )
        seen += map(text_of, answers)

    played = play(agent, script)
    assert played.seen == ["1", "1", "1"] and len(played.steps) == 1


async def soon(start, when):
    while not when():
        await asyncio.sleep(0.01)
    return await start()


class Held:
    """A script that says the number of its call, once all ``go``."""

    def __init__(self):
        self.asked, self.cancelled, self.go = [], [], asyncio.Event()

    async def __call__(self, request):
        self.asked.append(request)
        number = str(len(self.asked))
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return number


FRESH = [("x-stainless-retry-count", "0")]
RESENT_TWICE = [("x-stainless-retry-count", "2")]

# Four equal requests with their headers at the same time, the clients that leave, and the equal requests that follow.
PARALLEL = {
    "one is sent again": ([], [0], [RESENT]),
    "one of an SDK's": (FRESH, [0], [RESENT]),
    "the last one": (FRESH, [3], [RESENT]),
    "two are sent again": (FRESH, [1, 2], [RESENT, RESENT]),
    "the first attempt never arrived": ([], [0], [RESENT_TWICE]),
    "a new one comes before": (FRESH, [0], [FRESH, RESENT]),
    "a new one comes behind": (FRESH, [0], [RESENT, FRESH]),
    "clients without headers": ([], [0, 2], [[], []]),
    "a new one of a client without headers": ([], [0], [[], RESENT]),
    "one whose client is still there": (FRESH, [], [RESENT]),
}


@both
@pytest.mark.parametrize("name", PARALLEL)
def test_a_retry_among_equal_requests_takes_no_other_answer(wire, name):
    headers, leave, follow = PARALLEL[name]
    script = Held()

    async def agent(seen, models):
        running = []
        for place in range(4):
            left = asyncio.Event()
            gone = left.is_set if place in leave else None
            ask = lost(models["solver"], wire, headers, body=A, wait_for=gone, read=gone is None)
            running.append((asyncio.ensure_future(ask), left))
            await until(lambda: len(script.asked) == len(running))
        for place in leave:
            running[place][1].set()
            await running[place][0]
        await until(lambda: len(script.cancelled) == len(leave))
        for more in follow:
            asked = len(script.asked)
            ask = lost(models["solver"], wire, more, body=A, read=True)
            running.append((asyncio.ensure_future(ask), None))
            await until(lambda: len(script.asked) > asked)  # noqa: B023
        script.go.set()
        answers = await asyncio.gather(*(ask for ask, _ in running))
        seen += [text_of(answer) for answer in answers if answer]

    played = play(agent, script)
    requests = 4 - len(leave) + len(follow)
    assert len(set(played.seen)) == requests == len(played.steps)
    assert len({step.facts.seed for step in played.steps}) == requests
    assert len({step.turn for step in played.steps}) == requests
    assert played.metrics.get("gateway/retries_unmatched/solver", 0) == (name in UNMATCHED)


UNMATCHED = "a new one comes before", "a new one of a client without headers", "one whose client is still there"
"""Retries of no call that is known to be lost: each is a sample of its own."""


async def until(ready):
    while not ready():
        await asyncio.sleep(0.001)


def test_a_retry_that_is_lost_too_stays_the_same_call():
    script = Held()

    async def agent(seen, models):
        others = [asyncio.ensure_future(lost(models["solver"], headers=FRESH, body=A, read=True)) for _ in range(2)]
        await until(lambda: len(script.asked) == 2)
        for nth, headers in enumerate((FRESH, RESENT), 1):
            await lost(models["solver"], headers=headers, body=A, wait_for=lambda: len(script.asked) == 2 + nth)  # noqa: B023
            await until(lambda: len(script.cancelled) == nth)  # noqa: B023
        last = asyncio.ensure_future(lost(models["solver"], headers=RESENT_TWICE, body=A, read=True))
        await until(lambda: len(script.asked) == 5)
        script.go.set()
        seen += map(text_of, await asyncio.gather(*others, last))

    played = play(agent, script)
    assert played.seen == ["1", "2", "5"] and [step.turn for step in played.steps] == [0, 1, 2]
    assert script.asked[2].sampling.seed == script.asked[4].sampling.seed


@both
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_cancels_its_call(wire, stream):
    script = Hanging()

    async def agent(seen, models):
        body = {"model": "solver", "messages": USER, "max_tokens": 50, "stream": stream}
        await lost(models["solver"], wire, body=body, wait_for=lambda: script.asked)
        while not script.cancelled:
            await asyncio.sleep(0.01)
        # The SDK's retry samples again, under the number of the call that was cut off.
        seen.append(await lost(models["solver"], wire, RESENT, body=body, read=True))

    played = play(agent, script)
    assert '"again"' in played.seen[0]
    assert len(script.cancelled) == 1
    assert played.metrics["gateway/aborted/solver"] == 1
    assert played.metrics["gateway/calls/solver"] == 1
    [step] = played.steps
    assert (step.turn, step.completion, step.finish_reason) == (0, "again", "stop")
    first, second = script.asked
    assert first.sampling.seed == second.sampling.seed


def test_call_runs_on_while_one_of_two_clients_waits():
    script = counting(delay=0.5)

    async def agent(seen, models):
        waits = asyncio.ensure_future(lost(models["solver"], read=True))
        await soon(lambda: asyncio.sleep(0), lambda: script.asked)
        leaves = asyncio.ensure_future(lost(models["solver"], headers=RESENT, wait_for=lambda: False))
        await asyncio.sleep(0.2)
        leaves.cancel()
        seen.append(text_of(await waits))

    played = play(agent, script)
    assert played.seen == ["1"]
    assert played.metrics["gateway/aborted/solver"] == 0 and len(played.steps) == 1


def test_agent_that_is_cancelled_leaves_no_call(monkeypatch):
    monkeypatch.setattr(GatewaySession, "grace", 0.1)
    script = Hanging()
    played = asked(Chat, script, {}, timeout=0.3, fails=True)
    assert "longer than timeout=0.3 s" in played.error
    assert len(script.cancelled) == 1 and played.steps == []
    assert played.metrics["gateway/aborted/solver"] == 1


# -- answers that got lost ---------------------------------------------------------------------------------------------
LOST = {
    "the second goes on": ([0, 0], [1], [False, True, True]),
    "the first goes on": ([0, 0], [0], [True, True, True]),
    "none goes on": ([0, 0], [], [True, True]),
    "both go on": ([0, 0], [0, 1], [True, True, True, True]),
    "the third goes on": ([0, 0, 0], [2], [False, False, True, True]),
    "another prompt": ([0, 1], [1], [True, True, True]),
}


@both
@pytest.mark.parametrize("name", LOST)
def test_an_answer_that_was_asked_for_again_does_not_train(wire, name):
    prompts, go_on, trains = LOST[name]

    async def agent(seen, models):
        texts = []
        for prompt in prompts:
            texts.append(text_of(await lost(models["solver"], wire, body=[A, B][prompt], read=True)))
        for place in go_on:
            first = [A, B][prompts[place]]
            chat = [*first["messages"], {"role": "assistant", "content": texts[place]}, *USER]
            await lost(models["solver"], wire, body={**first, "messages": chat}, read=True)

    played = play(agent, counting())
    assert [step.trainable for step in played.steps] == trains
    assert played.metrics["gateway/lost_answers/solver"] == trains.count(False)
    assert all(step.trainable for step in play(agent, counting(), repeats="all").steps)


def test_equal_requests_at_the_same_time_are_samples():
    script = counting(delay=0.1)

    async def agent(seen, models):
        texts = await asyncio.gather(*(lost(models["solver"], body=A, read=True) for _ in range(2)))
        chat = [*A["messages"], {"role": "assistant", "content": text_of(texts[1])}, *USER]
        await lost(models["solver"], body={**A, "messages": chat}, read=True)

    assert [step.trainable for step in play(agent, script).steps] == [True] * 3


def test_an_equal_request_of_a_client_that_left_is_the_same_call(caplog):
    """Without a header that says so; and the log has one line for the client that left."""
    caplog.set_level("INFO")
    script = Hanging()

    async def agent(seen, models):
        await lost(models["solver"], wait_for=lambda: script.asked)
        while not script.cancelled:
            await asyncio.sleep(0.01)
        seen.append(await lost(models["solver"], read=True))

    played = play(agent, script)
    assert '"again"' in played.seen[0] and [step.turn for step in played.steps] == [0]
    assert played.metrics["gateway/clients_left/solver"] == 1
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("turnwise", "aiohttp"))]
    assert lines == ["a client of actor 'solver' left before it had its answer"]


STREAMED = json.dumps({"model": "solver", "messages": USER, "stream": True})
HEAD = "POST <path> HTTP/1.1\r\nHost: <host>\r\nAuthorization: Bearer <key>\r\nContent-Type: application/json\r\n"
DROPS = {
    "within the head": HEAD[:-20],
    "within the body": HEAD + "Content-Length: 500\r\n\r\n{",
    "within a chunk": HEAD + "Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "within a stream": HEAD + f"Content-Length: {len(STREAMED)}\r\n\r\n" + STREAMED,
    "a broken header": HEAD + "Authorization: Bearer <key>\0\r\n\r\n",
    "no HTTP": "\0\1\2\r\n\r\n",
    "a broken length": HEAD + "Content-Length: many\r\n\r\n",
    "a broken chunk": HEAD + "Transfer-Encoding: chunked\r\n\r\nx\r\n{",
}


NO_HTTP = "a broken header", "no HTTP", "a broken length", "a broken chunk"


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("name", DROPS)
def test_a_client_that_drops_its_connection_leaves_no_traceback(name, resets, caplog):
    caplog.set_level("DEBUG")

    async def agent(seen, models):
        model = models["solver"]
        parts = urlsplit(model.base_url + "/chat/completions")
        text = DROPS[name].replace("<path>", parts.path).replace("<host>", parts.netloc).replace("<key>", model.api_key)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        if resets:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.write(text.encode())
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.1)
        seen += [text_of(await lost(models["solver"], read=True)), model.api_key]

    script = Hanging() if name == "within a stream" else counting()
    played = play(agent, script)
    assert played.seen[0] in ("1", "again") and played.seen[1] not in caplog.text
    told = [(record.name, record.exc_text) for record in caplog.records if record.levelname not in ("DEBUG", "INFO")]
    assert not told
    broken = [record for record in caplog.records if "sent no HTTP" in record.getMessage()]
    assert len(broken) == (name in NO_HTTP) and "\n" not in "".join(record.getMessage() for record in broken)


def test_no_record_shows_a_key():
    async def agent(seen, models):
        seen.append(models["solver"].api_key)
        try:
            raise ValueError(f"inner {models['solver'].api_key}")
        except ValueError as error:
            raise RuntimeError({"headers": f"Bearer {models['solver'].api_key}"}) from error

    played = play(agent, counting(), fails=True)
    assert "Bearer ***" in played.error and "inner ***" in played.error and played.seen[0] not in played.error


def test_no_warning_reason_or_recording_shows_a_key():
    """Of a close hook that fails, an invalid action, extras, and a recorded call that raises."""

    class Leaks(AgentEpisode):
        invalid_reward = 0.0

        async def rollout(self, arena, artifact, state=None):
            state = await super().rollout(arena, artifact, state)
            self.key = require_context().secrets[0]
            with contextlib.suppress(OSError):
                await record_input("look", self.look)
            state.trajectory[-1].info["note"] = state.data["note"] = f"note {self.key}"
            require_context().rollout.meta["note"] = [f"note {self.key}"]
            return state

        async def look(self):
            raise OSError(f"{'x' * 480} {self.key}")

        def get_extras(self, state):
            return {**super().get_extras(state), "note": {"deep": (state.data["note"],)}}

        def close(self, state):
            raise OSError(f"{'x' * 480} {self.key}")

    async def agent(question, models):
        await lost(models["solver"], read=True)
        return 1.0

    arena = arena_of(counting())
    arena.record_episodes = True
    arena.add_episode(episode := Leaks(agent, Gateway(renderer="template"), actors=["solver"]))
    with pytest.warns(RuntimeWarning, match="close 'agent' failed") as warned:
        [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("agent", {})]))
    rollout, recording = result.rollout, result.recording
    inputs = [thing for _, thing in recording.events if isinstance(thing, RecordedInput)]
    raised = [repr(decode(one.error)) for one in inputs if one.error is not None]
    assert rollout.error is None and rollout.extras["note"] == {"deep": ("note ***",)} and "***" in raised[0]
    told = [*(str(each.message) for each in warned), repr(asdict(rollout)), *raised]
    assert not [text for text in told if episode.key[:8] in text]
