"""The two episodes: a proposer's, which spawns attempts to measure its problem, and a solver's attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal

from turnwise.arena import (
    ArtifactStore,
    MultiTurnEpisode,
    RewardMix,
    RewardParts,
    Rubric,
    SingleTurnEpisode,
    TreeSampler,
    record_input,
)
from turnwise.arena.rewards.rubric import SHARE
from turnwise.tasks.base import split_of
from turnwise.tasks.proposer_solver.arithmetic import Size, read_answer, read_problem, value_of
from turnwise.types import EpisodeRequest, EpisodeState, Message, Messages

Curve = Literal["variance", "linear", "hard"]

CURVES: dict[Curve, Callable[[float], float]] = {
    "variance": lambda p: 4.0 * p * (1.0 - p),
    "linear": lambda p: 1.0 - abs(2.0 * p - 1.0),
    "hard": lambda p: 1.0 - p if p > 0 else 0.0,
}
"""Maps from a pass rate in [0, 1] to a value in [0, 1]. It is 0 if every attempt solves the problem, or if none does.

``variance``: four times the variance of an attempt's outcome, the learnability of Rutherford et al. (No Regrets, 2024,
arXiv:2408.15099). ``linear``: R-Zero's uncertainty (Huang et al. 2025, arXiv:2508.05004). ``hard``: Absolute Zero's
reward, larger for harder problems as long as some attempt solves them (Zhao et al. 2025, arXiv:2505.03335).
"""


PROPOSER, SOLVER = "proposer", "solver"
PROPOSE, SOLVE = "proposer_solver", "solve"
STORE = "solved"
SYSTEM_PROMPTS = {
    PROPOSER: "Write a problem with + - * that a student solves half of the time, another one than the example.",
    SOLVER: "Compute. Reply with the number.",
}
LEAST_WEIGHT = 0.05  # of a stored problem, so that a problem that every attempt solves is still shown sometimes


def propose_message(example: str, size: Size) -> Message:
    """Write the proposer's message: how large a problem may be, and an example of one."""
    return {"role": "user", "content": f"2 to {size.numbers} numbers up to {size.largest}, such as: {example}"}


def read_example(messages: Messages) -> str:
    """Parse the example from a prompt."""
    return str(messages[-1]["content"]).partition(": ")[2]


