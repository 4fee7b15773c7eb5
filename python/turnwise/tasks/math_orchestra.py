"""The math orchestra (Dr. MAS): a solver answers, a verifier approves or rejects, for up to ``max_loops`` loops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from pydantic import Field

from turnwise.arena import Episode, MultiTurnEpisode, RewardMix, RewardParts, Rubric, TreeSampler
from turnwise.tasks.base import Demonstration, Player, with_round, with_team, without_round
from turnwise.tasks.gsm8k.reader import MARK, GSM8KQuestion, answers_match, extract_answer
from turnwise.tasks.gsm8k.task import SYSTEM_PROMPT, QuestionOptions, QuestionTask
from turnwise.types import Actor, EpisodeState, Message, Messages

SOLVER, VERIFIER = "solver", "verifier"
SYSTEM_PROMPTS = {
    SOLVER: SYSTEM_PROMPT,
    VERIFIER: "Check the solution. End with verdict: approve, or verdict: reject and the reason before it.",
}
_SOLUTION, _REVIEW = "\n\nSolution:\n", "\n\nReview:\n"
_VERDICT = re.compile(r"verdict\W{1,8}(approve|reject)", re.IGNORECASE)


class MathView(NamedTuple):
    """Contents of a prompt: the question, the current solution, and the verifier's review of it."""

    question: str
    solution: str | None = None
    review: str | None = None


def view_message(view: MathView) -> Message:
    """The user message that shows ``view``."""
    parts = [view.question]
    if view.solution is not None:
        parts += [_SOLUTION, view.solution]
    if view.review is not None:
        parts += [_REVIEW, view.review]
    return {"role": "user", "content": "".join(parts)}


def read_view(messages: Messages) -> MathView:
    """Parse the view from a prompt."""
    shown, reviewed, review = without_round(messages).partition(_REVIEW)
    question, answered, solution = shown.partition(_SOLUTION)
    return MathView(question, solution if answered else None, review if reviewed else None)


def parse_verdict(text: str) -> bool | None:
    """The last ``verdict: approve`` (``True``) or ``verdict: reject`` (``False``) in ``text``; ``None`` without one.

    Example: ``parse_verdict("2 + 2 is 4. Verdict: approve") is True``
    """
    verdicts = _VERDICT.findall(text)
    return verdicts[-1].lower() == "approve" if verdicts else None


