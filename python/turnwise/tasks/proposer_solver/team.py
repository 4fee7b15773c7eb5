"""The proposer-solver task. Proposers train on their problems' pass rates, solvers on the problems.

Success is the share of held-out arithmetic problems that the solver gets right.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pydantic import Field

from turnwise.arena import Episode, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split, TaskOptions
from turnwise.tasks.generated import GeneratedTask, texts_of
from turnwise.tasks.proposer_solver.arithmetic import Size, draw_problem, draw_problems, draw_training, value_of
from turnwise.tasks.proposer_solver.episodes import (
    PROPOSE,
    PROPOSER,
    SOLVE,
    SOLVER,
    SYSTEM_PROMPTS,
    Curve,
    ProposeEpisode,
    SolveEpisode,
    propose_message,
)
from turnwise.types import EpisodeRequest, Message, Messages
from turnwise.utils.files import PathText


class ProposerSolverOptions(TaskOptions):
    """Options of the task ``proposer_solver``.

    A problem has up to ``numbers`` numbers from 0 to ``largest``. ``attempts`` at it give a pass rate, and ``curve``
    turns that into the proposer's reward. ``train_solver = false`` trains only proposers. ``quality`` is the chance
    that a demonstrated answer is right. ``store_path`` is an SQLite file for solved problems, created if it is missing;
    later runs with the same file continue with its problems.
    """

    attempts: int = Field(default=4, ge=1)
    curve: Curve = "variance"
    numbers: int = Field(default=3, ge=2, le=8)
    largest: int = Field(default=20, ge=1, le=999)
    train_solver: bool = True
    quality: float = Field(default=0.4, ge=0, le=1)
    max_tokens: int = Field(default=24, ge=1)
    store_path: PathText | None = Field(default=None, min_length=1)

    @property
    def size(self) -> Size:
        return Size(self.numbers, self.largest)


class ProposerSolverTask(GeneratedTask):
    """Problems that the team makes itself; see :class:`turnwise.tasks.base.Task` for what each method promises.

    Training plays the episode ``proposer_solver``, evaluation plays ``solve`` on held-out problems.

    Example: ``ProposerSolverTask(ProposerSolverOptions(attempts=8, curve="linear"))``
    """

    name = PROPOSE
    system_prompts = SYSTEM_PROMPTS
    success_metric = f"correct/{SOLVER}"
    options_type = ProposerSolverOptions
    options: ProposerSolverOptions

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        options = self.options
        propose = ProposeEpisode(
            attempts=options.attempts,
            curve=options.curve,
            size=options.size,
            train_solver=options.train_solver,
            sampler=tree,
            store_path=options.store_path,
        )
        return {PROPOSE: propose, SOLVE: SolveEpisode()}

    def draw(self, split: Split, n: int, seed: int | str) -> Sequence[str]:
        return draw_problems(split, n, seed, self.options.size)

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Draw ``questions`` examples and show each to ``copies`` proposers."""
        requests = super().requests(step, questions, copies)
        for request in requests:
            request.artifact = {"example": request.artifact[self.key], "step": step}
        return requests

    def question_pool(self, n: int | None) -> list[EpisodeRequest]:
        raise ValueError(f"task {self.name!r} makes its own questions: expected curriculum.sampling = 'task'")

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """Draw problems of the split for a solver alone. They don't depend on the task's seed."""
        requests = super().eval_requests(split, n)
        for request in requests:
            request.episode_type = SOLVE
        return requests

    def artifact(self, question: str) -> dict[str, Any]:
        return {"question": question, "answer": value_of(question)}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Demonstrate the roles in turn: a random problem, and an answer that is right with chance ``quality``."""
        return self._demonstrate(n, f"{seed}", self.options.quality)

    def texts(self) -> list[str]:
        shown = self._demonstrate(200, "texts", 0.4)
        return texts_of(shown)

    def oracle(self) -> Player:
        """A player that solves every problem, and proposes random ones."""
        rng = Random("proposer-solver-oracle")

        def play(actor_id: str, messages: Messages) -> str:
            if actor_id == PROPOSER:
                return draw_problem(self.options.size, rng)
            return str(value_of(messages[-1]["content"]))

        return play

    def random_player(self, seed: int) -> Player:
        """A player that proposes random problems, and answers with a random number from 0 to 99."""
        rng = Random(f"proposer-solver-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            return draw_problem(self.options.size, rng) if actor_id == PROPOSER else str(rng.randrange(100))

        return play

    def _demonstrate(self, n: int, seed: str, quality: float) -> list[Demonstration]:
        rng = Random(f"proposer-solver-demonstrations/{seed}")
        size = self.options.size
        made: list[Demonstration] = []
        for index in range(n):
            actor, problem = (PROPOSER, SOLVER)[index % 2], draw_training(size, rng)
            system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor]}
            if actor == PROPOSER:
                made.append((actor, [system, propose_message(draw_training(size, rng), size)], problem))
            else:
                answer = value_of(problem) + (0 if rng.random() < quality else rng.choice((-10, -2, -1, 1, 2, 10)))
                made.append((actor, [system, {"role": "user", "content": problem}], str(answer)))
        return made
