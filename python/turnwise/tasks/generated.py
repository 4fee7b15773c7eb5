"""Base of tasks that draw their questions. A question is a text or JSON data, and each split has its own questions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from turnwise.arena.runtime.hashing import derive_seed
from turnwise.tasks.base import Demonstration, Split, check_counts, check_split, key_of, split_of
from turnwise.types import Actor, EpisodeRequest

Q = TypeVar("Q", bound=Hashable)


class GeneratedTask(ABC):
    """Requests, held-out questions and actors of a task that draws its questions; see ``turnwise.tasks.base.Task``.

    A subclass sets its name, its ``options_type`` (with ``seed`` and ``max_tokens``), its ``system_prompts`` by actor
    and the ``key`` under which an artifact holds the question. It implements :meth:`draw`.
    """

    name: ClassVar[str]
    key: ClassVar[str] = "question"
    system_prompts: ClassVar[Mapping[str, str]]
    options_type: ClassVar[type]
    options: Any

    def __init__(self, options: Any = None) -> None:
        self.options = options or self.options_type()

    @abstractmethod
    def draw(self, split: Split, n: int, seed: int | str) -> Sequence[Any]:
        """Draw ``n`` different questions of ``split``. Equal arguments give equal lists; a larger ``n`` extends one."""

    @property
    def roles(self) -> Sequence[str]:
        """The ids of the actors, in acting order."""
        return tuple(self.system_prompts)

    def level(self, question: Any) -> int:
        """The level of ``question``, by which ``curriculum.gate`` admits questions."""
        return 0

    def artifact(self, question: Any) -> Any:
        """The episode's artifact for ``question``."""
        return {self.key: question}

    def key_of(self, question: Any) -> str:
        """The text that names ``question`` in groups and seeds."""
        return key_of(question)

    def seed_parts(self, question: Any) -> Sequence[Any]:
        """The values from which the seed of an episode about ``question`` is derived."""
        return (self.key_of(question),)

    @property
    def actors(self) -> list[Actor]:
        limit = self.options.max_tokens
        return [Actor(actor, self.system_prompts[actor], max_tokens=limit) for actor in self.roles]

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Draw new questions at every step, from the 8 in 10 that belong to training."""
        check_counts(questions=questions, copies=copies)
        seed = self.options.seed
        return [
            self._request(question, f"{step}", (seed, step), (copy,), is_trainable=True)
            for question in self.draw("train", questions, f"{seed}/step-{step}")
            for copy in range(copies)
        ]

    def question_pool(self, n: int | None) -> list[EpisodeRequest]:
        """Draw ``n`` training questions, the same at every call."""
        if n is None:
            raise ValueError(f"task {self.name!r} draws its questions, without end: expected a number of them")
        seed = self.options.seed
        pool = []
        for question in self.draw("train", n, f"{seed}/pool"):
            request = self._request(question, "train", (seed, "pool"), (), is_trainable=True)
            pool.append(replace(request, meta={"level": self.level(question)}))
        return pool

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """Draw held-out questions. They don't depend on the task's seed, so that runs can be compared."""
        return [self._request(question, split, (split,), (), is_trainable=False) for question in self.draw(split, n, 0)]

    def _request(
        self, question: Any, group: str, before: Sequence[Any], after: Sequence[Any], *, is_trainable: bool
    ) -> EpisodeRequest:
        """Make a request whose seed is derived from ``before``, the question and ``after``."""
        return EpisodeRequest(
            self.name,
            self.artifact(question),
            group_id=f"{group}/{self.key_of(question)}",
            seed=derive_seed(self.name, *before, *self.seed_parts(question), *after),
            is_trainable=is_trainable,
        )


def draw_distinct(
    split: Split,
    n: int,
    draw: Callable[[], Q | None],
    what: str,
    *,
    split_of: Callable[[Q], Split] = split_of,
    patience: int = 20_000,
    repeats: bool = False,
) -> list[Q]:
    """Call ``draw`` until it has given ``n`` different questions of ``split``; ``None`` stands for no question.

    A longer list begins with the shorter one. After ``patience`` draws in a row without a new question, all count as
    found: a ``ValueError`` gives the number of ``what``. With ``repeats`` a question may be drawn again.
    """
    check_split(split)
    if n < 0:
        raise ValueError(f"n={n!r}: expected a count >= 0")
    questions: list[Q] = []
    known: set[Q] = set()
    misses = 0
    while len(questions) < n:
        question = draw()
        if question is not None and (repeats or question not in known) and split_of(question) == split:
            questions.append(question)
            known.add(question)
            misses = 0
        elif (misses := misses + 1) == patience:
            raise ValueError(f"n={n!r}: the {split} split holds about {len(questions)} {what}")
    return questions


def texts_of(demonstrations: Sequence[Demonstration]) -> list[str]:
    """All messages and replies of ``demonstrations``, for a tokenizer. Replies count as often as prompts, so that a
    frequent answer becomes one token."""
    return [text for _, messages, reply in demonstrations for text in (*(m["content"] for m in messages), reply)]
