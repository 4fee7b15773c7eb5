"""Measures each actor's answers in a step: how many differ, why groups tie, and what a verdict is worth.

A stage that every trainer brings along. All of its metrics end with the actor, and cover the calls that can train:

==========================  ==========================================================================================
``answers/prompts``         number of different prompts
``answers/distinct``        number of different answers
``answers/commonest``       share of the calls with the commonest answer
``groups/compared``         number of groups in which the credit rule compared several attempts of the actor
``groups/tied_succeeded``   share of these that tied because all attempts succeeded
``groups/tied_same``        share that tied because all attempts wrote the same, and did not succeed
``groups/tied_failed``      share that tied although the attempts differed: all of them failed
``groups/tied_alike``       share that tied although the attempts differed, and not all of them failed or succeeded
``verdicts/base_rate``      of an actor with two answers: how often the commoner one was right, by a reward function
``verdicts/skill``          0 if these answers tell nothing about what is right, 1 if they are always right
==========================  ==========================================================================================

The last two have the function before the actor: ``verdicts/skill/said_right/checker``. Two are of whole episodes in
which several actors are rewarded: ``payoffs/none``, the share in which none earns more than 0, and
``payoffs/general_sum``, the share in which their rewards differ and do not add up to 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.arena import Stage
from turnwise.arena.stages.stage import BatchNotes
from turnwise.samples.collect import nodes_of
from turnwise.samples.outcomes import metric_value
from turnwise.train.health.history import ALIKE, FAILED, SAME, SUCCEEDED, TIES
from turnwise.types import GenerateResult, GroupedCredit, Rollout, Sample
from turnwise.types.prompts import Prefix, prompt_tokens

TWO_ANSWERS = 0.9
"""Least share of the calls that the two commonest answers of a verdict have."""


class Answers(Stage):
    """Measures the answers of a batch. ``success`` is the metric of an episode that says if an attempt succeeded.

    Without it, or in a tree, whose branches end in one episode, the actor's largest reward of the batch is a success
    and its smallest a failure.
    """

    name = "answers"

    def __init__(self, success: str | None = None) -> None:
        self.success = success

    def credited(
        self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample], notes: BatchNotes
    ) -> None:
        by_actor: dict[str, list[Sample]] = {}
        for sample in samples:
            by_actor.setdefault(sample.actor, []).append(sample)
        rollouts = {node.rollout.id: node.rollout for node in nodes_of(results)}
        for actor, own in by_actor.items():
            notes.metrics |= {f"answers/{name}/{actor}": value for name, value in spread_of(own).items()}
            ties = self.ties(own, rollouts, arena.credit, notes.causes)
            notes.metrics |= {f"groups/{name}/{actor}": value for name, value in ties.items()}
            notes.metrics |= verdicts(actor, own, rollouts)
        notes.metrics |= payoffs(list(rollouts.values()))

    def ties(
        self, samples: Sequence[Sample], rollouts: Mapping[str, Rollout], credit: Any, causes: Mapping[Any, str]
    ) -> dict[str, float]:
        """Return the number of groups of one actor with several attempts, and the share that ties for each reason."""
        groups: dict[Hashable, list[Sample]] = {}
        for sample in samples:
            key = credit.key_of(sample) if isinstance(credit, GroupedCredit) else (sample.group_id, sample.turn)
            groups.setdefault(key, []).append(sample)
        rewards = [sample.reward for sample in samples]
        bounds = (min(rewards), max(rewards))
        compared, counts = 0, Counter[str]()
        for members in groups.values():
            attempts: dict[Hashable, list[Sample]] = {}
            for row, sample in enumerate(members):
                attempts.setdefault(sample.trajectory_key if sample.tree_node is None else row, []).append(sample)
            if len(attempts) == 1:
                continue
            compared += 1
            if all(causes.get((sample.rollout_id, sample.step_index)) == "equal_rewards" for sample in members):
                counts[
                    reason([Attempt.of(each, self._success(each, rollouts), bounds) for each in attempts.values()])
                ] += 1
        return {"compared": compared, **{kind: counts[kind] / compared for kind in TIES}} if compared else {}

    def _success(self, samples: Sequence[Sample], rollouts: Mapping[str, Rollout]) -> float | None:
        """Return the success of the episode of one attempt; ``None`` if it isn't known, or is not that of a branch."""
        if self.success is None or samples[0].tree_node is not None:
            return None
        return metric_value(rollouts[samples[0].rollout_id].metrics, self.success)


