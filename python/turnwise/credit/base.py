"""Base of all credit rules: the walk over results, and the grouped form ``A = (r - centre) / scale``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.credit.grouping import attempt_advantage, grouped_advantage, rule_of, tolerance
from turnwise.samples.collect import collect_samples
from turnwise.types import CHILD, CreditCapabilities, GenerateResult, Sample
from turnwise.utils.registry import build_with_options, import_class

Key = tuple[Hashable, ...]

RULE_METHODS = ("compute", "compute_columns", "state_dict", "load_state_dict")
"""Methods that a class needs to be a credit rule."""

EQUAL, HIDDEN, ALONE, MIN_STD, CENTERED = "equal_rewards", "equal_step_rewards", "alone", "min_std", "zero_advantage"
"""Causes of an advantage of 0. ``EQUAL``: all rewards of the group are equal, up to rounding. ``HIDDEN``: they are
equal step rewards, while the rubric's rewards of the attempts differ. ``ALONE``: the group has one member. ``MIN_STD``:
its standard deviation is below ``min_std``. ``CENTERED``: the reward equals the rule's expectation (the group's mean, a
baseline).
"""

registry: dict[str, type[Credit]] = {}
"""All rules by their configuration names; ``turnwise.credit`` fills it."""


class Credit(ABC):
    """Base of the credit rules, see ``turnwise.types.CreditAssigner``. A rule defines ``compute_columns``."""

    capabilities: CreditCapabilities = CreditCapabilities()

    def compute(self, results: Sequence[GenerateResult]) -> dict[tuple[str, int], float]:
        """Return ``(rollout id, step index) -> advantage`` for every trainable step of ``results`` and their children.

        Call it once per batch: a rule with state (RAE) updates it here.
        """
        samples = collect_samples(results)
        advantages = self.compute_columns(samples)
        indices = [(sample.rollout_id, sample.step_index) for sample in samples]
        return dict(zip(indices, advantages.tolist(), strict=True))

    @abstractmethod
    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the cause of the advantage 0 for each of ``rows`` of ``samples``; ``dropped/<name>`` counts it."""
        return [CENTERED] * len(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps; empty for rules that use only the current batch."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        if state:
            raise ValueError(f"state has {sorted(state)}: {type(self).__name__} keeps no state")


@dataclass(kw_only=True)
class GroupCredit(Credit):
    """Advantages within groups. The fields except ``key`` are options of ``ops.group_advantage``.

    ``scale="mean"`` divides by the mean of the group, whose rewards must be >= 0: with rewards 0 and 1, rare successes
    weigh as in the gradient of the log of the success rate (MaxRL, https://arxiv.org/abs/2602.02710).

    ``key`` replaces the rule's own group key, for example ``key=lambda sample: (sample.group_id, sample.turn)``.
    A sample's ``group`` overrides both. A call that reached its token limit counts like any other.
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
        # Report a wrong option now, before the first batch is sampled.
        rule_of("rows", **self._options())

    def _options(self) -> dict[str, Any]:
        names = ("center", "scale", "ddof", "eps", "singleton", "min_std")
        return {name: getattr(self, name) for name in names}

    @abstractmethod
    def group_key(self, sample: Sample) -> Key:
        """Return the key of the group in which ``sample`` is compared."""

    def unit_key(self, sample: Sample) -> Key | None:
        """Return the key of the unit. Samples of one unit count as one value, their mean; ``None``: each row counts."""
        return None

    def value(self, sample: Sample) -> float:
        """Return the reward to compare."""
        return sample.reward

    def values(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the rewards to compare, ``[B]`` float64. Override it if a value depends on other samples."""
        return np.array([self.value(sample) for sample in samples], dtype=np.float64)

    def key_of(self, sample: Sample) -> Key:
        """Return ``sample.group`` if set, else ``key(sample)`` if given, else the rule's ``group_key``."""
        return sample.group if sample.group is not None else (self.key or self.group_key)(sample)

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        return self.grouped_by_key(samples).astype(np.float32)

    def grouped_by_key(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float64 within the rule's own groups."""
        return self.grouped(samples, [self.key_of(s) for s in samples], self.values(samples), self._units(samples))

    def _units(self, samples: Sequence[Sample]) -> list[Key | None] | None:
        units = [self.unit_key(sample) for sample in samples]
        return units if units and units[0] is not None else None

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the cause of the advantage 0 for each of ``rows`` of ``samples``, from the rewards of its group."""
        return self._causes(samples, rows, self.values(samples))

    def _causes(self, samples: Sequence[Sample], rows: Sequence[int], values: np.ndarray) -> list[str]:
        keys, units = [self.key_of(sample) for sample in samples], self._units(samples)
        attempts = attempts_of(samples, units)
        groups: dict[Key, dict[Hashable, list[float]]] = {}
        compared: dict[Key, set[Hashable]] = {}
        for key, unit, attempt, value in zip(
            keys, units or range(len(samples)), attempts, values.tolist(), strict=True
        ):
            groups.setdefault(key, {}).setdefault(unit, []).append(value)
            compared.setdefault(key, set()).add(attempt)
        causes = {
            key: self._zero_cause(list(groups[key].values()), alone=len(compared[key]) == 1)
            for key in {keys[row] for row in rows}
        }
        # A tree compares siblings by the reward of the step, and may well leave the attempt's reward to others.
        hidden: dict[Key, list[float]] = {}
        for key, sample in zip(keys, samples, strict=True) if self.capabilities.step_rewards else ():
            if causes.get(key) == EQUAL and sample.has_step_reward and sample.tree_node is None:
                hidden.setdefault(key, []).append(sample.trajectory_reward)
        causes |= {key: HIDDEN for key, each in hidden.items() if max(each) - min(each) > tolerance(each)}
        return [causes[keys[row]] for row in rows]

    def _zero_cause(self, units: Sequence[Sequence[float]], *, alone: bool) -> str:
        """Return the cause for a group with these rewards, unit by unit; ``alone``: all are of one attempt."""
        means = [sum(rewards) / len(rewards) for rewards in units]
        if alone:
            compared = (self.center, self.scale) != ("none", "none")
            return ALONE if compared and self.singleton == "zero" else CENTERED
        if max(means) - min(means) <= tolerance([reward for rewards in units for reward in rewards]):
            return EQUAL
        return MIN_STD if np.std(means, ddof=self.ddof) < self.min_std else CENTERED

    def grouped(
        self, samples: Sequence[Sample], keys: Sequence[Key], values: np.ndarray, units: Sequence[Any] | None = None
    ) -> np.ndarray:
        """Return advantages ``[B]`` float64 of ``values`` within ``keys``; rows of one unit count as their mean.

        The units of an attempt's sub-agents count as one (:func:`~turnwise.credit.grouping.attempt_advantage`).
        """
        if not samples:
            return np.zeros(0)
        weighted = self.center == "length_weighted"
        lengths = np.array([len(s.completion_token_ids) for s in samples]) if weighted else None
        if any(sample.attempt_id is not None for sample in samples):
            attempts = attempts_of(samples, units)
            return attempt_advantage(values, keys, attempts, units=units, lengths=lengths, **self._options())
        return grouped_advantage(values, keys, units=units, lengths=lengths, **self._options())


def attempts_of(samples: Sequence[Sample], units: Sequence[Any] | None) -> list[Hashable]:
    """Return what each sample counts with in its group: its unit, its row, or the attempt whose sub-agent it is of."""
    each: Sequence[Any] = range(len(samples)) if units is None else units
    return [
        unit if sample.attempt_id is None else (CHILD, sample.attempt_id)
        for sample, unit in zip(samples, each, strict=True)
    ]


def tops_of(samples: Iterable[Sample]) -> list[GenerateResult]:
    """Return the results at the top of the trees of episodes that ``samples`` come from, each once.

    Raises ``ValueError`` for a sample without its tree.
    """
    tops: dict[int, GenerateResult] = {}
    for sample in samples:
        if sample.root_result is None:
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.rollout_id!r} has no tree of episodes: expected samples "
                "of turnwise.samples.collect.collect_samples(results)"
            )
        tops.setdefault(id(sample.root_result), sample.root_result)
    return list(tops.values())


def build_rule(
    name: str,
    options: Mapping[str, Any],
    key: str = "credit.rule",
    options_key: str = "credit.options",
    *,
    methods: Iterable[str] = RULE_METHODS,
) -> Any:
    """Build the rule called ``name`` in :data:`registry`, or ``"module:Class"``, with ``options``.

    ``key`` and ``options_key`` are their configuration keys. Raises ``ValueError`` that names them, also for a class
    without ``methods``.
    """
    rule = import_class(registry, name, key, methods=methods, like="turnwise.credit.Credit")
    return build_with_options(rule, options, options_key)
