"""Interface of every shipped task to the training loop and the command line."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from turnwise.arena import Episode, MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.arena.episode import check_episode, only_actor
from turnwise.arena.setup import check_actor
from turnwise.types import Actor, EpisodeRequest, Message, Messages, TaskCapabilities, capabilities_of
from turnwise.utils.files import expanded
from turnwise.utils.registry import did_you_mean

T = TypeVar("T")
Split = Literal["train", "validation", "eval"]
"""A part of a task's questions."""

# The hash of a question's text decides its split, so no seed or count can move it to another: 8 parts train.
SPLIT_OF_RESIDUE: tuple[Split, ...] = ("eval", "validation", *("train",) * 8)

QUESTIONS = 200
"""Default number of held-out questions, if the task has as many."""

Demonstration = tuple[str, Messages, str]
"""``(actor id, prompt, completion)``: ``("solver", [{"role": "user", "content": "2 + 2 = ?"}], "#### 4")``."""

Player = Callable[[str, Messages], str]
"""Plays without a model: ``(actor id, the chat that the actor sees) -> completion``."""


class Task(Protocol):
    """A task: its players, its episodes, and the measure of success.

    ``capabilities`` (optional) declares its credit rule and its seats (:class:`turnwise.types.TaskCapabilities`). A
    task may also be a :class:`SplittableTask`, a :class:`MatchTask` or a
    :class:`~turnwise.tasks.two_player.query.SolvedGame`.

    Every result depends only on the task's options and the arguments. Equal calls return equal results in any process.
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
        """The ``questions * copies`` episodes of training step ``step``. Copies of a question share ``group_id``."""
        ...

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """The first ``n`` questions of a held-out split. They are always the same, and never used in training."""
        ...

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """``n`` demonstrations on training questions, for a supervised warm start."""
        ...

    def texts(self) -> list[str]:
        """Texts with the task's words, from which a tokenizer is built."""
        ...

    def oracle(self) -> Player:
        """A player that is always right: the upper bound of every comparison."""
        ...

    def random_player(self, seed: int) -> Player:
        """A player that knows only the format: the lower bound."""
        ...


@runtime_checkable
class SplittableTask(Protocol):
    """A task that a part of its team can play. ``turnwise eval --ablate`` measures such parts."""

    def with_actors(self, actors: Sequence[str]) -> Task:
        """Return the task for ``actors``, in their acting order.

        Its episodes play the same requests without the other actors. Its success metric belongs to one of ``actors``.
        Raises ``ValueError`` if they can't play alone.
        """
        ...


