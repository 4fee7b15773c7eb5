"""Sampling from a store: rules that weigh its artifacts, and the draw.

A rule is an object with ``weights(artifacts, outcomes, plays)``. ``RULES`` has the built-in rules by name. A rule gets
each artifact's :class:`AttemptStats`, which :meth:`turnwise.arena.ArtifactStore.record` updates. Larger stores draw by
the built-in rules from an index (``indexes``), which does not weigh all artifacts again after a change.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from turnwise.arena.runtime.context import current_context
from turnwise.arena.runtime.recording_hooks import records_input
from turnwise.types import Artifact
from turnwise.utils.values import listed

SMALL = 1024
"""Artifacts up to which every rule weighs all of them after a change. Its draws are then those of its definition."""


@dataclass(frozen=True, slots=True)
class AttemptStats:
    """Statistics of the recent attempts at one artifact.

    Example: ``AttemptStats(attempts=4, reward=0.5, success=0.5, score=0.9, last=120)``
    """

    attempts: int = 0
    reward: float = 0.0
    """Mean over the attempts."""
    success: float = 0.0
    """Mean success rate."""
    score: float | None = None
    """Learning potential after the latest attempt; ``None`` before any."""
    last: int = 0
    """The store's count of attempts when this artifact was last attempted, or added."""

    def after(
        self, reward: float, success: float, score: float | None, *, plays: int, window: int | None = None
    ) -> AttemptStats:
        """Return the statistics after one more attempt, number ``plays`` of the store.

        With ``window`` the means become exponential averages over about that many attempts. The default ``score`` is
        the distance of ``reward`` from the mean before.
        """
        attempts = self.attempts + 1
        gain = 1 / (attempts if window is None else min(attempts, window))
        return replace(
            self,
            attempts=attempts,
            reward=self.reward + gain * (reward - self.reward),
            success=self.success + gain * (success - self.success),
            score=abs(reward - self.reward) if score is None else score,
            last=plays,
        )


class SamplingRule(Protocol):
    """Weighs artifacts. An artifact of weight 0 is never drawn; ``None`` draws uniformly."""

    def weights(
        self, artifacts: Sequence[Artifact], outcomes: Sequence[AttemptStats], plays: int
    ) -> list[float] | None:
        """Return one finite number >= 0 per artifact, or ``None``. ``plays`` is the store's count of attempts."""
        ...


@dataclass(frozen=True, slots=True)
class UniformSampling:
    """Draws all artifacts with equal probability."""

    def weights(
        self, artifacts: Sequence[Artifact], outcomes: Sequence[AttemptStats], plays: int
    ) -> list[float] | None:
        return None


@dataclass(frozen=True, slots=True)
class Weighted:
    """Draws in proportion to ``Artifact.weight``."""

    def weights(
        self, artifacts: Sequence[Artifact], outcomes: Sequence[AttemptStats], plays: int
    ) -> list[float] | None:
        return [artifact.weight for artifact in artifacts]


@dataclass(frozen=True, slots=True)
class PrioritizedLevelReplay:
    """Prioritized level replay: ``P = (1 - staleness) P_S + staleness P_C``, with

        P_S ~ (1 / rank(score))^(1 / temperature)        P_C ~ plays - last

    (Jiang et al., 2021, https://arxiv.org/abs/2010.03934). ``rank=False`` uses the score itself instead of
    ``1 / rank``. Equal scores share a rank. Artifacts without attempts get the best known score, so they come first.

    Example: ``ArtifactStore("questions", sampling=PrioritizedLevelReplay(temperature=0.3))``
    """

    temperature: float = 0.1
    staleness: float = 0.1
    rank: bool = True

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature!r}: expected a number > 0")
        _check_share(staleness=self.staleness)

    def weights(
        self, artifacts: Sequence[Artifact], outcomes: Sequence[AttemptStats], plays: int
    ) -> list[float] | None:
        scores = [outcome.score for outcome in outcomes]
        best = max((score for score in scores if score is not None), default=1.0)
        scored = [best if score is None else score for score in scores]
        promise = _inverse_ranks(scored) if self.rank else scored
        top = max(promise, default=0.0) or 1.0
        by_score = _shares([(value / top) ** (1.0 / self.temperature) for value in promise])
        by_age = _shares([float(plays - outcome.last) for outcome in outcomes])
        return [(1 - self.staleness) * s + self.staleness * c for s, c in zip(by_score, by_age, strict=True)]


@dataclass(frozen=True, slots=True)
class Learnability:
    """Draws in proportion to ``p (1 - p)``, where ``p`` is the success rate. A share of ``uniform`` is drawn uniformly.

    Artifacts that always or never succeed teach nothing now, but may do so later, so ``uniform`` still draws them. An
    artifact without attempts counts as ``p = 1/2``. (Sampling for learnability, Rutherford et al., 2024,
    https://arxiv.org/abs/2408.15099; for language models Foster and Foerster, 2025, https://arxiv.org/abs/2502.12272.)

    Example: ``ArtifactStore("questions", sampling="learnability", window=32)``
    """

    uniform: float = 0.1

    def __post_init__(self) -> None:
        _check_share(uniform=self.uniform)

    def weights(
        self, artifacts: Sequence[Artifact], outcomes: Sequence[AttemptStats], plays: int
    ) -> list[float] | None:
        learnable = _shares([learnability(outcome) for outcome in outcomes])
        return [(1 - self.uniform) * share + self.uniform / len(outcomes) for share in learnable]


