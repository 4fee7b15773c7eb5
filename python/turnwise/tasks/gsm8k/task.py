"""GSM8K: one solver, one call per question, scored by the number after ``####``; the base of tasks over such files."""

from __future__ import annotations

import warnings
from abc import ABC
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import Any, ClassVar, get_args

from pydantic import Field, model_validator

from turnwise.arena import Episode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.arena.runtime.hashing import derive_seed
from turnwise.tasks.base import Demonstration, Player, Split, TaskOptions, check_counts, split_of
from turnwise.tasks.gsm8k.reader import (
    MARK,
    GSM8KQuestion,
    answers_match,
    extract_answer,
    read_dataset,
    read_questions,
)
from turnwise.tasks.questions import QuestionSet, identity_of
from turnwise.types import Actor, EpisodeRequest, TaskCapabilities
from turnwise.utils.files import PathText


class QuestionOptions(TaskOptions):
    """Source of the questions: ``path``, a JSONL file in GSM8K's format, or ``dataset``, a name on the Hugging Face Hub
    (or a folder), with a ``subset`` if it has several.

    ``eval_path`` names another file for evaluation, whose questions never train. A dataset's evaluation questions are
    its split ``test``. Without either, 1 question in 10 is kept for evaluation. 1 in 10 is always kept for validation.
    """

    path: PathText | None = None
    eval_path: PathText | None = None
    dataset: PathText | None = None
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

    def read(self) -> tuple[list[GSM8KQuestion], list[GSM8KQuestion] | None]:
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
    def by_text(self) -> dict[str, GSM8KQuestion]:
        """The questions by their texts. Of a repeated one, a file for evaluation decides, then the smallest answer."""
        found: dict[str, GSM8KQuestion] = {}
        differ: dict[str, None] = {}
        for question in sorted(self._held_out or ()) + sorted(self._questions):
            kept = found.setdefault(question.question, question)
            if not answers_match(kept.answer, question.answer):
                differ[question.question] = None
        if differ:
            first = next(iter(differ))
            warnings.warn(
                f"{self._where}: {len(differ)} questions have several answers, of which one counts: {first!r:.80} has "
                f"{found[first].answer!r}",
                stacklevel=2,
            )
        return found

    @cached_property
    def question_set(self) -> QuestionSet:
        """The question texts. None is in two splits, even if the files repeat it."""
        held_out = None if self._held_out is None else {identity_of(question.question) for question in self._held_out}

        def split(text: str) -> Split:
            if held_out is None:
                return split_of(text)
            return "eval" if text in held_out else "validation" if split_of(text) == "validation" else "train"

        return QuestionSet(((text, text) for text in self.by_text), split_of=split, what=self._where)

    @cached_property
    def splits(self) -> dict[Split, list[GSM8KQuestion]]:
        """The questions of each split."""
        return {split: [self.by_text[text] for text in self.question_set.listed(split)] for split in get_args(Split)}

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Return the next ``questions`` of endless passes over the training questions, each in a new order."""
        return self.requests_from(step * questions, questions, copies)

    def requests_from(self, first: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Return ``questions`` of the passes, from number ``first`` on; see ``turnwise.tasks.base.NumberedTask``."""
        check_counts(questions=questions, copies=copies)
        requests, known, count = [], self.question_set, len(self.split("train", 1))
        for number in range(first, first + questions):
            lap, index = divmod(number, count)
            question = self.by_text[known.at("train", known.order("train", f"{self._seed}/{lap}")[index])]
            for copy in range(copies):
                seed = derive_seed(self.name, self._seed, number, copy)
                requests.append(self._request(question, f"{number}", seed, is_trainable=True))
        return requests

    def question_pool(self, n: int | None) -> list[EpisodeRequest]:
        """Return the first ``n`` training questions, or all, with the levels of the file."""
        pool = []
        for question in self.split("train", n or 1)[:n]:
            request = self._request(question, question.question, derive_seed(self.name, self._seed, "pool"), True)
            pool.append(replace(request, meta={"level": question.level}))
        return pool

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        check_counts(n=n)
        return [
            self._request(question, f"{split}/{index}", derive_seed(self.name, split, question.question), False)
            for index, question in enumerate(self.split(split, n)[:n])
        ]

    def split(self, split: Split, n: int) -> list[GSM8KQuestion]:
        """The questions of a split. Raises ``ValueError`` if there are fewer than ``n``."""
        self.question_set.first(split, n)
        return self.splits[split]

    def shown(self) -> list[str]:
        """Training questions and their worked solutions, from which a tokenizer is built."""
        return [text for question in self.split("train", 1)[:2000] for text in question[:2] if text]

    def answers(self) -> dict[str, str]:
        """The right answer of each question in all splits, for the oracle."""
        return {text: question.answer for text, question in self.by_text.items()}

    def _request(self, question: GSM8KQuestion, group: str, seed: int, is_trainable: bool) -> EpisodeRequest:
        artifact = {"question": question.question, "answer": question.answer}
        return EpisodeRequest(self.name, artifact, group_id=group, seed=seed, is_trainable=is_trainable)