def reason(attempts: Sequence[Attempt]) -> str:
    """Return why the rewards of ``attempts`` tie."""
    if all(attempt.succeeded for attempt in attempts):
        return SUCCEEDED
    if len({attempt.answers for attempt in attempts}) == 1:
        return SAME
    return FAILED if all(attempt.failed for attempt in attempts) else ALIKE


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one actor wrote in one attempt, and how that ended."""

    answers: tuple[str, ...]
    succeeded: bool
    failed: bool

    @classmethod
    def of(cls, samples: Sequence[Sample], success: float | None, bounds: tuple[float, float]) -> Attempt:
        """Read an attempt. ``bounds`` are the actor's smallest and largest reward in the batch."""
        answers = tuple(answer_of(sample) for sample in samples)
        if success is not None:
            return cls(answers, success >= 1, success <= 0)
        low, high = bounds
        reward = max(sample.reward for sample in samples)
        if low == high:  # nothing to compare with
            return cls(answers, False, reward <= 0)
        return cls(answers, reward >= high, reward <= low)


def answer_of(sample: Sample) -> str:
    """Return what a call said, without its thought and spaces around it."""
    return "" if sample.step is None else sample.step.completion.strip()


def spread_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how many prompts and answers of one actor's ``samples`` differ, and the share of the commonest answer."""
    answers = Counter(answer_of(sample) for sample in samples)
    return {
        "prompts": len({_prompt_key(sample) for sample in samples}),
        "distinct": len(answers),
        "commonest": answers.most_common(1)[0][1] / len(samples),
    }


def _prompt_key(sample: Sample) -> int:
    prompt = prompt_tokens(sample)
    return hash(prompt.whole().tobytes() if isinstance(prompt, Prefix) else tuple(prompt))


def verdicts(actor: str, samples: Sequence[Sample], rollouts: Mapping[str, Rollout]) -> dict[str, float]:
    """Return base rate and skill of an ``actor`` that says one of two things once in an episode, by each function.

    With answers A (the commoner) and B that a function pays by 1 if they are right, else 0: A is right in the episodes
    where A was paid or B was not. The skill is ``P(paid | A) + P(paid | B) - 1``, Youden's J.
    """
    calls = Counter(sample.rollout_id for sample in samples)
    common = Counter(answer_of(sample) for sample in samples).most_common(2)
    if len(common) < 2 or sum(count for _, count in common) < TWO_ANSWERS * len(samples) or max(calls.values()) > 1:
        return {}
    values: defaultdict[str, list[tuple[bool, float]]] = defaultdict(list)
    for sample in samples:
        if (answer := answer_of(sample)) in (common[0][0], common[1][0]):
            for name, value in rollouts[sample.rollout_id].metrics.items():
                if name.endswith(f"/{actor}"):
                    values[name].append((answer == common[0][0], value))
    found: dict[str, float] = {}
    for name, pairs in values.items():
        paid_a, paid_b = ([value for is_a, value in pairs if is_a == wanted] for wanted in (True, False))
        if {value for _, value in pairs} <= {0.0, 1.0} and paid_a and paid_b:
            found[f"verdicts/base_rate/{name}"] = sum(is_a == (value == 1) for is_a, value in pairs) / len(pairs)
            found[f"verdicts/skill/{name}"] = sum(paid_a) / len(paid_a) + sum(paid_b) / len(paid_b) - 1
    return found


def payoffs(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the shares of the episodes with several rewarded actors that pay none, and that are not zero-sum."""
    paid = [[*rollout.rewards.values()] for rollout in rollouts if rollout.error is None and len(rollout.rewards) > 1]
    if not paid:
        return {}
    general = [max(each) - min(each) > 1e-9 and abs(sum(each)) > 1e-9 for each in paid]
    return {
        "payoffs/none": sum(max(each) <= 0 for each in paid) / len(paid),
        "payoffs/general_sum": sum(general) / len(paid),
    }
