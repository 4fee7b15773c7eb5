"""Questions of reasoning-gym with its own scoring: ``task = "reasoning_gym:countdown"``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from turnwise.arena import Episode, InvalidActionError, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.arena.rewards.invalid_action import parsing
from turnwise.arena.rewards.rubric import SHARE
from turnwise.arena.runtime.user_code import call
from turnwise.integrations.environments.base.play import named_function, require
from turnwise.integrations.environments.scoring import AnswerScorer, LockedScorer, PlainScorer
from turnwise.tasks import Demonstration, Player, Split, TaskOptions
from turnwise.tasks.base import check_split, split_of
from turnwise.tasks.generated import GeneratedTask, texts_of
from turnwise.types import EpisodeState, TaskCapabilities

SOLVER = "solver"
SYSTEM_PROMPT = "Put your final answer between <answer> and </answer>."
SEED = 0
"""Seed of every dataset, so that held-out questions never change."""


class ReasoningGymOptions(TaskOptions):
    """Options of ``reasoning_gym:...``. Example: ``ReasoningGymOptions(name="countdown", size=2000)``."""

    name: str = Field(min_length=1)
    """The dataset's name."""
    arguments: dict[str, Any] = Field(default={})
    """The dataset's own settings, such as ``min_numbers``."""
    size: int = Field(default=10_000, ge=10)
    """Number of questions, from which all splits are drawn."""
    render: str = ""
    """``"module:function"`` that makes a question a prompt: ``render(question) -> str``."""
    parse: str = ""
    """``"module:function"`` that finds the answer in a completion: ``parse(text, legal) -> str``; ``legal`` is None."""
    prompt: str = SYSTEM_PROMPT
    """System prompt of the solver."""
    success: float = 1.0
    """Score from which an answer counts as right."""
    sandbox: bool = True
    """Scores each answer in a process that may only compute. Some datasets evaluate answers as Python."""
    max_tokens: int = Field(default=512, ge=1)
    """Limit of a completion, in tokens."""


class ReasoningGymEpisode(SingleTurnEpisode):
    """One question, one answer, and the dataset's score of it as the reward.

    An answer that can't be found or scored gets the score of a missing one, which some datasets set above 0: 0.01 in
    ``countdown``. The artifact is ``{"question": "...", "index": 12}``.
    """

    actor = SOLVER

    def __init__(self, task: ReasoningGymTask) -> None:
        options = task.options
        self.episode_type = task.name
        self.scorer = task.scorer
        self.rubric = Rubric([score, solved, answered], [1.0, 0.0, 0.0], ranges={solved: SHARE, answered: SHARE})
        self.success = options.success
        self.render = named_function(options.render, "render")
        self.parse = named_function(options.parse, "parse")

    def get_prompt(self, artifact: Any) -> str:
        return artifact["question"] if self.render is None else self.render(artifact["question"])

    async def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``answer``, its ``score``, 1.0 for a success as ``solved``, and why it ``failed``, if it did."""
        step = state.trajectory[-1]
        answer, failed = self._answer(step.completion)
        value, reason = await call("reward", partial(self.scorer.score, int(state.data["index"]), answer))
        solved = float(value >= self.success)
        return {"answer": answer, "score": value, "solved": solved, "failed": failed or reason}

    async def rollout(self, arena: Any, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        state = await super().rollout(arena, artifact, state)
        state.data["index"] = artifact["index"]
        return state

    def _answer(self, text: str) -> tuple[str | None, str]:
        """Return the answer in ``text`` and why there is none: the last one in tags, else the whole text."""
        if self.parse is None:
            answer, at = text, 0
            while (start := text.find("<answer>", at)) >= 0 and (end := text.find("</answer>", start)) >= 0:
                answer, at = text[start + len("<answer>") : end], end
            return answer.strip(), ""
        try:
            with parsing():
                answer = self.parse(text, None)
                return (None if answer is None else str(answer)), ""
        except InvalidActionError as error:
            return None, str(error)


def score(extras: dict[str, Any]) -> dict[str, float]:
    """The dataset's own score."""
    return {SOLVER: extras["score"]}


