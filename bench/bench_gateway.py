"""Gateways: their time per call, with many sessions at once and a model that answers at once.

A client in a process of its own opens all sessions at once; each has one chat that grows by a call. The model is a
vLLM server that answers at once, in a process of its own too (``gateway_model.py``). "turnwise, no server" has the
model in its own process instead. The other gateways (``gateway_peers.py``) have their own defaults. The bench verifies
the token ids that a gateway records. "own" is the gateway's work inside a call: rendering, the choice of settings,
parsing and bookkeeping, without HTTP. "CPU" is the processor time of the gateway's process per call, HTTP included;
the heap is frozen, as the training loop freezes it, since each full collection visits all objects of torch. All
figures are of the round with the median CPU time.
"wait" is what the client sees, the queue included. The bars are 1 ms of own time in the median of sessions, and 20 ms
at the 99th percentile.

    python bench/bench_gateway.py --threads 1 --rounds 5
    python bench/bench_gateway.py --threads 1 --rounds 5 --sessions 200    # the bar of "CPU" there is 1.5 ms
    python bench/bench_gateway.py --threads 1 --rounds 5 --sessions 2000
    .venv-verifiers/bin/python bench/bench_gateway.py --threads 1 --rounds 5    # beside verifiers 0.4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, finish
from gateway_peers import PEERS, Peer, Streams, missing, version

from turnwise import __version__
from turnwise.arena import Arena
from turnwise.inference import InferenceClient, ScriptedClient, VLLMServerClient
from turnwise.integrations.gateway import AgentEpisode, Gateway, GatewaySession
from turnwise.tasks.tiny import build_tokenizer
from turnwise.types import Actor, EpisodeRequest, Sampling
from turnwise.utils.memory import frozen_heap

SESSIONS = 500
CALLS = (1, 4)
"""Calls of each session: a first call, and a chat."""
MEDIAN_MS, P99_MS = 1.0, 20.0
WARM = 10
"""Sessions that warm caches up."""
QUESTIONS = ("Where is the ball now, and who moved it there?", "And a moment later?")
"""The first of a chat, and each next one."""
ANSWER = "It is under the table, where Anna put it."
TOKENIZER = build_tokenizer([ANSWER, " ".join(QUESTIONS)])
ANSWER_IDS = [*TOKENIZER.encode(ANSWER), TOKENIZER.eos_token_id]
IN_PROCESS, OVER_HTTP = "turnwise, no server", "turnwise"
OURS = Peer("turnwise", "turnwise", "", "renders, tokenizes, records token ids", True)
PIPES: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": 2**30}


@dataclass
class Played:
    """What one gateway took for all calls: its process's seconds, waits in ms, and the token ids by session and call.
    ``own`` is the gateway's own ms per call of each session, where it is known."""

    cpu: float = 0.0
    waits: list[float] = field(default_factory=list)
    streams: Streams = field(default_factory=list)
    own: list[float] = field(default_factory=list)


