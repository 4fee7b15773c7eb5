"""Arenas that every process builds alike, with a model whose answer depends on its request alone, and workers of them.

``python playing.py`` starts workers, which play what :func:`build` builds. :class:`Workers` kills them and starts them
again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from turnwise.arena import Arena, ArtifactStore, MultiTurnEpisode, Rubric, SingleTurnEpisode, record_input
from turnwise.inference.scripted import ByteTokenizer, ScriptedClient
from turnwise.run.build import arena_for_client
from turnwise.run.checks import resolve_config, task_of
from turnwise.run.workers.attach import versions_here
from turnwise.run.workers.process import WorkerArena, WorkerRun
from turnwise.train.config.toml import Problems
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor, EpisodeRequest
from turnwise.workers.listen import Listener
from turnwise.workers.messages import Setup
from turnwise.workers.remote import RemoteWorkers

KEY = "a key of the tests"

ATTACHED: list[RemoteWorkers] = []
"""Those that the running test attached."""


# -- arenas ------------------------------------------------------------------------------------------------------------
def task_arena(kind: type, name: str, **config: Any) -> Arena:
    """The arena of a shipped task. Each answer is right, or a random player's, by the request's seed."""
    full = config_from_dict({"task": name, "credit": {"rule": "task"}, **config})
    task = task_of(full)
    resolved, actors = resolve_config(full, task, Problems())
    by_prompt = {actor.system_prompt: actor.id for actor in actors}

    async def script(request: Any) -> str:
        seed = request.sampling.seed
        delay = Random(seed).choice((0.0, 0.0, 0.001, 0.004))
        if delay:
            await asyncio.sleep(delay)
        player = task.oracle() if seed % 2 else task.random_player(seed % 5)
        return player(by_prompt[request.messages[0]["content"]], request.messages)

    client = ScriptedClient(script, versions={"default": 3})
    return arena_for_client(client, resolved, task, actors, ByteTokenizer(), 4096, kind=kind)


class Keep(MultiTurnEpisode):
    """Adds what it says to the store ``said``, draws from it, and hands the artifact to a nested episode."""

    episode_type = "keep"
    reads_earlier_batches = True
    actors = ("player",)

    def __init__(self) -> None:
        super().__init__(max_turns=2)
        self.rubric = Rubric([length])

    def stores(self) -> list[ArtifactStore]:
        return [ArtifactStore("said")]

    def setup(self, state: Any, arena: Any, artifact: Any) -> None:
        known = record_input("known", lambda: earlier(arena.stores["said"], artifact["step"]))
        state.data = {"drawn": self.rng.choice(known) if known else None, "made": []}

    def build_messages(self, state: Any, arena: Any, artifact: Any) -> Any:
        return [{"role": "user", "content": f"{artifact['step']} {state.data['drawn']}"}]

    async def env_response(self, state: Any, arena: Any, artifact: Any) -> None:
        store, text = arena.stores["said"], state.last_completion_text
        parents = [state.data["drawn"]] if state.data["drawn"] else state.data["made"]
        made = store.add(text, parents=list(parents), weight=len(text) / 4, meta={"step": artifact["step"]})
        store.set_weight(made.id, made.weight + 1)
        store.record(made.id, 0.5)
        state.data["made"] = [*state.data["made"], made.id]
        await arena.generate_rollouts([EpisodeRequest("try", made, meta={"artifact_id": made.id})] * 2)

    def get_extras(self, state: Any) -> dict[str, Any]:
        return {"drawn": state.data["drawn"], "made": list(state.data["made"])}


def earlier(store: ArtifactStore, step: int) -> list[str]:
    return [item.id for item in store if item.meta["step"] < step]


class Try(SingleTurnEpisode):
    episode_type = "try"
    actor = "player"

    def get_prompt(self, artifact: Any) -> str:
        return f"try {artifact.data}"


class Wonder(Try):
    """Group functions, continuations and failures: by the artifact's number and the seed."""

    episode_type = "wonder"

    def get_prompt(self, artifact: Any) -> str:
        if artifact["number"] % 5 == 4 and self.rng.random() < 0.8:
            raise RuntimeError(f"artifact {artifact['number']} failed")
        return f"wonder {artifact['number']} {self.rng.random():.3f}"

    def get_continuation(self, state: Any, rollout: Any) -> Any:
        artifact = rollout.artifact
        if artifact.get("more"):
            return [EpisodeRequest("wonder", {**artifact, "more": artifact["more"] - 1}, group_id=artifact["joins"])]
        return ()