class MathOrchestraEpisode(MultiTurnEpisode):
    """One question: solver, verifier, solver, … until the verifier approves or ``max_loops`` loops are over.

    The artifact is ``{"question": ..., "answer": ...}``. An unreadable verdict counts as approval, so a verifier that
    babbles can't keep a problem in the loop. Without a verifier the first answer is final. The team's part is the final
    outcome: 1 if the solver's last answer is right. A solver's own part is 1 if its answer is right. A verifier's own
    part is 1 if its verdict agrees with that. By default both actors earn the outcome. A tree sampler must score each
    action before the end is known, so there an action earns its own part. No actor sees another one's thought.

    Example: ``MathOrchestraEpisode(max_loops=2)``
    """

    episode_type = "math_orchestra"

    def __init__(
        self,
        *,
        max_loops: int = 2,
        actors: Sequence[str] = (SOLVER, VERIFIER),
        sampler: TreeSampler | None = None,
    ) -> None:
        if max_loops < 1:
            raise ValueError(f"max_loops={max_loops!r}: expected at least 1")
        super().__init__(sampler=sampler, max_turns=max_loops)
        self.actors = tuple(actors)
        self.by_action = sampler is not None and sampler.selects
        self.mix = RewardMix(0.0 if self.by_action else 1.0, "convex")
        self.rubric = Rubric(
            [correct, own_part, answered, readable_verdict],
            [1.0, 0.0 if self.by_action else 1.0, 0.0, 0.0],
            own=[] if self.by_action else [own_part],  # under a tree the actions are mixed, not the whole episode
            valid=[answered, readable_verdict],
        )

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {"solution": None, "review": None, "right": False, "approved": None, "verdicts": [], "own": {}}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        message = view_message(MathView(artifact["question"], state.data["solution"], state.data["review"]))
        return [with_round(message, state.turn)]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        data, said = state.data, state.last_completion_text.strip()
        if state.current_actor == SOLVER:
            data["solution"], data["review"] = said, None
            data["right"] = answers_match(extract_answer(said), artifact["answer"])
        else:
            verdict = parse_verdict(said)
            data["review"], data["approved"] = said, verdict is not False
            data["verdicts"].append(verdict)
        agreed = state.current_actor == SOLVER or data["approved"]
        data["own"][state.current_actor] = float(data["right"] == agreed)

    def reward_parts(self, state: EpisodeState, arena: Any, artifact: Any) -> RewardParts | None:
        data = state.data
        if not self.by_action:
            return None
        read = extract_answer(data["solution"]) if state.current_actor == SOLVER else data["verdicts"][-1]
        return RewardParts(float(data["right"]), data["own"][state.current_actor], read is not None)

    def team_value(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        """1 if the current answer is right. A verifier's action leaves it unchanged."""
        return float(state.data["right"])

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return VERIFIER not in self.actors or (state.current_actor == VERIFIER and state.data["approved"])

    def team_answer(self, state: EpisodeState, arena: Any, artifact: Any) -> tuple[str | None, bool] | None:
        """The solver's answer; ``None`` for the verifier."""
        if state.current_actor == VERIFIER or state.data["solution"] is None:
            return None
        return extract_answer(state.data["solution"]), state.data["right"]

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``correct``, ``answer`` (``None`` if unreadable), ``approved``, ``loops``, share of readable verdicts.

        ``own`` is the own part of each actor's last action.
        """
        verdicts = state.data["verdicts"]
        return {
            "correct": float(state.data["right"]),
            "own": dict(state.data["own"]),
            "answer": extract_answer(state.data["solution"] or ""),
            "approved": bool(state.data["approved"]),
            "loops": len(verdicts),
            "readable_verdicts": sum(verdict is not None for verdict in verdicts) / max(1, len(verdicts)),
        }


def correct(extras: dict[str, Any]) -> dict[str, float]:
    """The final outcome, for both actors."""
    return {SOLVER: extras["correct"], VERIFIER: extras["correct"]}


def own_part(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 if the solver's last answer is right; 1.0 if the verifier's last verdict agrees with the answer."""
    return extras["own"]


def answered(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 if the last solution ended in a readable answer."""
    return {SOLVER: float(extras["answer"] is not None)}


def readable_verdict(extras: dict[str, Any]) -> dict[str, float]:
    """The share of verdicts that could be read."""
    return {VERIFIER: extras["readable_verdicts"]}


class MathOrchestraOptions(QuestionOptions):
    """Options of the task ``math_orchestra``."""

    max_loops: int = Field(default=2, ge=1)


class MathOrchestraTask(QuestionTask):
    """Solver and verifier on the questions of a file or a dataset; see :class:`turnwise.tasks.base.Task`.

    Example: ``MathOrchestraTask(MathOrchestraOptions(path="train.jsonl", max_loops=2))``
    """

    name = "math_orchestra"
    success_metric = f"correct/{SOLVER}"
    options_type = MathOrchestraOptions
    team: Sequence[str] = (SOLVER, VERIFIER)

    def __init__(self, options: MathOrchestraOptions) -> None:
        super().__init__(options)
        self.options = options

    def with_actors(self, actors: Sequence[str]) -> MathOrchestraTask:
        """Return the task for the solver alone. Its first answer is final."""
        return with_team(self, actors, needed=SOLVER)

    @property
    def actors(self) -> list[Actor]:
        return [Actor(actor, SYSTEM_PROMPTS[actor], max_tokens=self.options.max_tokens) for actor in self.team]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        return {self.name: MathOrchestraEpisode(max_loops=self.options.max_loops, actors=self.team, sampler=tree)}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Demonstrate both roles in both situations: answer, approval, rejection of a wrong answer, correction."""
        rng = Random(f"math-demonstrations/{seed}")
        train = self.split("train", 1)
        return [_demonstrate(train[rng.randrange(len(train))], index, rng) for index in range(n)]

    def texts(self) -> list[str]:
        return [*self.shown(), *SYSTEM_PROMPTS.values(), _SOLUTION, _REVIEW, MARK, *map(_verdict, (True, False))]

    def oracle(self) -> Player:
        """A player that knows every answer of the files."""
        gold = self.answers()

        def play(actor_id: str, messages: Messages) -> str:
            view = read_view(messages)
            answer = gold[view.question]
            if actor_id == SOLVER:
                return f"{MARK} {answer}"
            return _verdict(answers_match(extract_answer(view.solution or ""), answer))

        return play

    def random_player(self, seed: int) -> Player:
        """A player that answers with a random number from 0 to 99, and gives a random verdict."""
        rng = Random(f"math-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            return f"{MARK} {rng.randrange(100)}" if actor_id == SOLVER else _verdict(rng.random() < 0.5)

        return play


def _verdict(approve: bool) -> str:
    return f"verdict: {'approve' if approve else 'reject'}"


def _demonstrate(question: GSM8KQuestion, kind: int, rng: Random) -> Demonstration:
    right = f"{question.solution}\n{MARK} {question.answer}".strip()
    wrong = f"{right}{rng.randrange(1, 10)}"
    actor, solution, review, completion = (
        (SOLVER, None, None, right),
        (VERIFIER, right, None, _verdict(True)),
        (VERIFIER, wrong, None, _verdict(False)),
        (SOLVER, wrong, _verdict(False), right),
    )[kind % 4]
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor]}
    message = with_round(view_message(MathView(question.question, solution, review)), int(review is not None))
    return actor, [system, message], completion
