"""The task of looking up: one solver with a tool that reads a table of SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from turnwise.arena import Episode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split, TaskOptions, check_split, split_of
from turnwise.tasks.generated import GeneratedTask, texts_of
from turnwise.tasks.lookup.demonstrations import SOLVER, SYSTEM_PROMPT, call_text, demonstrations
from turnwise.tasks.lookup.table import FRIEND, FRUITS, LOOK_UP, NAMES, TABLES, Question, Table
from turnwise.types import Actor, EpisodeState, Messages, TaskCapabilities


class LookupEpisode(SingleTurnEpisode):
    """One question about a table that the solver can't see. The artifact is ``{"question": "5813/Ben/pears/1"}``.

    The solver calls ``look_up(name, column)`` and answers with the number. A right answer earns 1.
    """

    episode_type = "lookup"
    actor = SOLVER

    def __init__(self) -> None:
        self.rubric = Rubric([right, looked_up, well_formed], [1.0, 0.0, 0.0], valid=[well_formed])

    def get_prompt(self, artifact: Any) -> str:
        return Question.parse(artifact["question"]).text

    def run_tool(self, name: str, arguments: dict[str, Any], state: EpisodeState, arena: Any, artifact: Any) -> str:
        table = Table(Question.parse(artifact["question"]).table)
        return table.look_up(arguments.get("name"), arguments.get("column"))


def right(completion: str, artifact: Any) -> dict[str, float]:
    """1.0 if the answer is the table's number."""
    question = Question.parse(artifact["question"])
    return {SOLVER: float(completion.strip() == Table(question.table).answer(question))}


def looked_up(rollout: Any) -> dict[str, float]:
    """The number of well-formed calls."""
    return {SOLVER: float(_calls(rollout).count("ok"))}


def well_formed(rollout: Any) -> dict[str, float]:
    """The share of the attempted calls that are well formed; 1.0 without any."""
    calls = _calls(rollout)
    return {SOLVER: calls.count("ok") / len(calls) if calls else 1.0}


def _calls(rollout: Any) -> list[str]:
    return [status for step in rollout.steps for status in step.info.get("tool_calls", ())]


class LookupOptions(TaskOptions):
    """Options of the task ``lookup``."""

    hops: int = Field(default=1, ge=1, le=2)
    """Look-ups that an answer needs: the value itself, or first the friend's name."""
    quality: float = Field(default=0.45, ge=0, le=1)
    """Chance that a call in a demonstration has the right arguments."""
    clean: float = Field(default=0.5, ge=0, le=1)
    """Share of the demonstrations, the first ones, whose calls are all right."""
    max_tokens: int = Field(default=64, ge=1)
    """Limit of each answer."""


class LookupTask(GeneratedTask):
    """A solver and its tool; see :class:`turnwise.tasks.base.Task`.

    Example: ``LookupTask(LookupOptions(hops=2))``
    """

    name = "lookup"
    success_metric = f"right/{SOLVER}"
    system_prompts: ClassVar[dict[str, str]] = {SOLVER: SYSTEM_PROMPT}
    options_type = LookupOptions
    capabilities = TaskCapabilities(credit_rule="grpo")

    @property
    def actors(self) -> list[Actor]:
        limit, rounds = self.options.max_tokens, self.options.hops + 1
        return [Actor(SOLVER, SYSTEM_PROMPT, max_tokens=limit, tools=(LOOK_UP,), max_tool_rounds=rounds)]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        """Return the episode. Raises ``ValueError`` for a tree: with one turn, branches equal a question's copies."""
        if tree is not None:
            raise ValueError(f"task {self.name!r} has one turn a question: branch with rollout.group_size")
        return {self.name: LookupEpisode()}

    def draw(self, split: Split, n: int, seed: int | str) -> Sequence[str]:
        check_split(split)
        rng, found = Random(f"lookup/{split}/{seed}"), dict[str, None]()
        while len(found) < n:
            question = Question(rng.randrange(TABLES), rng.choice(NAMES), rng.choice(FRUITS), self.options.hops)
            if split_of(question.key) == split:
                found[question.key] = None
        return list(found)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        keys = self.draw("train", min(n, 20_000), f"demonstrations/{seed}")
        repeated = [keys[place % len(keys)] for place in range(n)]
        first = round(n * self.options.clean)
        right = demonstrations(repeated[:first], f"{seed}/clean", 1.0)
        return right + demonstrations(repeated[first:], seed, self.options.quality)

    def texts(self) -> list[str]:
        shown = [text for text in texts_of(self.demonstrations(500, 0)) if text]
        return [*shown, *(call_text(name, column) for name in NAMES for column in (*FRUITS, FRIEND))]

    def oracle(self) -> Player:
        """A player that looks up what the question asks for."""

        def play(actor_id: str, messages: Messages) -> str:
            [text] = [message["content"] for message in messages if message["role"] == "user"]
            results = [message["content"] for message in messages if message["role"] == "tool"]
            words = text.rstrip("?").split()
            columns = [FRIEND, words[2]] if FRIEND in words else [words[2]]
            if len(results) == len(columns):
                return results[-1]
            return call_text(results[-1] if results else words[-1], columns[len(results)])

        return play

    def random_player(self, seed: int) -> Player:
        """A player that looks up anything, and answers what it gets."""
        rng = Random(f"lookup-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            if messages[-1]["role"] == "tool":
                return messages[-1]["content"]
            return call_text(rng.choice(NAMES), rng.choice(FRUITS))

        return play
