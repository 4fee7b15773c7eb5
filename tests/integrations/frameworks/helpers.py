"""Plays agents of other frameworks, as their quick-starts write them, at a scripted model through a real gateway."""

from __future__ import annotations

import asyncio
import itertools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pytest

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.inference.scripted import Reply
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.integrations.gateway.service.server import GatewayServer
from turnwise.types import Actor, EpisodeRequest, ModelRequest, Rollout, Sampling

from ...chat.families import chat_tokenizer

PAIRS = [(4, 9), (17, 25)]
QUESTIONS = [{"text": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in PAIRS]
"""Two attempts run at the same time. A mixed session would answer the other one's question."""

added: list[tuple[int, int]] = []
"""The calls of :func:`add`."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    added.append((a, b))
    return a + b


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
"""The same function, as Chat Completions writes it."""


def call_of(name: str, arguments: str) -> str:
    """Return the text by which the model calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL = call_of("add", '{"a": $a, "b": $b}')
ADDS = [CALL, "It is $sum."]
"""The model calls the tool, then answers."""


@dataclass(frozen=True)
class Case:
    """One agent, the model's ``lines`` and the cells of the table in docs/agents.md that it fills.

    ``$a``, ``$b`` and ``$sum`` in a line are those of the attempt's question. ``rewritten`` counts rows by reason.

    Example: ``Case(agent, ADDS, {"agent": "`create_agent`", "tool": "function"})``
    """

    agent: Callable[..., Any]
    lines: Sequence[str]
    cells: dict[str, str]
    actors: Sequence[str] = ("agent",)
    rewritten: dict[str, int] | None = None
    shown: str = ""
    """A text that some prompt has once the tool ran, where the tool isn't :func:`add`."""

    def __str__(self) -> str:
        return self.agent.__name__


def cases(*found: Case) -> Any:
    return pytest.mark.parametrize("case", found, ids=str)


def filled(line: str, a: int, b: int) -> str:
    return string.Template(line).safe_substitute(a=a, b=b, sum=a + b)


class Model:
    """A script: the next of ``lines`` for the question in the prompt, then the last one again."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines, self.said, self.numbers = lines, Counter[str](), itertools.count()
        self.tokenizer = chat_tokenizer("qwen3")

    def __call__(self, request: ModelRequest) -> Reply:
        prompt = self.tokenizer.decode(list(request.prompt_token_ids))
        match = re.search(r"(\d+) \+ (\d+) = \?", prompt)
        assert match, f"no question in the prompt {prompt!r}"
        a, b = map(int, match.groups())
        place = min(self.said[match[0]], len(self.lines) - 1)
        self.said[match[0]] += 1
        first = next(self.numbers)
        logprobs = tuple(-(1 + (first + 7 * token) % 97) / 100 for token in range(4096))
        return Reply(filled(self.lines[place], a, b), logprobs=logprobs)


def own_prompt(rollouts: Sequence[Rollout]) -> int:
    """Return the tokens of the longest prompt that begins a chat, which are bytes here: the agent's own, and tools."""
    return max(len(s.prompt_token_ids) for rollout in rollouts for s in rollout.steps if "extends" not in s.info)


def check(
    case: Case,
    package: str,
    record_property: Callable[[str, object], None],
    version: str = "",
    episode_of: Callable[..., Any] = AgentEpisode,
) -> list[Rollout]:
    """Run two attempts at once: both succeed, no request is refused, and the rows are what was sampled."""
    model = Model(case.lines)
    client = ScriptedClient(model, tokenizer=model.tokenizer)
    arena = Arena(client, sampling=Sampling(max_tokens=4096), failure_threshold=1.0)
    for actor in case.actors:
        arena.add_actor(Actor(actor))
    episode = episode_of(case.agent, Gateway(), actors=case.actors, timeout=120.0)
    arena.add_episode(episode)
    refused, sampled = [], []
    reject, generate = GatewayServer._reject, client.generate

    def rejected(self: Any, dialect: Any, error: Any, seat: Any) -> Any:
        refused.append(f"{error.status} {error.param}: {error}")
        return reject(self, dialect, error, seat)

    async def generated(requests: Sequence[ModelRequest]) -> Any:
        responses = await generate(requests)
        sampled.extend((r.prompt_token_ids, r.completion_token_ids, r.logprobs) for r in responses)
        return responses

    requests = [EpisodeRequest(episode.episode_type, question) for question in QUESTIONS]
    added.clear()
    client.generate = generated
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatewayServer, "_reject", rejected)
        results = asyncio.run(arena.generate_rollouts(requests))

    rollouts = [result.rollout for result in results]
    errors = [rollout.error for rollout in rollouts if rollout.error]
    assert not refused, refused
    assert not errors, "".join(errors)
    rewards = [rollout.rewards for rollout in rollouts]
    assert all(set(reward.values()) == {1.0} for reward in rewards), rewards
    rows = [
        (list(s.prompt_token_ids), list(s.completion_token_ids), list(s.completion_logprobs))
        for rollout in rollouts
        for s in rollout.steps
    ]
    assert sorted(rows) == sorted(sampled), "rows differ from what was sampled"
    assert all(model.said[question["text"]] >= len(case.lines) for question in QUESTIONS), model.said
    if case.shown:
        prompts = [model.tokenizer.decode(prompt) for prompt, _, _ in rows]
        assert all(any(filled(case.shown, *pair) in prompt for prompt in prompts) for pair in PAIRS)
    elif "tool" in case.cells:
        assert sorted(added) == PAIRS, added
    rewritten = Counter(s.info["rewritten"] for rollout in rollouts for s in rollout.steps if "rewritten" in s.info)
    assert rewritten == (case.rewritten or {}), rewritten
    record_property("prompt", own_prompt(rollouts))
    record_property("framework", package)
    record_property("version", version or metadata.version(package))
    for column, cell in case.cells.items():
        record_property(column, cell)
    return rollouts
