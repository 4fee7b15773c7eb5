"""Interface of every shipped task to the training loop and the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from turnwise.arena import Episode, Rubric, TreeSampler
from turnwise.types import Actor, EpisodeRequest, Message, Messages
from turnwise.utils.registry import did_you_mean

Split = Literal["train", "validation", "eval"]

# A question's own hash puts it in a split, so no choice of seed or count can leak one into another: 8 parts train.
SPLIT_OF_RESIDUE: tuple[Split, ...] = ("eval", "validation", *("train",) * 8)

QUESTIONS = 200
"""Default number of held-out questions, if the task has as many."""

Demonstration = tuple[str, Messages, str]
"""``(actor id, prompt, completion)``: ``("solver", [{"role": "user", "content": "2 + 2 = ?"}], "#### 4")``."""

Player = Callable[[str, Messages], str]
"""Plays without a model: ``(actor id, the chat that the actor sees) -> completion``."""


class Task(Protocol):
    """A task: who plays, what is played, and how success is measured.

    ``credit_rule``, where a task has it, is the rule that ``credit.rule = "task"`` stands for. ``seats``, where it has
    them, are the actors that play against each other; the rubric may have a metric ``score/<seat>``, 0 to 1, of each.

    Everything is a function of the task's options and the arguments: equal calls give equal answers, in any process.
    """

    name: str
    success_metric: str
    """The key in ``Rollout.metrics`` that is 1.0 for a success, for example ``"solved/proposer"``."""

    @property
    def actors(self) -> Sequence[Actor]:
        """The players, in acting order, with their system prompts and token limits."""
        ...

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        """The episodes to register, by type; with a tree sampler, training branches at each action."""
        ...

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """``questions * copies`` episodes of training step ``step``; the copies of a question share ``group_id``."""
        ...

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """The first ``n`` questions of a held-out split, always the same, none of them ever trained on."""
        ...

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """``n`` demonstrations on training questions, for a supervised warm start."""
        ...

    def texts(self) -> list[str]:
        """Texts that hold the task's words, to build a tokenizer from."""
        ...

    def oracle(self) -> Player:
        """The player that is always right: the upper end of every comparison."""
        ...

    def random_player(self, seed: int) -> Player:
        """A player that knows the format and nothing else: the lower end."""
        ...


class TaskOptions(BaseModel):
    """Options of a task; frozen, and unknown names are refused with the nearest known one."""

    model_config = ConfigDict(frozen=True)

    seed: int = 0

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"unknown option {name!r}; {did_you_mean(str(name), list(cls.model_fields))}")
        return values


_ROUND = re.compile(r"\nRound \d+\.( Your last reply could not be read\.)?$")


def with_round(message: Message, turn: int, *, unread: bool = False) -> Message:
    """``message`` with the round at its end, from the second on (``turn`` counts from 0), and whether the actor's own
    last reply was ``unread``: what failed before never leads to the same prompt again.
    """
    if not turn:
        return message
    note = f"\nRound {turn + 1}." + (" Your last reply could not be read." if unread else "")
    return {**message, "content": message["content"] + note}


def without_round(messages: Messages) -> str:
    """The content of the last message, without what :func:`with_round` added."""
    return _ROUND.sub("", messages[-1]["content"])


def split_of(question: str) -> Split:
    """The one split that a question belongs to, by a hash of its text: 8 of 10 train, 1 validation, 1 eval."""
    digest = blake2b(question.encode(), digest_size=8).digest()
    return SPLIT_OF_RESIDUE[int.from_bytes(digest, "big") % len(SPLIT_OF_RESIDUE)]


def held_out(task: Task, split: Split, n: int | None) -> list[EpisodeRequest]:
    """The first ``n`` questions of ``split``; with ``None`` ``QUESTIONS`` of them, or all where there are fewer.

    Raises what the task raises where it has no ``n`` of them, or none at all.
    """
    if n is not None:
        return task.eval_requests(split, n)
    try:
        return task.eval_requests(split, QUESTIONS)
    except ValueError:
        found = task.eval_requests(split, 1)
    too_many = QUESTIONS
    while too_many - len(found) > 1:
        half = (len(found) + too_many) // 2
        try:
            found = task.eval_requests(split, half)
        except ValueError:
            too_many = half
    return found


def check_success_metric(task: Task, episodes: Mapping[str, Episode], requests: Sequence[EpisodeRequest]) -> None:
    """Raise ``ValueError`` where no reward function of the rubric that scores ``requests`` makes the task's metric.

    Whose reward it is shows only in play. A rubric with a ``score`` of its own may make any metric.
    """
    function = task.success_metric.partition("/")[0]
    for kind in dict.fromkeys(request.episode_type for request in requests):
        rubric = getattr(episodes.get(kind), "rubric", None)
        if type(rubric) is Rubric and function not in rubric.names:
            raise ValueError(
                f"task {task.name!r}: success_metric={task.success_metric!r}: the rubric of episode {kind!r} has no "
                f"function {function!r}; {did_you_mean(function, rubric.names)}"
            )


def check_demonstrations(actors: Sequence[str], quality: float) -> None:
    """Raise ``ValueError`` unless there are actors and ``quality`` is a chance."""
    if not 0 <= quality <= 1:
        raise ValueError(f"quality={quality!r}: expected a number in [0, 1]")
    if not actors:
        raise ValueError("actors=(): expected at least one actor id")


def check_counts(**counts: int) -> None:
    """Raise ``ValueError`` unless every count is at least 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count!r}: expected at least 1")


def check_split(split: Split) -> Split:
    """``split``; ``ValueError`` where there is no such one."""
    if split not in get_args(Split):
        raise ValueError(f"split={split!r}: expected one of {get_args(Split)}")
    return split
