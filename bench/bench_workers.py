"""Model calls per second of an arena whose episodes run in this process, or in 1 or 2 arena workers.

Each turn of an episode computes for some milliseconds, as an environment does, and then calls a scripted client. The
bench first verifies that workers give the results of one arena. Times are wall times, medians of several rounds;
with two workers the process of the loop and the workers need three free cores.

    python bench/bench_workers.py
    python bench/bench_workers.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from common import arguments, finish

from turnwise.arena import Arena, MultiTurnEpisode, Rubric
from turnwise.inference.common.http import LoopThread
from turnwise.inference.scripted import ByteTokenizer, ScriptedClient
from turnwise.run.workers.attach import versions_here
from turnwise.types import Actor, EpisodeRequest
from turnwise.workers.link import fixed_members
from turnwise.workers.listen import Listener
from turnwise.workers.messages import Setup
from turnwise.workers.remote import RemoteWorkers

KEY, TURNS, SIBLINGS = "bench", 4, 8
ENVIRONMENT_MS = (0.0, 2.0, 10.0)


class Work(MultiTurnEpisode):
    """Computes for ``artifact["ms"]`` milliseconds in each turn."""

    episode_type = "work"
    actors = ("player",)

    def __init__(self) -> None:
        super().__init__(max_turns=TURNS)
        self.rubric = Rubric([lambda completion: float(len(completion))])

    def build_messages(self, state: Any, arena: Any, artifact: Any) -> Any:
        return [{"role": "user", "content": f"question {artifact['question']}, turn {state.turn}"}]

    def env_response(self, state: Any, arena: Any, artifact: Any) -> None:
        end = time.process_time() + artifact["ms"] / 1e3
        while time.process_time() < end:
            pass


def arena() -> Arena:
    made = Arena(ScriptedClient(lambda request: f"{request.sampling.seed % 97}"), ByteTokenizer())
    made.add_actor(Actor("player"))
    made.add_episode(Work())
    return made


def requests(episodes: int, ms: float) -> list[EpisodeRequest]:
    return [
        EpisodeRequest("work", {"question": n // SIBLINGS, "ms": ms}, group_id=f"{n // SIBLINGS}")
        for n in range(episodes)
    ]


class Run:
    """What a worker of this bench plays. It needs no engine."""

    def client(self, engines: Any) -> Any:
        return SimpleNamespace(client=None, close=lambda: asyncio.sleep(0), follow=lambda news: None)

    def arena(self, setup: Setup, client: Any) -> Arena:
        return arena()

    def sub_teams(self, actors: tuple[str, ...]) -> Any:
        raise NotImplementedError


def start(count: int) -> list[Any]:
    return [
        subprocess.Popen([sys.executable, __file__, "worker"], stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]


def attached(addresses: list[str]) -> Arena:
    made = arena()
    setup = Setup(versions_here(), {}, None, {}, alive_every=1.0, engines=())
    members, count = fixed_members(addresses), len(addresses)
    made.workers = RemoteWorkers(members, KEY, setup, lambda: (), own_episodes=made.episodes, count=count)
    return made


def run(options: argparse.Namespace) -> None:
    processes = start(2)
    loop = LoopThread("bench")
    try:
        addresses = [json.loads(process.stdout.readline())["address"] for process in processes]
        rows = []
        for ms in ENVIRONMENT_MS[1:2] if options.quick else ENVIRONMENT_MS:
            episodes = 16 if options.quick else options.episodes
            few = requests(min(episodes, 64), ms)
            seconds: dict[int, list[float]] = {}
            for count in range(3):
                seconds[count] = []
                made = arena() if not count else attached(addresses[:count])
                expected = loop.submit(arena().generate_rollouts(few)).result()
                assert loop.submit(made.generate_rollouts(few)).result() == expected, "other results"
                for _ in range(2 if options.quick else min(options.rounds, 5)):
                    began = time.perf_counter()
                    loop.submit(made.generate_rollouts(requests(episodes, ms))).result()
                    seconds[count].append(time.perf_counter() - began)
                if made.workers is not None:
                    loop.submit(made.workers.close()).result()
            for count, times in seconds.items():
                took = statistics.median(times)
                rows.append(
                    {
                        "method": "turnwise",
                        "environment ms": ms,
                        "workers": count,
                        "episodes": episodes,
                        "calls/s": episodes * TURNS / took,
                        "× no workers": statistics.median(seconds[0]) / took,
                    }
                )
        finish("workers", "Arena workers: model calls per second", rows, options)
    finally:
        loop.stop()
        for process in processes:
            process.kill()
            process.wait()


def serve() -> None:
    def announce(address: str) -> None:
        print(json.dumps({"address": address}), flush=True)

    asyncio.run(Listener(Run(), "127.0.0.1", 0, KEY, announce=announce, say=lambda line: None).serve())


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        serve()
    else:
        run(arguments(__doc__, {"episodes": 512}))