# ---------------------------------------------------------------------------------------------------------------------
# The task
# ---------------------------------------------------------------------------------------------------------------------
SOLVER = "solver"
SYSTEM_PROMPT = f"Solve the problem step by step. End with a line {MARK} and the answer, a number."


class GSM8KEpisode(SingleTurnEpisode):
    """One question, one answer. The artifact is ``{"question": ..., "answer": "72"}``; the right number earns 1.

    Text in ``<think>`` is not an answer.
    """

    episode_type = "gsm8k"
    actor = SOLVER

    def __init__(self) -> None:
        self.rubric = Rubric([correct, answered], [1.0, 0.0], valid=[answered])

    def get_prompt(self, artifact: Any) -> str:
        return artifact["question"]


def correct(completion: str, artifact: Any) -> dict[str, float]:
    """1.0 if the number after the last ``####`` is the answer."""
    return {SOLVER: float(answers_match(extract_answer(completion), artifact["answer"]))}


def answered(completion: str) -> dict[str, float]:
    """1.0 if there is one number after ``####``."""
    return {SOLVER: float(extract_answer(completion) is not None)}


class GSM8KOptions(QuestionOptions):
    """Options of the task ``gsm8k``.

    Example: ``GSM8KOptions(dataset="openai/gsm8k", subset="main")`` or ``GSM8KOptions(path="questions.jsonl")``
    """


class GSM8KTask(QuestionTask):
    """A solver alone on the questions of a file or a dataset; see :class:`turnwise.tasks.base.Task`.

    Example: ``GSM8KTask(GSM8KOptions(path="train.jsonl"))``
    """

    name = "gsm8k"
    success_metric = f"correct/{SOLVER}"
    capabilities = TaskCapabilities(credit_rule="grpo")
    options_type = GSM8KOptions

    def __init__(self, options: GSM8KOptions) -> None:
        super().__init__(options)
        self.options = options

    @property
    def actors(self) -> list[Actor]:
        return [Actor(SOLVER, SYSTEM_PROMPT, max_tokens=self.options.max_tokens)]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        """Return the episode. Raises ``ValueError`` for a tree: with one call, branches equal a question's copies."""
        if tree is not None:
            raise ValueError(f"task {self.name!r} has one call a question: branch with rollout.group_size")
        return {self.name: GSM8KEpisode()}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Worked solutions of training questions."""
        rng = Random(f"gsm8k-demonstrations/{seed}")
        train = self.split("train", 1)
        shown = []
        for question in (train[rng.randrange(len(train))] for _ in range(n)):
            messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.question}]
            shown.append((SOLVER, messages, f"{question.solution}\n{MARK} {question.answer}".strip()))
        return shown

    def texts(self) -> list[str]:
        return [*self.shown(), SYSTEM_PROMPT, MARK]

    def oracle(self) -> Player:
        """A player that knows every answer of the files."""
        gold = self.answers()
        return lambda actor_id, messages: f"{MARK} {gold[messages[-1]['content']]}"

    def random_player(self, seed: int) -> Player:
        """A player that answers with a random number from 0 to 99."""
        rng = Random(f"gsm8k-random/{seed}")
        return lambda actor_id, messages: f"{MARK} {rng.randrange(100)}"