class ProposeEpisode(MultiTurnEpisode):
    """The proposer writes a problem, ``attempts`` nested episodes try to solve it, and the pass rate sets its reward.

    The artifact is ``{"example": "3 + 4", "step": 7}``. Half of the time the prompt shows another example instead, a
    problem from the store ``solved`` that was solved before step 7. Problems with a larger reward are more likely.
    Copies of one artifact see the same example. With ``store_path`` the store is a file; problems that earlier runs
    left there count as solved before step 1.

    A problem earns ``curve`` of its pass rate. The example itself and an unreadable problem have a cost (``mix``), and
    no attempts are made. A problem that any attempt solved goes to the store. A problem whose text belongs to a
    held-out split earns the same, but its attempts never train, and it is not stored. With ``train_solver=False``
    attempts never train; they only measure.

    Attempts are children of the episode. Under ``credit.rule = "hierarchy"`` they are compared with the attempts at the
    same problem, and proposers with proposers that saw the same example. In a tree each branch has its own attempts.

    Example: ``arena.add_episode(ProposeEpisode(attempts=4)); arena.add_episode(SolveEpisode())``
    """

    episode_type = PROPOSE
    mix = RewardMix(invalid_cost=0.25)
    reads_earlier_batches = True
    actors = (PROPOSER,)

    def __init__(
        self,
        *,
        attempts: int = 4,
        curve: Curve = "variance",
        size: Size | None = None,
        train_solver: bool = True,
        sampler: TreeSampler | None = None,
        store_path: str | None = None,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts={attempts!r}: expected at least 1")
        if curve not in CURVES:
            raise ValueError(f"curve={curve!r}: expected one of {sorted(CURVES)}")
        super().__init__(sampler=sampler, max_turns=1)
        self.attempts, self.curve, self.size = attempts, CURVES[curve], size or Size()
        self.train_solver, self.store_path = train_solver, store_path
        self.rubric = Rubric(
            [worth, valid_problem, pass_rate], [1.0, 0.0, 0.0], valid=[valid_problem], ranges={pass_rate: SHARE}
        )

    def stores(self) -> Sequence[ArtifactStore]:
        return [ArtifactStore(STORE, path=self.store_path, dedup=True, sampling="weighted")]

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        example = record_input("example", lambda: choose_example(arena.stores[STORE], artifact))
        state.data = {"example": example, "problem": None, "pass_rate": None, "worth": 0.0}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        return [propose_message(state.data["example"], self.size)]

    async def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        data, problem = state.data, read_problem(state.last_completion_text, self.size)
        if problem is None or problem == data["example"]:
            return
        # Let the solver try the problem. Attempts at a held-out problem must not train.
        data["problem"] = problem
        is_ours = split_of(problem) == "train"
        request = EpisodeRequest(
            SOLVE, {"question": problem, "answer": value_of(problem)}, is_trainable=self.train_solver and is_ours
        )
        results = await arena.generate_rollouts([request] * self.attempts)
        done = [result.rollout for result in results if result.rollout.error is None]
        if not done:
            raise RuntimeError(
                f"all {self.attempts} attempts failed, the first of them so:\n{results[0].rollout.error}"
            )
        data["pass_rate"] = sum(rollout.rewards[SOLVER] > 0 for rollout in done) / len(done)
        data["worth"] = self.curve(data["pass_rate"])
        if data["pass_rate"] > 0 and is_ours:
            meta = {"step": artifact["step"], "pass_rate": data["pass_rate"]}
            arena.stores[STORE].add(problem, weight=max(LEAST_WEIGHT, data["worth"]), meta=meta)

    def reward_parts(self, state: EpisodeState, arena: Any, artifact: Any) -> RewardParts:
        return RewardParts(state.data["worth"], valid=state.data["problem"] is not None)

    def unserved_rewards(self) -> dict[str, str]:
        reason = "pays a problem by its attempts' pass rate: expected task_options.curve, there is no own part"
        return super().unserved_rewards() | {"alpha": reason, "mode": reason}

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``problem`` and ``pass_rate`` (``None`` without one), ``worth``, ``example``."""
        return dict(state.data)


def choose_example(store: ArtifactStore, artifact: Any) -> str:
    """Return the artifact's own example, or half of the time a problem that earlier steps or earlier runs stored.

    Problems that episodes of the same step store are left out. So the choice depends only on the artifact and on
    earlier steps, and not on the order in which episodes end.
    """
    inherited, step = store.preexisting_ids, artifact["step"]
    rng = Random(f"proposer-solver/{artifact['step']}/{artifact['example']}")
    earlier = sorted(
        ((item.data, item.weight) for item in store if item.id in inherited or item.meta["step"] < step),
        key=lambda item: item[0],
    )
    if not earlier or rng.random() < 0.5:
        return str(artifact["example"])
    return str(rng.choices([data for data, _ in earlier], weights=[weight for _, weight in earlier])[0])


def worth(extras: dict[str, Any]) -> dict[str, float]:
    """Reward of the problem, before the cost of one that can't be used."""
    return {PROPOSER: extras["worth"]}


def valid_problem(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 if the proposer wrote a readable problem that differs from the example."""
    return {PROPOSER: float(extras["problem"] is not None)}


def pass_rate(extras: dict[str, Any]) -> dict[str, float]:
    """The share of the attempts that solved the problem; left out without a problem."""
    return {} if extras["pass_rate"] is None else {PROPOSER: extras["pass_rate"]}


class SolveEpisode(SingleTurnEpisode):
    """One attempt. The artifact is ``{"question": "(3 + 4) * 2", "answer": 14}``. A right answer earns 1."""

    episode_type = SOLVE
    actor = SOLVER

    def __init__(self) -> None:
        self.rubric = Rubric([correct, answered], [1.0, 0.0], ranges={correct: SHARE, answered: SHARE})

    def get_prompt(self, artifact: Any) -> str:
        return artifact["question"]


def correct(completion: str, artifact: Any) -> dict[str, float]:
    """1.0 if the last number of the completion is the answer."""
    return {SOLVER: float(read_answer(completion) == artifact["answer"])}


def answered(completion: str) -> dict[str, float]:
    """1.0 if the completion holds a readable number."""
    return {SOLVER: float(read_answer(completion) is not None)}