class Leave(Try):
    """Ends its process on artifact "die"; reads the environment on "look"."""

    episode_type = "leave"

    def get_prompt(self, artifact: Any) -> str:
        if artifact == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return f"leave {artifact}"


async def boss(question: Any, models: Any) -> float:
    """Open a child or more, by the length of the answer. Every other one has a reward of its own."""

    async def ask(model: Any, text: str) -> str:
        chat = model.async_openai_client().chat.completions
        answer = await chat.create(model=model.name, messages=[{"role": "user", "content": text}])
        return str(answer.choices[0].message.content)

    answer = await ask(models["player"], f"boss {question}")
    for number in range(len(answer) // 2):
        async with models["player"].child() as child:
            said = await ask(child, f"part {number}")
            child.reward = float(len(said)) if number % 2 else None
    return float(len(answer))


def agents_arena(kind: type) -> Arena:
    """An arena of an agent that opens children."""
    from turnwise.integrations.gateway import AgentEpisode, Gateway

    return own_arena(kind, AgentEpisode(boss, Gateway(renderer="template"), actors=["player"]))


class Look(Try):
    episode_type = "look"

    def get_prompt(self, artifact: Any) -> str:
        return f"look {artifact}"


def tools_arena(kind: type) -> Arena:
    """An arena whose player has tools of an MCP server, one in each process."""
    from turnwise.integrations.mcp import MCPServer

    def script(request: Any) -> str:
        answered = request.messages[-1]["role"] == "tool"
        return (
            request.messages[-1]["content"]
            if answered
            else '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
        )

    file = Path(__file__).parents[1] / "integrations" / "mcp_server.py"
    server = MCPServer([sys.executable, str(file), "stdio"], shared=True)
    client = ScriptedClient(script, versions={"default": 3})
    arena = kind(client, ByteTokenizer(), credit=None, task=None, rollout=None)
    arena.add_actor(Actor("player", tools=[server]))
    arena.add_episode(Look())
    return arena


def length(completion: str) -> float:
    return float(len(completion))


def best_of(rollouts: Any) -> list[float]:
    sizes = [len(rollout.steps[-1].completion) for rollout in rollouts]
    return [float(size == max(sizes)) for size in sizes]


for _kind in (Try, Leave, Look):
    _kind.rubric = Rubric([length])
Wonder.rubric = Rubric([length, best_of])


def own_arena(kind: type, *episodes: Any, stores: bool = True, **options: Any) -> Arena:
    """An arena of these tests' own episodes. The model says a word by its seed."""

    async def script(request: Any) -> str:
        draw = Random(request.sampling.seed)
        await asyncio.sleep(draw.choice((0.0, 0.001, 0.004)))
        return draw.choice(("one", "two", "three", "eleven", "thirteen", f"{draw.randrange(50)}"))

    client = ScriptedClient(script, versions={"default": 3})
    arena = kind(client, ByteTokenizer(), credit=None, task=None, rollout=None, **options)
    arena.add_actor(Actor("player"))
    for episode in episodes:
        arena.add_episode(episode)
    return arena


BUILDERS: dict[str, Any] = {
    "sudoku": lambda kind: task_arena(kind, "sudoku", rollout={"branches": 3}),
    "games": lambda kind: task_arena(kind, "kuhn_poker"),
    "nested": lambda kind: task_arena(kind, "proposer_solver"),
    "dynamic": lambda kind: task_arena(kind, "sudoku", filter={"dynamic_sampling_rounds": 3}, credit={"rule": "grpo"}),
    "stores": lambda kind: own_arena(kind, Keep(), Try()),
    "agents": agents_arena,
    "tools": tools_arena,
    "own": lambda kind: own_arena(kind, Wonder(), Try(), Leave(), retries=1, failure_threshold=0.6),
}


def build(name: str, kind: type) -> Arena:
    return BUILDERS[name](kind)


# -- the loop's side ---------------------------------------------------------------------------------------------------
def setup_of(name: str, **changes: Any) -> Setup:
    values = {"versions": versions_here(), "config": {"arena": name}, "max_context": None, "quotas": {}}
    return Setup(**{**values, "alive_every": 0.2, "engines": (), **changes})


def attach(arena: Arena, name: str, members: Any, key: str = KEY, **options: Any) -> RemoteWorkers:
    count = options.pop("count", 2)
    given = {"own_episodes": arena.episodes, "wait": 10.0, "dead_after": 60.0, "count": count, **options}
    arena.workers = RemoteWorkers(members, key, setup_of(name), lambda: (), **given)
    ATTACHED.append(arena.workers)
    return arena.workers


async def until(condition: Any) -> None:
    """Wait, a minute at most, until ``condition()`` is true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def difference(found: Any, expected: Any, path: str = "") -> str:
    """Where two nested values first differ, and how; empty if they are equal."""
    if type(found) is not type(expected):
        return f"{path}: {found!r:.200} is no {expected!r:.200}"
    if is_dataclass(found):
        parts = [
            (f".{field.name}", getattr(found, field.name), getattr(expected, field.name)) for field in fields(found)
        ]
        parts = [part for part in parts if part[0] != ".recording"]
    elif isinstance(found, dict) and found.keys() == expected.keys():
        parts = [(f"[{key!r}]", found[key], expected[key]) for key in found]
    elif isinstance(found, dict):
        return f"{path}: other keys, {sorted(found.keys() ^ expected.keys(), key=str)!r:.400}"
    elif isinstance(found, list | tuple) and len(found) == len(expected):
        parts = [(f"[{place}]", one, other) for place, (one, other) in enumerate(zip(found, expected, strict=True))]
    else:
        return "" if found == expected else f"{path}: {found!r:.400} is not {expected!r:.400}"
    return next((told for name, *both in parts if (told := difference(*both, path + name))), "")


class Workers:
    """``count`` workers in other processes. A worker that starts again has another address.

    They are forks of one process, which imports everything once.
    """

    def __init__(self, count: int) -> None:
        self.pids: list[int] = [0] * count
        self.addresses: dict[str, str] = {}

    def start(self, *numbers: int, key: str = KEY) -> None:
        for number in numbers or range(len(self.pids)):
            self.parent.stdin.write(key + "\n")
            self.parent.stdin.flush()
            told = json.loads(self.parent.stdout.readline())
            self.pids[number], self.addresses[f"worker-{number}"] = told["pid"], told["address"]

    def kill(self, number: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[number], how)

    def is_alive(self, number: int) -> bool:
        try:
            os.kill(self.pids[number], 0)
            return True
        except ProcessLookupError:
            return False

    def members(self, count: int) -> Any:
        """The first ``count`` workers, each at its present address."""
        return lambda: {name: at for name, at in self.addresses.items() if int(name[7:]) < count}

    def __enter__(self) -> Workers:
        self.parent = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.parent.stdin.close()  # its children end with it
        self.parent.wait()
        self.parent.stdout.close()


# -- in a worker's process ---------------------------------------------------------------------------------------------
class _Player(WorkerRun):
    def __init__(self) -> None:
        self._sub_teams = None

    def client(self, engines: Any) -> Any:
        async def close() -> None:
            pass

        return SimpleNamespace(client=None, close=close, follow=lambda news: None)

    def arena(self, setup: Setup, client: Any) -> Arena:
        arena = build(setup.config["arena"], WorkerArena)
        self._task = arena.task
        return arena


async def serve(key: str) -> None:
    def announce(address: str) -> None:
        print(json.dumps({"address": address, "pid": os.getpid()}), flush=True)

    await Listener(_Player(), "127.0.0.1", 0, key, announce=announce, say=lambda line: None).serve()


def main() -> None:
    """Fork a worker for each line of standard input, which has its key."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    children = []
    for line in sys.stdin:
        if child := os.fork():
            children.append(child)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asyncio.run(serve(line.strip()))
        os._exit(0)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
