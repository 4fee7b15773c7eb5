"""Episodes, tools and arenas that run given functions as code of the user."""

from __future__ import annotations

import time
from typing import Any

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric
from turnwise.arena.runtime import watch
from turnwise.credit import GRPOCredit
from turnwise.inference import ScriptedClient
from turnwise.types import Actor, EpisodeRequest, GenerateResult
from turnwise.utils.threads import run_to_end

CALL = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'


def slept(seconds: float) -> float:
    time.sleep(seconds)
    return 1.0


def leave() -> None:
    exit()


def stop() -> None:
    next(iter(()))


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test get its own warnings."""
    monkeypatch.setattr(watch, "_warned", set())


def arena_of(episode: Any, reply: Any = "4", tools: Any = (), **settings: Any) -> Arena:
    client = ScriptedClient(reply if callable(reply) else lambda request: reply)
    arena = Arena(client, credit=GRPOCredit(), failure_threshold=1.0)
    arena.add_actor(Actor("solver", tools=tools, **settings))
    arena.add_episode(episode)
    return arena


def play(arena: Arena, count: int = 3) -> list[GenerateResult]:
    requests = [EpisodeRequest(next(iter(arena.episodes)), number) for number in range(count)]
    return run_to_end(arena.generate_rollouts(requests))


def game(base: type = MultiTurnEpisode, **hooks: Any) -> Any:
    """An episode of one turn with ``hooks``; a hook gets the artifact alone."""
    made = {name: (lambda self, *given, do=do: do(given[-1])) for name, do in hooks.items() if callable(do)}
    settings = {name: value for name, value in hooks.items() if not callable(value)}
    plain = {"episode_type": "game", "actors": ("solver",), "max_turns": 1, "rubric": Rubric([lambda: 1.0])}
    return type(
        "Game", (base,), {**plain, "get_prompt": lambda self, artifact: f"question {artifact}", **settings, **made}
    )()


def asked(request: Any) -> str:
    """Episode 0 calls its tool, others answer."""
    return CALL.format("run") if request.messages[-1]["content"] == "question 0" else "4"


def tool(act: Any) -> Any:
    def run() -> str:
        """Run."""
        act()
        return "done"

    return run