def solved(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 if the score reached ``task_options.success``."""
    return {SOLVER: extras["solved"]}


def answered(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 if the answer was found and could be scored."""
    return {SOLVER: float(not extras["failed"])}


class ReasoningGymTask(GeneratedTask):
    """A solver on the questions of one dataset; see :class:`turnwise.tasks.base.Task`.

    A hash of a question's text decides its split. So equal questions, which datasets may repeat, are in one split.

    Example: ``build_task("reasoning_gym:countdown", {"arguments": {"max_numbers": 4}})``
    """

    options_type = ReasoningGymOptions
    success_metric = f"solved/{SOLVER}"
    capabilities = TaskCapabilities(credit_rule="grpo")
    system_prompts: ClassVar[dict[str, str]] = {SOLVER: SYSTEM_PROMPT}

    def __init__(self, options: ReasoningGymOptions) -> None:
        super().__init__(options)
        gym = require("reasoning_gym", "reasoning_gym")
        arguments = {**options.arguments, "seed": SEED, "size": options.size}
        self.name = f"reasoning_gym:{options.name}"  # type: ignore[misc]
        self.system_prompts = {SOLVER: options.prompt}  # type: ignore[misc]
        try:
            self.dataset = gym.create_dataset(options.name, **arguments)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"task={self.name!r}, arguments={options.arguments!r}: {error}") from error
        self.scorer: AnswerScorer = PlainScorer(self.dataset)
        if options.sandbox:
            self.scorer = LockedScorer(options.name, arguments)
        self._known: dict[int, dict[str, Any]] = {}
        self._index_of: dict[str, int] = {}

    def entry(self, index: int) -> dict[str, Any]:
        """Return an item of the dataset; it is made once."""
        if index not in self._known:
            self._known[index] = self.dataset[index]
            self._index_of.setdefault(self._known[index]["question"], index)
        return self._known[index]

    def draw(self, split: Split, n: int, seed: int | str) -> Sequence[str]:
        """Draw ``n`` different questions of ``split``. Raises ``ValueError`` if the dataset has fewer."""
        questions = self._draw_up_to(check_split(split), n, seed)
        if len(questions) < n:
            raise ValueError(
                f"n={n!r}: the {split} split of task {self.name!r} has {len(questions)} different questions among "
                f"task_options.size = {self.options.size}"
            )
        return questions

    def _draw_up_to(self, split: Split, n: int, seed: int | str) -> list[str]:
        questions: dict[str, None] = {}
        for question in self._shuffled(seed):
            if split_of(question) == split:
                questions[question] = None
            if len(questions) == n:
                break
        return list(questions)

    def _shuffled(self, seed: int | str) -> Iterator[str]:
        """Yield all questions in an order that ``seed`` determines, each made when it is needed."""
        moved: dict[int, int] = {}  # the places of a list of all indices that were exchanged so far
        rng = Random(f"{self.name}/{seed}")
        for last in reversed(range(self.options.size)):
            index = rng.randrange(last + 1)
            chosen = moved.get(index, index)
            moved[index] = moved.pop(last, last)
            yield self.entry(chosen)["question"]

    def artifact(self, question: str) -> dict[str, Any]:
        return {"question": question, "index": self._index_of[question]}

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        """Return the episode. Raises ``ValueError`` for a tree: with one call, branches equal a question's copies."""
        if tree is not None:
            raise ValueError(f"task {self.name!r} has one call a question: branch with rollout.group_size")
        return {self.name: ReasoningGymEpisode(self)}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """The dataset's own answers to training questions, at most 200 different ones."""
        asked = self._draw_up_to("train", min(n, 200), f"demonstrations/{seed}")
        prompt, oracle = self.system_prompts[SOLVER], self.oracle()
        shown: list[Demonstration] = []
        for question in asked:
            said = [{"role": "user", "content": question}]
            shown.append((SOLVER, [{"role": "system", "content": prompt}, *said], oracle(SOLVER, said)))
        return [shown[index % len(shown)] for index in range(n)]

    def texts(self) -> list[str]:
        return texts_of(self.demonstrations(60, 0))

    def oracle(self) -> Player:
        """A player that knows the dataset's answers to the questions drawn so far. It needs no ``render``."""

        def play(actor_id: str, messages: Any) -> str:
            return f"<answer>{self.entry(self._index_of[messages[-1]['content']])['answer']}</answer>"

        return play

    def random_player(self, seed: int) -> Player:
        """A player that answers with a random number from 0 to 99."""
        rng = Random(f"{self.name}-random/{seed}")
        return lambda actor_id, messages: f"<answer>{rng.randrange(100)}</answer>"
