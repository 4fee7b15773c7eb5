"""Axes of ``bench_growth.py`` whose size is the number of turns of a conversation, each turn as long as any other.

A conversation costs what is new: in all, it costs no more than a power of 1.15 of its turns, so a turn costs a power of
0.15. "rendered" is the number of characters that pass through the tokenizer, a count without noise.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from arena_cases import Instant
from growth import CPU, MEMORY, Axis, Counts

from turnwise.arena import Arena, EpisodeCheckpoints, MultiTurnEpisode, Rubric
from turnwise.chat.tools import schemas
from turnwise.credit import GRPOCredit
from turnwise.inference.scripted import ByteTokenizer
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.report.read import read_run
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.log.run_log import RunLog
from turnwise.types import Actor, EpisodeRequest, GenerateResult, Sampling

REPLY, ANSWER = "x" * 24, "y" * 24
CALL = '<tool_call>{"name": "look", "arguments": {"where": "there"}}</tool_call>'
WORDS = "where is the ball now and who moved it there then under the table " * 2
EPISODES = 2


class Counting(ByteTokenizer):
    """Counts the characters that it renders, encodes or decodes."""

    characters = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        Counting.characters += len(text)
        return super().encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        Counting.characters += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)

    def apply_chat_template(self, conversation: Any, tokenize: bool = True, **options: Any) -> Any:
        rendered = super().apply_chat_template(conversation, tokenize=False, **options)
        Counting.characters += len(rendered)
        return super().apply_chat_template(conversation, tokenize=tokenize, **options)


class Marking(Counting):
    """Ends each message of a chat with the token that ends an answer, as most templates do."""

    def apply_chat_template(self, conversation: Any, tokenize: bool = True, **options: Any) -> Any:
        asks, ids = options.pop("add_generation_prompt", True), []
        for place in range(len(conversation)):
            shown = options if place == 0 else {**options, "tools": []}
            ids += super().apply_chat_template(conversation[place : place + 1], add_generation_prompt=False, **shown)
            ids += [self.eos_token_id]
        return ids + (self.encode("assistant: ") if asks else [])


class Chat(MultiTurnEpisode):
    """A player speaks, the environment answers."""

    episode_type = "chat"
    actors: Sequence[str] = ("player",)
    rubric = Rubric([lambda rollout: float(rollout.artifact)])
    answer = ANSWER

    def get_prompt(self, artifact: Any) -> str:
        return "Question"

    def env_response(self, state: Any, arena: Any, artifact: Any) -> str:
        return self.answer


class Two(Chat):
    actors = ("player", "other")


class Observed(Chat):
    def get_observation(self, state: Any, arena: Any, artifact: Any) -> str:
        return f"private number {len(state.trajectory)} of this turn"


class Words(Chat):
    answer = WORDS


def look(where: str) -> str:
    """Look somewhere.

    Args:
        where: The place.
    """
    return f"nothing is {where}"


def arena_of(episode: MultiTurnEpisode | AgentEpisode, *replies: str, tokenizer: Any = None, **options: Any) -> Arena:
    """Return an arena whose model gives the ``replies`` in turns, at once."""
    tokenizer = Counting() if tokenizer is None else tokenizer
    ends = [tokenizer.eos_token_id]
    client = Instant(
        *((reply, tokenizer.encode(reply, add_special_tokens=False) + ends) for reply in replies or (REPLY,))
    )
    arena = Arena(client, tokenizer, credit=GRPOCredit(), sampling=Sampling(max_tokens=256))
    arena.add_actor(Actor("player", **options))
    arena.add_actor(Actor("other"))
    arena.add_episode(episode)
    arena.source = lambda: [EpisodeRequest("chat", number, group_id=0) for number in range(EPISODES)]
    return arena


def play(arena: Arena, calls: int) -> list[GenerateResult]:
    """Play the episodes one after another, and check that each made ``calls`` calls."""
    results: list[GenerateResult] = []

    async def run() -> None:
        results.extend(await arena.generate_rollouts(list(arena.get_batch()), concurrency=1))  # type: ignore[arg-type]

    asyncio.run(run())
    for result in results:
        made = result.rollout.steps
        assert result.rollout.error is None and len(made) == calls, f"{len(made)} calls: {result.rollout.error}"
    return results


def playing(make: Callable[[int], Arena], calls: Callable[[int], int] = lambda turns: turns) -> Any:
    """Return the ``prepare`` of an axis that plays the arena of each number of turns."""

    def prepare(turns: int) -> Callable[[], Counts]:
        arena = make(turns)

        def work() -> Counts:
            before = Counting.characters
            play(arena, calls(turns))
            return {"rendered": Counting.characters - before}

        return work

    return prepare


def with_tools(turns: int) -> Arena:
    """An answer with a call, its result, and an answer without one, in each turn."""
    return arena_of(Chat(max_turns=turns), CALL, REPLY, tokenizer=Marking(), tools=(look,))


def tool_rounds(turns: int) -> Arena:
    """One turn with as many results of tools."""
    return arena_of(
        Chat(max_turns=1), *([CALL] * turns), REPLY, tokenizer=Marking(), tools=(look,), max_tool_rounds=turns
    )


def with_tokenizer(turns: int) -> Arena:
    return arena_of(Words(max_turns=turns), WORDS, tokenizer=build_tokenizer([WORDS, "Question"]))


def stepping(turns: int) -> Callable[[], None]:
    """A whole step: credit and packing too."""
    arena = arena_of(Chat(max_turns=turns))
    return lambda: asyncio.run(_packed(arena))


async def _packed(arena: Arena) -> None:
    batch = await arena.step()
    assert len(batch), "nothing trains"


# ---------------------------------------------------------------------------------------------------------------------
# The gateway: the client is a process of its own, which sends its whole chat with each call, as agents do
# ---------------------------------------------------------------------------------------------------------------------
def gateway(turns: int, reply: str = REPLY, **more: Any) -> Callable[[], Counts]:
    async def agent(question: Any, models: Any) -> float:
        given = {"models": [(models["player"].base_url, models["player"].api_key)], "calls": turns}
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(Path(__file__).with_name("gateway_client.py"))),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        await client.communicate(json.dumps(given | more | {"questions": ["Question", ANSWER]}).encode())
        return float(client.returncode == 0)

    episode = AgentEpisode(agent, Gateway(renderer="template", max_calls=turns), actors=["player"])
    arena = arena_of(episode, reply, tokenizer=Marking())
    arena.source = lambda: [EpisodeRequest(episode.episode_type, 0)]
    return playing(lambda turns: arena)(turns)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------------------
# What is written
# ---------------------------------------------------------------------------------------------------------------------
@contextmanager
def bytes_written(counts: dict[str, float]) -> Iterator[None]:
    """Add the bytes that this process writes in the block, to any file, as "written"."""

    def written() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["wchar"])

    before = written()
    yield
    counts["written"] = written() - before


def record(turns: int) -> Callable[[], Counts]:
    """Write the line of one episode, with all that a replay needs."""
    arena = arena_of(Chat(max_turns=turns))
    arena.record_episodes = True
    results = play(arena, turns)

    def work() -> Counts:
        with tempfile.TemporaryDirectory() as folder:
            RunLog(Path(folder), 1, tokenizer=arena.tokenizer, progress=False).step(1, {}, results)
            return {"on disk": (Path(folder) / "rollouts.jsonl").stat().st_size}

    return work


def report(turns: int) -> Callable[[], None]:
    """Read that line for a report."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-bench-"))
    arena = arena_of(Chat(max_turns=turns))
    arena.record_episodes = True
    RunLog(folder, 1, tokenizer=arena.tokenizer, progress=False).step(1, {}, play(arena, turns))

    def work() -> None:
        assert read_run(folder)["recorded"] == 1

    return work