@runtime_checkable
class NumberedTask(Protocol):
    """A task that walks through its questions by their number in the run, so that a pass asks each once.

    Among several tasks the number of its questions changes from step to step, and can't tell where the pass is.
    """

    def requests_from(self, first: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Return the requests of ``questions`` from number ``first`` of the run on."""
        ...


@runtime_checkable
class PooledTask(Protocol):
    """A task with a pool of training questions, from which ``[curriculum]`` draws."""

    def question_pool(self, n: int | None) -> list[EpisodeRequest]:
        """Return a request for each of ``n`` training questions, or for all. Equal calls return equal requests.

        ``group_id`` names the question, and ``meta["level"]`` is its level, by default 0. Raises ``ValueError`` if
        there are fewer than ``n``, and for ``None`` if the task can't list all.
        """
        ...


@runtime_checkable
class MatchTask(Protocol):
    """A task whose seats play tournaments."""

    def match_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """Return the first ``n`` questions of a held-out split, to be played by other policies in each seat."""
        ...


@runtime_checkable
class ScriptedTask(Protocol):
    """A task with scripted players for tournaments."""

    @property
    def players(self) -> Mapping[str, Callable[[Random], Player]]:
        """The functions that make the players, by name. Each takes a random generator."""
        ...


class TaskOptions(BaseModel):
    """Options of a task; frozen, and unknown names are refused with the nearest known one."""

    model_config = ConfigDict(frozen=True)

    seed: int = 0

    @field_validator("*")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [cls._expand(each) for each in value]
        return expanded(value) if isinstance(value, Path) else value

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"unknown option {name!r}; {did_you_mean(str(name), list(cls.model_fields))}")
        return values


_ROUND = re.compile(r"\nRound \d+\.( Your last reply could not be read\.)?$")


def with_round(message: Message, turn: int, *, unread: bool = False) -> Message:
    """Append the round to ``message`` from the second round on (``turn`` counts from 0), and a note if ``unread``.

    ``unread`` means that the actor's own last reply could not be read. So a failed round never leads to the same prompt
    again.
    """
    if not turn:
        return message
    note = f"\nRound {turn + 1}." + (" Your last reply could not be read." if unread else "")
    return {**message, "content": message["content"] + note}


def without_round(messages: Messages) -> str:
    """The content of the last message, without the part that :func:`with_round` added."""
    return _ROUND.sub("", messages[-1]["content"])


def key_of(question: Any) -> str:
    """The text that stands for a question: a text itself, else its canonical JSON.

    Raises ``TypeError`` or ``ValueError`` for what JSON can't hold.
    """
    return question if isinstance(question, str) else json.dumps(question, sort_keys=True, allow_nan=False)


def split_of(question: Any) -> Split:
    """The split of a question, by a hash of its text: 8 of 10 go to train, 1 to validation, 1 to eval."""
    digest = blake2b(key_of(question).encode(), digest_size=8).digest()
    return SPLIT_OF_RESIDUE[int.from_bytes(digest, "big") % len(SPLIT_OF_RESIDUE)]


def held_out(task: Task, split: Split, n: int | None) -> list[EpisodeRequest]:
    """The first ``n`` questions of ``split``. ``None`` means ``QUESTIONS`` of them, or all if there are fewer.

    Raises the task's error if it has fewer than ``n`` of them, or none at all.
    """
    if n is not None:
        return task.eval_requests(split, n)
    try:
        return task.eval_requests(split, QUESTIONS)
    except ValueError:
        requests = task.eval_requests(split, 1)
    too_many = QUESTIONS
    while too_many - len(requests) > 1:
        half = (len(requests) + too_many) // 2
        try:
            requests = task.eval_requests(split, half)
        except ValueError:
            too_many = half
    return requests


def with_team(task: T, actors: Sequence[str], *, needed: str) -> T:
    """Copy ``task`` with ``actors`` as its ``team``. Raises ``ValueError`` if the actor ``needed`` is missing."""
    if needed not in actors:
        raise ValueError(f"actors={tuple(actors)!r}: expected {needed!r} among them")
    made: Any = copy.copy(task)
    made.team = tuple(actors)
    return made


def task_problems(
    task: Task, episodes: Mapping[str, Episode], requests: Sequence[EpisodeRequest], *, measured: bool = True
) -> list[str]:
    """List the problems that would stop ``requests`` in play: names of actors and episodes that don't fit together.

    If the requests are ``measured``, their rubric must also make the task's metric, for one of its actors or of the
    names that its capabilities declare as ``measured``. A rubric with its own ``score`` passes, as it may make any
    metric.
    """
    problems: list[str] = []
    actors: list[str] = []
    for actor in task.actors:
        with _gathered(problems):
            check_actor(actor, actors)
            actors.append(actor.id)
    capabilities = capabilities_of(task, TaskCapabilities)
    problems += [
        f"capabilities.seats: the task has no actor {seat!r}; {did_you_mean(seat, actors)}"
        for seat in capabilities.seats
        if seat not in actors
    ]
    # Each episode is registered under its name, and its actors are the task's.
    for name, episode in episodes.items():
        with _gathered(problems):
            check_episode(name, episode)
            problems += [
                f"episode {name!r}: the task has no actor {actor!r}; {did_you_mean(actor, actors)}"
                for actor in _actors_of(episode, actors)
                if actor not in actors
            ]
    # Each question is played by an episode, and the rubric of held-out ones makes the metric.
    function, _, measured_actor = task.success_metric.partition("/")
    known = [*actors, *capabilities.measured]
    for kind in dict.fromkeys(request.episode_type for request in requests):
        if kind not in episodes:
            problems.append(
                f"its questions are of episode {kind!r}, which episodes() lacks; {did_you_mean(kind, episodes)}"
            )
            continue
        rubric = getattr(episodes[kind], "rubric", None)
        if measured and type(rubric) is Rubric and function not in rubric.names:
            problems.append(
                f"success_metric={task.success_metric!r}: the rubric of episode {kind!r} has no function {function!r}; "
                f"{did_you_mean(function, rubric.names)}"
            )
        elif measured and type(rubric) is Rubric and measured_actor not in ("", *known):
            problems.append(
                f"success_metric={task.success_metric!r}: {measured_actor!r} is no actor of the task, nor in its "
                f"capabilities.measured; {did_you_mean(measured_actor, known)}"
            )
    return [f"task {task.name!r}: {problem}" for problem in problems]


def _actors_of(episode: Episode, actors: Sequence[str]) -> Sequence[str]:
    """Return the actors that ``episode`` names. Raises ``ValueError`` if it has to name one and does not."""
    named = getattr(episode, "actor", "") or getattr(episode, "actors", None) or ()
    made: Any = type(episode)
    kinds: tuple[Any, ...] = SingleTurnEpisode, MultiTurnEpisode
    for kind in kinds:
        if not named and made.rollout is kind.rollout and made.get_initial_actor is kind.get_initial_actor:
            return [only_actor(actors) if kind is SingleTurnEpisode else made.get_initial_actor(episode)]
    return [named] if isinstance(named, str) else [each for each in named if isinstance(each, str)]


@contextmanager
def _gathered(problems: list[str]) -> Iterator[None]:
    """Add the ``ValueError`` or ``TypeError`` of the block to ``problems``."""
    try:
        yield
    except (ValueError, TypeError) as error:
        problems.append(str(error))


def check_demonstrations(actors: Sequence[str], quality: float) -> None:
    """Raise ``ValueError`` unless there are actors and ``quality`` is in [0, 1]."""
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
    """Return ``split``. Raises ``ValueError`` for an unknown one."""
    if split not in get_args(Split):
        raise ValueError(f"split={split!r}: expected one of {get_args(Split)}")
    return split
