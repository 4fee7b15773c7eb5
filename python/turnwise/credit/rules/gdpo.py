"""GDPO: normalises each reward by itself before it adds them, so that a large one does not outweigh the others.

    A_i,k = (r_i,k - mean(r_k)) / (std(r_k) + eps)              over the attempts i of an actor at a question, reward k
    A_i = (S_i - mean(S)) / (std(S) + eps)                      over the batch, with S_i = sum over k of w_k A_i,k

GRPO adds the rewards first: attempts with rewards (0, 2), (1, 1) and (2, 0) then count alike, and a reward with a small
spread counts for little. The second step keeps the size of the advantages independent of the number of rewards.
(Group reward-Decoupled Normalization Policy Optimization, https://arxiv.org/abs/2601.05242; TRL's
``multi_objective_aggregation="normalize_then_sum"``, verl's ``gdpo``.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turnwise.credit.base import ALONE, CENTERED, EQUAL, MIN_STD, GroupCredit, Key
from turnwise.credit.rules.reinforce_pp import by_policy, trained_tokens
from turnwise.types import CreditCapabilities, Sample


@dataclass(kw_only=True)
class GDPOCredit(GroupCredit):
    """Compares attempts in groups ``(group_id, actor)``, one reward at a time. Not for trees.

    ``rewards`` maps the name of each reward to its weight. A reward is the value of the rubric's function of that name
    for the actor, without the rubric's weight, or ``step.info["rewards"][name]`` if the episode sets it. An actor that
    a function does not pay has no share of that reward. If an invalid action ended the episode, the rubric paid the
    actor nothing, and each reward is that of its calls. ``batch`` sets the unit that counts once in a policy's
    statistics of the batch: ``"attempts"`` (the paper, TRL) or trained ``"tokens"`` (verl).

    Example: ``GDPOCredit(rewards={"correct": 1.0, "brief": 0.5})``
    """

    capabilities = CreditCapabilities(trees=False, ends=False, step_rewards=False, mixed_rewards=False)
    rewards: Mapping[str, float]
    batch: str = "attempts"
    _seen: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # names of rewards so far

    def __post_init__(self) -> None:
        numbers = isinstance(self.rewards, Mapping) and all(_is_weight(weight) for weight in self.rewards.values())
        if not (numbers and self.rewards):
            raise ValueError(
                f"rewards={self.rewards!r}: expected the names of rewards with their weights, such as {{'right': 1.0}}"
            )
        if self.batch not in ("attempts", "tokens"):
            raise ValueError(f"batch={self.batch!r}: expected 'attempts' or 'tokens'")
        super().__post_init__()

    def group_key(self, sample: Sample) -> Key:
        return (sample.group_id, sample.actor)

    def unit_key(self, sample: Sample) -> Key:
        return (sample.trajectory_key, sample.actor)

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        sums, sizes = np.zeros(len(samples)), np.zeros(len(samples))
        keys, units = [self.key_of(sample) for sample in samples], [self.unit_key(sample) for sample in samples]
        for name, values in self._columns(samples).items():
            rows = np.flatnonzero(~np.isnan(values)).tolist()
            part, of_keys = [samples[row] for row in rows], [keys[row] for row in rows]
            scaled = self.grouped(part, of_keys, values[rows], [units[row] for row in rows]) * self.rewards[name]
            sums[rows] += scaled
            sizes[rows] += np.abs(scaled)
        # Scale the sums over the batch of each policy.
        calls = Counter(units)
        weights = [1 / calls[unit] for unit in units] if self.batch == "attempts" else map(trained_tokens, samples)
        counts = np.fromiter(weights, dtype=np.float64) * np.array([sample.weight for sample in samples])
        advantages = np.zeros(len(samples), dtype=np.float32)
        for of_policy in by_policy(samples):
            rows_of = of_policy & (counts > 0)
            advantages[rows_of] = self._whiten(sums[rows_of], counts[rows_of], 1e-12 * sizes[rows_of].max(initial=0.0))
        return advantages

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the cause of a zero advantage, for each of ``rows`` of ``samples``, by its most varied reward."""
        each = [self._causes(samples, rows, np.nan_to_num(values)) for values in self._columns(samples).values()]
        return [min(causes, key=(CENTERED, MIN_STD, EQUAL, ALONE).index) for causes in zip(*each, strict=True)]

    def _columns(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        """Return each reward ``[B]`` float64, NaN where the actor has none. Raises for a name that no call ever had."""
        tops = {id(sample.root_result): sample.root_result for sample in samples if sample.root_result is not None}
        metrics = {node.rollout.id: node.rollout.metrics for top in tops.values() for node in top.walk()}
        rewards = [self._of(sample, metrics) for sample in samples]
        known = {name for each in rewards for name in each}
        if missing := [name for name in self.rewards if name not in known | self._seen] if known else []:
            raise ValueError(
                f"rewards={dict(self.rewards)!r}: no call of this batch has {missing}; expected some of {sorted(known)}"
            )
        self._seen |= known
        for row, each in enumerate(rewards):
            if not each and samples[row].has_step_reward:
                rewards[row] = dict.fromkeys(self.rewards, samples[row].reward)
            elif wrong := {name: each[name] for name in self.rewards if not math.isfinite(each.get(name, 0.0))}:
                where = f"step {samples[row].step_index} of rollout {samples[row].rollout_id!r}"
                raise ValueError(f"{where} has rewards {wrong}: expected finite numbers")
        return {name: np.array([each.get(name, math.nan) for each in rewards], float) for name in self.rewards}

    def _of(self, sample: Sample, metrics: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
        """Return the rewards of ``sample`` by name, from its step or from the metrics of its rollout."""
        if "rewards" in sample.info:
            rewards: Mapping[str, float] = sample.info["rewards"]
            return rewards
        if sample.rollout_id not in metrics:
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.rollout_id!r} has no tree of episodes: expected "
                "info['rewards'], or samples of turnwise.samples.collect.collect_samples(results)"
            )
        end = f"/{sample.actor}"
        return {n.removesuffix(end): v for n, v in metrics[sample.rollout_id].items() if n.endswith(end)}

    def _whiten(self, values: np.ndarray, counts: np.ndarray, tie: float) -> np.ndarray:
        """Scale ``values [b]`` to mean 0 and standard deviation 1; ``counts [b]`` says how often each counts.

        Values that differ by ``tie`` or less differ by rounding only, for example where two rewards cancel out.
        """
        total = counts.sum()
        if total <= self.ddof or np.ptp(values) <= tie:
            return np.zeros_like(values)
        mean = counts @ values / total
        # The sums of whole groups are 0 but for rounding, and tied groups must keep an advantage of exactly 0.
        deviations = values - (mean if abs(mean) > tie else 0.0)
        std = math.sqrt(counts @ deviations**2 / (total - self.ddof))
        return deviations / (std + self.eps)


def _is_weight(weight: object) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