def checkpoints(turns: int) -> Callable[[], Counts]:
    """Save the running episodes after each action, as ``checkpoint.save_running_episodes`` does."""
    arena = arena_of(Chat(max_turns=turns))

    def work() -> Counts:
        counts: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder, bytes_written(counts):
            arena.episode_checkpoints = EpisodeCheckpoints(folder)
            play(arena, turns)
            counts["on disk"] = sum(file.stat().st_size for file in Path(folder).iterdir())
        return counts

    return work


def represented(turns: int) -> Callable[[], Counts]:
    """``repr`` of results, which asyncio and loggers may format."""
    results = play(arena_of(Chat(max_turns=turns)), turns)
    return lambda: {"characters": len(repr(results))}


LONG, SMALL = (32, 64, 128, 256, 512), (16, 32, 64)
COST = {CPU: 1.15, "rendered": 1.15}
AXES = [
    Axis("episode", "turns", playing(lambda n: arena_of(Chat(max_turns=n))), LONG, SMALL, {**COST, MEMORY: 1.1}),
    Axis("two actors", "turns", playing(lambda n: arena_of(Two(max_turns=n)), lambda n: 2 * n), LONG[:-1], SMALL, COST),
    Axis("a tool in each turn", "turns", playing(with_tools, lambda n: 2 * n), LONG, SMALL, COST),
    Axis("tools in one turn", "results", playing(tool_rounds, lambda n: n + 1), LONG, SMALL, COST),
    Axis("get_observation", "turns", playing(lambda n: arena_of(Observed(max_turns=n))), LONG, LONG[1:4], COST),
    Axis("Hugging Face tokenizer", "turns", playing(with_tokenizer), LONG, LONG[:3], {CPU: 1.15}),
    Axis("gateway", "turns", gateway, LONG, SMALL, COST),
    Axis("gateway, tools", "turns", partial(gateway, reply=CALL, tools=schemas([look])), LONG, SMALL, COST),
    Axis("step, packed", "turns", stepping, LONG, SMALL, {CPU: 1.15, MEMORY: 1.1}),
    Axis("rollouts.jsonl, a line", "turns", record, LONG, SMALL, {CPU: 1.1, MEMORY: 1.1, "on disk": 1.1}),
    Axis("rollouts.jsonl, its report", "turns", report, LONG, SMALL, {CPU: 1.1, MEMORY: 1.1}),
    Axis("running checkpoints", "turns", checkpoints, LONG[:-1], SMALL, {CPU: 1.1, "written": 1.1, "on disk": 1.1}),
    Axis("repr of results", "turns", represented, LONG, SMALL, {"characters": 0.2}),
]
