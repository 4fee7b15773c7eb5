"""What all credit rules share: the walk over results, and the grouped form ``A = (r - centre) / scale``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from turnwise.ops import factorize, group_advantage
from turnwise.samples import collect_samples
from turnwise.types import GenerateResult, Sample

Key = tuple[Hashable, ...]

RULE_METHODS = ("compute", "compute_columns", "state_dict", "load_state_dict")
"""What a class must have to train with."""
EQUAL, ALONE, MIN_STD, CENTERED = "equal_rewards", "alone", "min_std", "zero_advantage"
"""Why an advantage is 0: all rewards of the group are equal; the group has nothing to compare with; its deviation is
below ``min_std``; the reward is exactly what the rule expected (the group's mean, a baseline)."""


class Credit(ABC):
    """Base of the credit rules; see ``turnwise.types.CreditAssigner``. A rule writes ``compute_columns``."""

    trees: ClassVar[bool] = True
    """Whether the rule can judge the siblings of a tree."""

    ends: ClassVar[bool] = True
    """Whether it can tell the trajectories of one rollout apart, which ``select="none"`` gives (``Sample.play``)."""

    values_of_states: ClassVar[bool] = False
    """Whether it asks what states are worth, which branches tell, or playouts."""

    def compute(self, results: Sequence[GenerateResult]) -> dict[tuple[str, int], float]:
        """``(rollout id, step index) -> advantage`` for every trainable step of ``results`` and their children.

        Call it once per batch: a rule with state (RAE) updates it here.
        """
        samples = collect_samples(results)
        advantages = self.compute_columns(samples)
        places = [(sample.trajectory, sample.step_index) for sample in samples]
        return dict(zip(places, advantages.tolist(), strict=True))

    @abstractmethod
    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Advantages ``[B]`` float32 of ``samples``, in their order."""

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Why each of ``rows`` of ``samples`` has the advantage 0: a name that ``dropped/<name>`` counts it under."""
        return [CENTERED] * len(rows)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the rule; empty for rules that look at one batch alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        if state:
            raise ValueError(f"state has {sorted(state)}: {type(self).__name__} keeps no state")


@dataclass(kw_only=True)
class GroupCredit(Credit):
    """Advantages within groups, by ``ops.group_advantage``, whose options these are.

    ``key`` replaces the rule's own group key, for example ``key=lambda sample: (sample.uid, sample.turn)``;
    a sample's ``group`` goes before both. A call that ran into its token limit counts like any other.
    """

    key: Callable[[Sample], Key] | None = None
    center: str = "mean"
    scale: str = "std"
    ddof: int = 1
    eps: float = 1e-6
    singleton: str = "zero"
    min_std: float = 0.0

    def __post_init__(self) -> None:
        if self.key is not None and not callable(self.key):
            raise TypeError(f"key={self.key!r}: expected a callable, sample -> tuple, or None")
        # A wrong option must show now, not when the first batch has been sampled.
        two = torch.ones(2)
        group_advantage(two, two.long() - 1, num_groups=1, lengths=two, **self._options())

    def _options(self) -> dict[str, Any]:
        names = ("center", "scale", "ddof", "eps", "singleton", "min_std")
        return {name: getattr(self, name) for name in names}

    @abstractmethod
    def group_key(self, sample: Sample) -> Key:
        """The group that ``sample`` is compared within."""

    def unit_key(self, sample: Sample) -> Key | None:
        """Samples with one unit key enter the statistics as one value, their mean; ``None``: every row for itself."""
        return None

    def value(self, sample: Sample) -> float:
        """The reward that counts."""
        return sample.reward

    def values(self, samples: Sequence[Sample]) -> np.ndarray:
        """The rewards that count, ``[B]`` float64, for a rule to which a sample alone does not tell its own."""
        return np.array([self.value(sample) for sample in samples], dtype=np.float64)

    def key_of(self, sample: Sample) -> Key:
        """The sample's own group where it brings one, else what ``key`` says, else the rule's."""
        return sample.group if sample.group is not None else (self.key or self.group_key)(sample)

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Advantages ``[B]`` float32 of ``samples``, in their order."""
        return self.grouped_by_key(samples).astype(np.float32)

    def grouped_by_key(self, samples: Sequence[Sample]) -> np.ndarray:
        """Advantages ``[B]`` float64 within the rule's own groups."""
        return self.grouped(samples, [self.key_of(s) for s in samples], self.values(samples), self._units(samples))

    def _units(self, samples: Sequence[Sample]) -> list[Key | None] | None:
        units = [self.unit_key(sample) for sample in samples]
        return units if units and units[0] is not None else None

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Why each of ``rows`` of ``samples`` has the advantage 0, by what its group holds."""
        keys, units = [self.key_of(sample) for sample in samples], self._units(samples) or range(len(samples))
        groups: dict[Key, dict[Hashable, list[float]]] = {}
        for key, unit, value in zip(keys, units, self.values(samples).tolist(), strict=True):
            groups.setdefault(key, {}).setdefault(unit, []).append(value)
        causes = {key: self._zero_cause(list(groups[key].values())) for key in {keys[row] for row in rows}}
        return [causes[keys[row]] for row in rows]

    def _zero_cause(self, units: Sequence[Sequence[float]]) -> str:
        """Of a group with these rewards, unit by unit."""
        # Offsets from the smallest: the mean of equal rewards is then exactly that reward.
        means = [min(rewards) + sum(reward - min(rewards) for reward in rewards) / len(rewards) for rewards in units]
        if len(means) == 1:
            compared = (self.center, self.scale) != ("none", "none")
            return ALONE if compared and self.singleton == "zero" else CENTERED
        if min(means) == max(means):
            return EQUAL
        return MIN_STD if np.std(means, ddof=self.ddof) < self.min_std else CENTERED

    def grouped(
        self, samples: Sequence[Sample], keys: Sequence[Key], values: np.ndarray, units: Sequence[Any] | None = None
    ) -> np.ndarray:
        """Advantages ``[B]`` float64 of ``values`` within ``keys``; rows of one unit count as one, their mean."""
        if not samples:
            return np.zeros(0)
        group_ids, num_groups = factorize(keys)
        weighted = self.center == "length_weighted"
        advantages = group_advantage(
            torch.from_numpy(values),
            group_ids,
            num_groups=num_groups,
            trajectory_ids=None if units is None else factorize(units)[0],
            lengths=torch.tensor([float(len(s.completion_token_ids)) for s in samples]) if weighted else None,
            pool="rows" if units is None else "trajectory",
            **self._options(),
        )
        return advantages.numpy()
