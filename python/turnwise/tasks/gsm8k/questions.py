"""Bases of tasks over files of questions: the files, their splits, and passes over them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from functools import cached_property, lru_cache
from random import Random
from typing import ClassVar

from pydantic import Field, model_validator

from turnwise.arena.runtime.hashing import derive_seed
from turnwise.tasks.base import Split, TaskOptions, check_counts, check_split, split_of
from turnwise.tasks.gsm8k.reader import Question, read_dataset, read_questions
from turnwise.types import EpisodeRequest


class QuestionOptions(TaskOptions):
    """Source of the questions: ``path``, a JSONL file in GSM8K's format, or ``dataset``, a name on the Hugging Face Hub
    (or a folder), with a ``subset`` if it has several.

    ``eval_path`` names another file for evaluation, whose questions never train. A dataset's evaluation questions are
    its split ``test``. Without either, 1 question in 10 is kept for evaluation. 1 in 10 is always kept for validation.
    """

    path: str | None = None
    eval_path: str | None = None
    dataset: str | None = None
    subset: str | None = None
    max_tokens: int = Field(default=256, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> QuestionOptions:
        if (self.path is None) == (self.dataset is None):
            raise ValueError(f"path={self.path!r}, dataset={self.dataset!r}: expected one of them")
        if self.dataset is not None and self.eval_path is not None:
            raise ValueError(f"eval_path={self.eval_path!r}: it goes with path; of a dataset that is its split test")
        if self.dataset is None and self.subset is not None:
            raise ValueError(f"subset={self.subset!r}: expected a dataset with it")
        return self

    @property
    def source(self) -> str:
        """Source of the questions, as errors name it."""
        return str(self.path or self.dataset)

    def read(self) -> tuple[list[Question], list[Question] | None]:
        """Read the questions, and the separate ones for evaluation if there are any."""
        if self.dataset is not None:
            return read_dataset(self.dataset, self.subset, "train"), read_dataset(self.dataset, self.subset, "test")
        assert self.path is not None
        return read_questions(self.path), None if self.eval_path is None else read_questions(self.eval_path)


class QuestionTask(ABC):
    """Requests and held-out questions of a task over a file of questions; see :class:`turnwise.tasks.base.Task`."""

    name: ClassVar[str]

    def __init__(self, options: QuestionOptions) -> None:
        self._where, self._seed = options.source, options.seed
        self._questions, self._held_out = options.read()

    @cached_property
    def splits(self) -> dict[Split, list[Question]]:
        """The questions of each split. No question text is in two of them, even if the files repeat it."""
        unique = {question.question: question for question in self._questions}
        held_out = None if self._held_out is None else {question.question: question for question in self._held_out}
        splits: dict[Split, list[Question]] = {"train": [], "validation": [], "eval": []}
        for text, question in unique.items():
            if held_out is None:
                splits[split_of(text)].append(question)
            elif text not in held_out:
                splits["validation" if split_of(text) == "validation" else "train"].append(question)
        if held_out is not None:
            splits["eval"] = list(held_out.values())
        return splits

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Return the next ``questions`` of endless passes over the training questions, each in a new order."""
        check_counts(questions=questions, copies=copies)
        train = self.split("train", 1)
        requests = []
        for place in range(step * questions, (step + 1) * questions):
            lap, index = divmod(place, len(train))
            question = train[_shuffled(len(train), f"{self._seed}/{lap}")[index]]
            for copy in range(copies):
                seed = derive_seed(self.name, self._seed, place, copy)
                requests.append(self._request(question, f"{place}", seed, is_trainable=True))
        return requests

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        check_counts(n=n)
        return [
            self._request(question, f"{split}/{place}", derive_seed(self.name, split, place), is_trainable=False)
            for place, question in enumerate(self.split(split, n)[:n])
        ]

    def split(self, split: Split, n: int) -> list[Question]:
        """The questions of a split. Raises ``ValueError`` if there are fewer than ``n``."""
        questions = self.splits[check_split(split)]
        if len(questions) < n:
            raise ValueError(f"n={n!r}: the {split} split of {self._where} has {len(questions)} questions")
        return questions

    def shown(self) -> list[str]:
        """Training questions and their worked solutions, from which a tokenizer is built."""
        return [text for question in self.split("train", 1)[:2000] for text in question[:2] if text]

    def answers(self) -> dict[str, str]:
        """The right answer of each question in all splits, for the oracle."""
        return {question.question: question.answer for split in self.splits.values() for question in split}

    def _request(self, question: Question, group: str, seed: int, is_trainable: bool) -> EpisodeRequest:
        artifact = {"question": question.question, "answer": question.answer}
        return EpisodeRequest(self.name, artifact, group_id=group, seed=seed, is_trainable=is_trainable)


@lru_cache(maxsize=4)
def _shuffled(n: int, seed: str) -> Sequence[int]:
    return Random(f"math-order/{seed}").sample(range(n), n)