def learnability(outcome: AttemptStats) -> float:
    """Return ``p (1 - p)`` of the success rate ``p``, which is 1/2 without attempts."""
    p = outcome.success if outcome.attempts else 0.5
    return p * (1.0 - p)


RULES: dict[str, Callable[[], SamplingRule]] = {
    "uniform": UniformSampling,
    "weighted": Weighted,
    "prioritized": PrioritizedLevelReplay,
    "learnability": Learnability,
}


def find_rule(sampling: str | SamplingRule) -> SamplingRule:
    """Return the rule that ``sampling`` names or is. Raises ``ValueError`` for an unknown name, else ``TypeError``."""
    if isinstance(sampling, str):
        if sampling not in RULES:
            raise ValueError(f"sampling={sampling!r}: expected one of {sorted(RULES)}, or an object with weights()")
        return RULES[sampling]()
    if isinstance(sampling, type) or not callable(getattr(sampling, "weights", None)):
        raise TypeError(f"sampling={sampling!r}: expected one of {sorted(RULES)}, or an object with weights()")
    return sampling


class WeightedPool:
    """Artifacts to draw from. Their weights are computed once, until the store changes."""

    def __init__(
        self, artifacts: list[Artifact], outcomes: Sequence[AttemptStats], plays: int, rule: SamplingRule
    ) -> None:
        weights = rule.weights(artifacts, outcomes, plays) if artifacts else None
        if weights is not None:
            weights = listed(weights, f"{type(rule).__name__}.weights")
            check_weights(weights, len(artifacts), rule)
            artifacts = [item for item, weight in zip(artifacts, weights, strict=True) if weight > 0]
            weights = [weight for weight in weights if weight > 0]
        self.artifacts, self.weights = artifacts, weights
        self._sums = None if weights is None else list(itertools.accumulate(weights))

    def __len__(self) -> int:
        return len(self.artifacts)

    @property
    def at_least(self) -> int:
        return len(self.artifacts)

    def draw(self, k: int, replacement: bool, rng: random.Random) -> list[Artifact]:
        """Draw ``k`` artifacts. The pool must have enough."""
        if replacement or (k == 1 and self._sums is not None):
            return rng.choices(self.artifacts, cum_weights=self._sums, k=k) if k else []
        if self.weights is None:
            return rng.sample(self.artifacts, k)
        # Efraimidis and Spirakis (2006): the k smallest of exponential variables with rates w. These are negative
        # logarithms of the paper's u^(1/w), so that weights of very different sizes do not all round to 0.
        rings = [rng.expovariate(1.0) / weight for weight in self.weights]
        order = sorted(range(len(rings)), key=rings.__getitem__)
        return [self.artifacts[index] for index in order[:k]]


class Pool(Protocol):
    """Artifacts that can be drawn now."""

    def __len__(self) -> int: ...

    @property
    def at_least(self) -> int:
        """A number that ``len`` is not below, at no cost; 0 only if the pool is empty."""
        ...

    def draw(self, k: int, replacement: bool, rng: random.Random) -> list[Artifact]:
        """Draw ``k`` artifacts. The pool must have enough."""
        ...


class Samplable(ABC):
    """Artifacts to draw from: a store, or one side of its split."""

    name: str
    """Name of the store."""
    _rng: random.Random
    """The store's generator, for draws outside of episodes."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name in recordings of episodes."""

    @abstractmethod
    def __iter__(self) -> Iterator[Artifact]: ...

    @abstractmethod
    def _pool(self) -> Pool:
        """Return the artifacts that can be drawn now."""

    @records_input()
    def count(self) -> int:
        return sum(1 for _ in self)

    def __len__(self) -> int:
        return self.count()

    @records_input(draws=True)
    def sample(self, k: int = 1, *, replacement: bool = False) -> list[Artifact]:
        """Draw ``k`` artifacts, all different unless ``replacement``. Raises ``ValueError`` if there are too few."""
        pool = self._pool()
        enough = k <= pool.at_least or (replacement and pool.at_least > 0) or k <= len(pool)
        if k < 0 or not enough:
            raise ValueError(f"k={k!r}: the store {self.name!r} has {len(pool)} artifacts to draw from")
        context = current_context()
        return pool.draw(k, replacement, self._rng if context is None else context.rng)

    @records_input(draws=True)
    def sample_one(self) -> Artifact | None:
        """Draw one artifact. Return ``None`` if the store is empty."""
        return self.sample(1)[0] if self._pool().at_least or self.count() else None


def check_weights(weights: Sequence[float], count: int, rule: SamplingRule) -> None:
    """Raise ``ValueError`` unless ``weights`` are ``count`` finite numbers >= 0."""
    if len(weights) != count or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(
            f"{type(rule).__name__}.weights gave {list(weights)!r}: expected {count} finite numbers >= 0, or None"
        )


def _inverse_ranks(scores: Sequence[float]) -> list[float]:
    """Return ``1 / rank`` of each score. The largest score has rank 1; equal scores share the best of their ranks."""
    first: dict[float, int] = {}
    for rank, score in enumerate(sorted(scores, reverse=True), start=1):
        first.setdefault(score, rank)
    return [1.0 / first[score] for score in scores]


def _shares(values: Sequence[float]) -> list[float]:
    """Return ``values`` scaled to sum to 1; uniform if all are 0."""
    total = sum(values)
    return [value / total for value in values] if total > 0 else [1.0 / len(values)] * len(values)


def _check_share(**shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name}={share!r}: expected a share from 0 to 1")