def prompts(calls: int) -> list[list[int]]:
    """Return the token ids of the prompt before each call."""
    first, following = ({"role": "user", "content": text} for text in QUESTIONS)
    messages, found = [first], []
    for _ in range(calls):
        found.append(TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        messages += [{"role": "assistant", "content": ANSWER}, following]
    return found


async def program(name: str, *words: str, **options: Any) -> asyncio.subprocess.Process:
    path = str(Path(__file__).with_name(name))
    return await asyncio.create_subprocess_exec(sys.executable, "-P", path, *words, **PIPES, **options)


async def ask(process: asyncio.subprocess.Process, line: str) -> Any:
    """Write ``line`` to the process, unless it is empty, and return the JSON of the line that it answers with."""
    assert process.stdin and process.stdout
    process.stdin.write(f"{line}\n".encode() if line else b"")
    answer = await process.stdout.readline()
    if not answer:
        raise SystemExit("a process of the bench ended early")
    return json.loads(answer)


async def stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin
    process.stdin.close()
    await process.wait()


async def run_client(models: list[Any], calls: int) -> list[float]:
    """Run the client's process, and return what each call waited, in ms."""
    client = await program("gateway_client.py")
    given = {"models": models, "calls": calls, "questions": QUESTIONS}
    output, _ = await client.communicate(json.dumps(given).encode())
    if client.returncode:
        raise SystemExit(f"gateway_client.py exited with code {client.returncode}")
    return list(json.loads(output))


@asynccontextmanager
async def serving(calls: int) -> AsyncIterator[str]:
    """Start the model's server, and yield its URL."""
    given = {"name": "tiny", "answer": ANSWER, "answer_ids": ANSWER_IDS, "prompts": prompts(calls)}
    server = await program("gateway_model.py")
    try:
        yield f"http://127.0.0.1:{await ask(server, json.dumps(given))}"
    finally:
        await stop(server)


# ---------------------------------------------------------------------------------------------------------------------
# turnwise, in this process, and the others
# ---------------------------------------------------------------------------------------------------------------------
async def play_turnwise(client: InferenceClient, sessions: int, calls: int) -> Played:
    """Open all sessions at once and serve their calls."""
    played, models, done = Played(), [], asyncio.Event()

    async def agent(question: Any, given: Any) -> float:
        """The last session's agent runs the client for all of them."""
        models.append((given["solver"].base_url, given["solver"].api_key))
        if len(models) == sessions:
            began = time.process_time()
            played.waits = await run_client(models, calls)
            played.cpu = time.process_time() - began
            done.set()
        await done.wait()
        return 1.0

    def note(session: GatewaySession) -> None:
        [endpoint] = session.endpoints.values()
        played.own.append(1e3 * endpoint.own_seconds / endpoint.calls)

    arena = Arena(client, sampling=Sampling(max_tokens=64))
    arena.add_actor(Actor("solver"))
    gateway = Gateway(renderer="template")
    gateway.on_session_end = note
    episode = AgentEpisode(agent, gateway, actors=["solver"])
    arena.add_episode(episode)
    for result in await arena.generate_rollouts([EpisodeRequest(episode.episode_type, "x")] * sessions):
        steps = result.rollout.steps
        assert result.rollout.error is None, result.rollout.error
        played.streams.append([[*step.prompt_token_ids, *step.completion_token_ids] for step in steps])
    return played


async def play_peer(method: str, url: str, sessions: int, calls: int) -> Played:
    """Play in a process of the peer's own, once a few more sessions have warmed it up.

    Its home is a new folder, as one peer writes a file there. Its log is shown if it fails."""
    with tempfile.TemporaryDirectory() as home, open(f"{home}/log", "w+", encoding="utf-8") as log:
        TOKENIZER.save_pretrained(f"{home}/tokenizer")
        words = (method, str(WARM + sessions), url, f"{home}/tokenizer")
        process = await program("gateway_peers.py", *words, env={**os.environ, "HOME": home}, stderr=log)
        try:
            models = await ask(process, "")
            await run_client(models[:WARM], calls)
            began = await ask(process, "cpu")
            waits = await run_client(models[WARM:], calls)
            cpu = await ask(process, "cpu") - began
            return Played(cpu, waits, (await ask(process, "streams"))[WARM:])
        except SystemExit:
            print(Path(log.name).read_text(encoding="utf-8")[-3000:], file=sys.stderr)
            raise
        finally:
            await stop(process)


async def play(method: str, sessions: int, calls: int) -> Played:
    if method == IN_PROCESS:
        client = ScriptedClient(lambda request: ANSWER, tokenizer=TOKENIZER)
        return await play_turnwise(client, sessions, calls)
    async with serving(calls) as url:
        if method != OVER_HTTP:
            return await play_peer(method, url, sessions, calls)
        server = VLLMServerClient(url, TOKENIZER)
        try:
            return await play_turnwise(server, sessions, calls)
        finally:
            await server.close()


def verify(method: str, played: Played, sessions: int, calls: int) -> None:
    """Stop the bench unless the gateway recorded each call of each session, and its token ids if it has them."""
    records_ids = PEERS.get(method, OURS).records_ids
    expected = [[*prompt, *ANSWER_IDS] if records_ids else [] for prompt in prompts(calls)]
    wrong = [stream for stream in played.streams if stream != expected]
    assert len(played.streams) == sessions and not wrong, f"{method}: expected {expected}, got {wrong[:1]}"
    assert len(played.waits) == sessions * calls, f"{method}: calls are missing"


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    methods = [IN_PROCESS, OVER_HTTP]
    for name, peer in PEERS.items():
        if (install := missing(peer)) is not None:
            print(f"without {name}: {install}")
        else:
            methods.append(name)
    rows = []
    for calls in CALLS[1:] if options.quick else CALLS:
        for method in methods:
            if method not in PEERS:  # the others' processes warm themselves up
                asyncio.run(play(method, WARM, calls))
            rounds = []
            for _ in range(1 if options.quick else options.rounds):
                with frozen_heap():
                    rounds.append(asyncio.run(play(method, options.sessions, calls)))
                verify(method, rounds[-1], options.sessions, calls)
            played = sorted(rounds, key=lambda one: one.cpu)[len(rounds) // 2]
            peer = PEERS.get(method, OURS)
            own, waits = sorted(played.own), sorted(played.waits)
            middle, late = (median(own), own[int(0.99 * (len(own) - 1))]) if own else (None, None)
            rows.append(
                {
                    "method": method,
                    "version": version(peer.package) if method in PEERS else __version__,
                    "does": peer.does,
                    "sessions": options.sessions,
                    "calls": calls,
                    "own ms": middle,
                    "own ms, 99%": late,
                    "CPU ms": 1e3 * played.cpu / len(waits),
                    "wait ms": median(waits),
                    "wait ms, 99%": waits[int(0.99 * (len(waits) - 1))],
                    "held": None if middle is None or late is None else middle <= MEDIAN_MS and late <= P99_MS,
                }
            )
    return rows


def main() -> None:
    options = arguments(__doc__, {"sessions": SESSIONS})
    if options.quick:
        options.sessions = 5
    finish("gateway", f"Gateways, {options.sessions} sessions at once", measure(options), options)


if __name__ == "__main__":
    main()
