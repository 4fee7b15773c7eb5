"""The base of a task that you write, so that the command line can train, evaluate and replay it."""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from turnwise.arena import Episode, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split, TaskOptions
from turnwise.tasks.generated import GeneratedTask
from turnwise.tasks.questions import QuestionSet, identity_of
from turnwise.types import EpisodeRequest


class OwnOptions(TaskOptions):
    """Options in ``[task_options]``; subclass it for more. ``max_tokens`` is each actor's limit of a completion."""

    max_tokens: int = Field(default=256, ge=1)


class OwnTask(GeneratedTask):
    """Base of your own task, which a run's TOML selects with ``task = "module:Class"``.

    Set ``name``, ``success_metric`` (a reward function, and an actor if one alone counts) and ``system_prompts`` (one
    per actor). Implement :meth:`questions` and :meth:`episodes`, whose main episode has the task's name. A question is
    a text or JSON data, such as a row of a dataset. An artifact is a question that is a dict, else ``{"question":
    question}``; override :meth:`artifact` for more. A hash of its :meth:`identity` decides the split of a question, and
    which steps draw it.
    So no question is in two splits under two ids, and the order of the questions has no effect. They are read once.
    Override :meth:`level` for a curriculum with levels. For a warm start, tournaments and baselines
    also implement :meth:`demonstrations`, :meth:`oracle` and :meth:`random_player`. Its credit rule and its seats are
    its ``capabilities`` (:class:`turnwise.types.TaskCapabilities`).

    Example::

        class Sums(OwnTask):
            name = "sums"
            success_metric = "right/solver"
            system_prompts = {"solver": "Answer with a number."}

            def questions(self):
                return [f"{a} + {b}" for a in range(30) for b in range(30)]

            def episodes(self, tree=None):
                return {"sums": SumEpisode(sampler=tree)}
    """

    options_type: ClassVar[type[OwnOptions]] = OwnOptions
    success_metric: ClassVar[str] = ""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        for attribute, expected in (("name", "a name"), ("system_prompts", "a prompt, or '', by actor")):
            if not getattr(self, attribute, None):
                raise ValueError(f"{type(self).__name__}.{attribute}: expected {expected}")
        metric, mark, actor = self.success_metric.partition("/")
        if not metric or (mark and not actor):
            raise ValueError(
                f"success_metric={self.success_metric!r}: expected 'function/actor', as in 'right/solver', or "
                "'function' for the mean over its actors"
            )

    @abstractmethod
    def questions(self) -> Sequence[Any]:
        """All questions of all splits, always the same: texts, or data that JSON can hold."""

    @abstractmethod
    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        """The episodes by their names; with a tree sampler, training branches at each action."""

    def identity(self, question: Any) -> Any:
        """The part of ``question`` that tells it apart: a text or JSON data.

        By default these are all keys but ids (``id``, ``index``, ``question_id``). Questions of one identity are in one
        split. Override it if rows with the same question also differ elsewhere, as in their solutions.
        """
        return identity_of(question)

    def draw(self, split: Split, n: int, seed: int | str) -> Sequence[Any]:
        """Draw ``n`` different questions of ``split`` by ``seed``; held-out ones are the first ``n``, with any seed."""
        if split == "train":
            return self.question_set.draw(split, n, f"{self.name}/{seed}")
        return self.question_set.first(split, n)

    def question_pool(self, n: int | None) -> list[EpisodeRequest]:
        """Draw ``n`` training questions, or return all."""
        return super().question_pool(self.question_set.count("train") if n is None else n)

    def key_of(self, question: Any) -> str:
        return self.question_set.key(question)

    def artifact(self, question: Any) -> Any:
        """The episode's artifact: a question that is a dict, else ``{"question": question}``."""
        own = copy.deepcopy(question)  # an episode may change its artifact
        return own if isinstance(own, dict) else super().artifact(own)

    @cached_property
    def question_set(self) -> QuestionSet:
        """The questions, read once. Raises ``ValueError`` for one that JSON can't hold."""
        where, found = f"{type(self).__name__}.questions()", self.questions()
        if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
            raise ValueError(f"{where} gave {found!r:.80}: expected a list of questions")
        rows = ((f"{where}, question {index}", question) for index, question in enumerate(found))
        is_default = type(self).identity.__module__.startswith("turnwise.")
        return QuestionSet(rows, self.identity, what=f"task {self.name!r}", ids_may_count=is_default)

    def match_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """The first ``n`` held-out questions, for tournaments of a task with ``seats``."""
        return self.eval_requests(split, n)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """No demonstrations, unless a subclass overrides this method."""
        raise ValueError(f"task {self.name!r} has no demonstrations: expected warm_start.data, or warm_start.steps = 0")

    def texts(self) -> list[str]:
        """Questions and system prompts, from which a tiny model's tokenizer is built."""
        train = [text for question in self.question_set.listed("train", 2000) for text in texts_in(question)]
        return [*train, *self.system_prompts.values()]

    def oracle(self) -> Player:
        raise ValueError(f"task {self.name!r} has no oracle: expected a player from oracle()")

    def random_player(self, seed: int) -> Player:
        raise ValueError(f"task {self.name!r} has no random player: expected one from random_player(seed)")


def texts_in(value: Any) -> list[str]:
    """Return the texts in JSON data: values without their keys, other values as text."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [json.dumps(value)]
    return [text for part in parts for text in (texts_in(part) if isinstance(part, (dict, list, str)) else [str(part)])]
