"""Plays agents through a gateway, with a scripted model whose log-probabilities are known."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.inference.scripted import Reply
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.types import Actor, EpisodeRequest, GenerateResult, ModelRequest, Sampling, Step

from ...chat.families import chat_tokenizer, installed_families

FAMILIES = [family for family in ("template", "qwen3") if family in installed_families()]
needs_qwen3 = pytest.mark.needs("trl", "renderers")

LOGPROBS = tuple(-(1 + place * 7 % 97) / 100 for place in range(30_000))
"""The log-probability of a scripted completion's token, by its place."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
"""A tool, as Chat Completions writes it."""

USER = [{"role": "user", "content": "2 + 2 = ?"}]


def call_of(name: str, arguments: str) -> str:
    """Return the text by which the model calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def scripted(*texts: str | Reply | BaseException) -> Callable[[ModelRequest], Any]:
    """Return a script that says ``texts`` one by one, then the last one again, with :data:`LOGPROBS`."""
    left = list(texts)

    def answer(request: ModelRequest) -> Any:
        text = left.pop(0) if len(left) > 1 else left[0]
        return Reply(text, logprobs=LOGPROBS) if isinstance(text, str) else text

    return answer


class Hanging:
    """A script whose first ``times`` answers never come; it keeps the requests, and those that were cancelled."""

    def __init__(self, times: int = 1) -> None:
        self.times, self.asked, self.cancelled = times, [], []

    async def __call__(self, request: ModelRequest) -> str:
        self.asked.append(request)
        if len(self.asked) > self.times:
            return "again"
        try:
            return await asyncio.sleep(60, "late")
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise


@dataclass
class Played:
    """One agent's episodes: what they gave, what the model was asked, and what the agent kept in ``seen``."""

    results: list[GenerateResult]
    client: ScriptedClient
    arena: Arena
    gateway: Gateway
    seen: list[Any] = field(default_factory=list)
    ended: int = 0
    """Agents that came to their end: the checks in them held, even if their episode failed."""

    @property
    def steps(self) -> list[Step]:
        return self.results[0].rollout.steps

    @property
    def rewards(self) -> dict[str, float]:
        return self.results[0].rollout.rewards

    @property
    def metrics(self) -> dict[str, float]:
        return self.results[0].rollout.metrics

    @property
    def error(self) -> str | None:
        return self.results[0].rollout.error

    def text(self, ids: Sequence[int]) -> str:
        return self.client.tokenizer.decode(list(ids), skip_special_tokens=False)


def arena_of(
    script: Any, *, actors: Sequence[str | Actor] = ("solver",), family: str = "template", **options: Any
) -> Arena:
    """Return an arena with a scripted model and the tokenizer of a family. Failed episodes don't stop its batches."""
    options = {"sampling": Sampling(max_tokens=256), "failure_threshold": 1.0, **options}
    arena = Arena(ScriptedClient(script, tokenizer=chat_tokenizer(family)), **options)
    for actor in actors:
        arena.add_actor(Actor(actor) if isinstance(actor, str) else actor)
    return arena


def play(
    agent: Callable[..., Any],
    script: Any,
    *,
    actors: Sequence[str | Actor] = ("solver",),
    attempts: int = 1,
    evaluation: bool = False,
    family: str = "template",
    timeout: float = 60.0,
    fails: bool = False,
    arena_options: dict[str, Any] | None = None,
    after: Callable[[], Awaitable[Any]] | None = None,
    **settings: Any,
) -> Played:
    """Play ``agent(question, models)``, which gets a list as the question and keeps there what the test looks at.

    A list of texts is a script that says them one by one. The reward is 1 if the agent returns ``None``. Unless
    ``fails``, an episode that failed fails the test. ``after`` runs when the episodes are over and the port is open.
    """
    script = scripted(*script) if isinstance(script, (list, tuple)) else script
    arena = arena_of(script, actors=actors, family=family, **(arena_options or {}))
    gateway = Gateway(**{"renderer": "template" if family == "template" else "auto", **settings})
    seen: list[Any] = []
    ended: list[Any] = []

    def end(found: Any) -> Any:
        ended.append(found)
        return 1.0 if found is None else found

    async def awaited(question: Any, models: Any) -> Any:
        return end(await agent(seen, models))

    def called(question: Any, models: Any) -> Any:
        return end(agent(seen, models))

    played = awaited if asyncio.iscoroutinefunction(agent) else called
    names = [actor if isinstance(actor, str) else actor.id for actor in actors]
    played.__name__ = "agent"
    arena.add_episode(AgentEpisode(played, gateway, actors=names, timeout=timeout))
    playing = arena.evaluation() if evaluation else arena

    async def run() -> list[GenerateResult]:
        async with contextlib.nullcontext() if after is None else gateway:
            results = await playing.generate_rollouts([EpisodeRequest("agent", "x")] * attempts)
            if after is not None:
                await after()
        return results

    results = asyncio.run(run())
    if not fails:
        for result in results:
            assert result.rollout.error is None, result.rollout.error
    assert not gateway.sessions
    return Played(results, arena.client, arena, gateway, seen, len(ended))


def dumped(answer: Any, *without: str) -> dict[str, Any]:
    """Return an SDK object as a dict, without ids and times, which differ between two calls."""
    left_out = {"id", "created", "created_at", "item_id", "call_id", *without}

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items() if key not in left_out and part is not None}
        return [plain(part) for part in value] if isinstance(value, list) else value

    return plain(answer.model_dump())
