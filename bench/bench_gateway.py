"""The gateway: its own time per call, with many sessions at once and a model that answers at once.

A client in a process of its own opens all sessions at once; each has one chat that grows by a call. "own" is the
gateway's work inside a call: rendering, the choice of settings, parsing and bookkeeping, without HTTP. "CPU" is the
processor time of the gateway's process per call, HTTP included. "wait" is what the client sees, the queue included. The
bars are 1 ms of own time in the median of sessions, and 20 ms at the 99th percentile.

    python bench/bench_gateway.py --threads 1
    python bench/bench_gateway.py --threads 1 --sessions 2000
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, finish

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.integrations.gateway import AgentEpisode, Gateway, Session
from turnwise.tasks.tiny import build_tokenizer
from turnwise.types import Actor, EpisodeRequest, GenerateResult, Sampling

SESSIONS = 500
CALLS = (1, 4)
"""Calls of each session: a first call, and a chat."""
MEDIAN_MS, P99_MS = 1.0, 20.0
ANSWER = "It is under the table, where Anna put it."


class Clients:
    """The agent of all sessions: it hands its model to the client's process, and waits until that one is done."""

    def __init__(self, sessions: int, calls: int) -> None:
        self.sessions, self.calls = sessions, calls
        self.models: list[tuple[str, str]] = []
        self.done = asyncio.Event()
        self.cpu = 0.0
        self.waits: list[float] = []
        self.own: list[float] = []
        """The gateway's own time per call of each session, in ms."""

    def note(self, session: Session) -> None:
        [seat] = session.seats.values()
        self.own.append(1e3 * seat.own_seconds / seat.calls)

    async def agent(self, question: Any, models: Any) -> float:
        model = models["solver"]
        self.models.append((model.base_url, model.api_key))
        if len(self.models) == self.sessions:
            await self._run()
            self.done.set()
        await self.done.wait()
        return 1.0

    async def _run(self) -> None:
        """Run the client's process, and measure the processor time of this one meanwhile."""
        program = Path(__file__).with_name("gateway_client.py")
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        client = await asyncio.create_subprocess_exec(sys.executable, "-P", str(program), **pipes)
        given = json.dumps({"models": self.models, "calls": self.calls}).encode()
        began = time.process_time()
        output, _ = await client.communicate(given)
        self.cpu = time.process_time() - began
        if client.returncode:
            raise SystemExit(f"{program} exited with code {client.returncode}")
        self.waits = json.loads(output)


async def play(sessions: int, calls: int) -> tuple[Clients, list[GenerateResult]]:
    """Open all sessions at once and serve their calls."""
    tokenizer = build_tokenizer([ANSWER, "Where is the ball now, and who moved it there? And a moment later?"])
    arena = Arena(ScriptedClient(lambda request: ANSWER, tokenizer=tokenizer), sampling=Sampling(max_tokens=64))
    arena.add_actor(Actor("solver"))
    clients = Clients(sessions, calls)
    gateway = Gateway(renderer="template")
    gateway.on_session_end = clients.note
    episode = AgentEpisode(clients.agent, gateway, actors=["solver"])
    arena.add_episode(episode)
    return clients, await arena.generate_rollouts([EpisodeRequest(episode.episode_type, "x")] * sessions)


def verify(results: list[GenerateResult], calls: int) -> None:
    """Stop the bench unless each session has a row per call, and each prompt begins with all that came before."""
    for result in results:
        steps = result.rollout.steps
        assert result.rollout.error is None, result.rollout.error
        assert [step.turn for step in steps] == list(range(calls)), "rows are missing"
        for before, after in itertools.pairwise(steps):
            stream = [*before.prompt_token_ids, *before.completion_token_ids]
            assert list(after.prompt_token_ids[: len(stream)]) == stream, "a prompt doesn't continue its chat"


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    asyncio.run(play(10, 2))  # the first sessions warm caches up
    for calls in CALLS:
        clients, results = asyncio.run(play(options.sessions, calls))
        verify(results, calls)
        own = sorted(clients.own)
        waits = sorted(clients.waits)
        rows.append(
            {
                "method": "turnwise",
                "sessions": options.sessions,
                "calls": calls,
                "own ms": median(own),
                "own ms, 99%": own[int(0.99 * (len(own) - 1))],
                "CPU ms": 1e3 * clients.cpu / len(waits),
                "wait ms": median(waits),
                "wait ms, 99%": waits[int(0.99 * (len(waits) - 1))],
                "held": median(own) <= MEDIAN_MS and own[int(0.99 * (len(own) - 1))] <= P99_MS,
            }
        )
    return rows


def main() -> None:
    options = arguments(__doc__, {"sessions": SESSIONS})
    if options.quick:
        options.sessions = 20
    finish("gateway", f"the gateway, {options.sessions} sessions at once", measure(options), options)


if __name__ == "__main__":
    main()
