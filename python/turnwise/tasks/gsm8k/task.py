"""GSM8K: one solver, one call a question, scored by the number after ``####``."""

from __future__ import annotations

from random import Random
from typing import Any

from turnwise.arena import Episode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.tasks.base import Demonstration, Player
from turnwise.tasks.gsm8k.questions import QuestionOptions, QuestionTask
from turnwise.tasks.gsm8k.reader import MARK, answers_match, extract_answer, without_thoughts
from turnwise.types import Actor, TaskCapabilities

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
    return {SOLVER: float(answers_match(extract_answer(without_thoughts(completion)), artifact["answer"]))}


def answered(completion: str) -> dict[str, float]:
    """1.0 if there is one number after ``####``."""
    return {SOLVER: float(extract_answer(without_thoughts(completion)) is not None)}


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
        """A player that answers a random number from 0 to 99."""
        rng = Random(f"gsm8k-random/{seed}")
        return lambda actor_id, messages: f"{MARK} {rng.randrange(100)}"
