"""Signals that measure failures of self-play: one class per signal, found by name in :data:`SIGNALS`.

A signal measures each step, and gives a :class:`Sums` for each actor that it covers. The guard adds these over the last
window of steps, and :meth:`Signal.judge` decides if the sum is healthy. Only live policies are measured, not past ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from turnwise.train.eval.statistics import wilson
from turnwise.train.league.payoffs import game_of
from turnwise.types import GenerateResult, Rollout, Step


@dataclass(frozen=True, slots=True)
class Sums:
    """The sum ``total`` of ``count`` observations; a signal judges their mean."""

    count: float
    total: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    def plus(self, other: Sums) -> Sums:
        return Sums(self.count + other.count, self.total + other.total)


class Signal(ABC):
    """Base class of signals. ``threshold`` is the value at which it becomes unhealthy, in the units of each class."""

    default: ClassVar[float]

    def __init__(self, threshold: float | None = None, seats: Sequence[str] = ()) -> None:
        self.threshold = self.default if threshold is None else threshold
        self.seats = tuple(seats)

    @abstractmethod
    def measure(self, results: Sequence[GenerateResult]) -> dict[str, Sums]:
        """Return one step's observations by actor, without actors that have none."""

    @abstractmethod
    def judge(self, window: Sums, first: Sums) -> str | None:
        """Describe the problem of the last ``window``, or return ``None``. ``first`` is the first full window."""


class SeatSkew(Signal):
    """The first of two seats wins much more or less than half of its games, with live policies in both seats.

    Unhealthy if the 95% interval excludes 0.5 and the share differs from 0.5 by more than ``threshold``: only one seat
    learns, or the game itself favours it.
    """

    default = 0.15

    def measure(self, results: Sequence[GenerateResult]) -> dict[str, Sums]:
        played = [
            rollout
            for rollout in _finished(results)
            if not rollout.facts.policies and set(self.seats) <= rollout.rewards.keys()
        ]
        if len(self.seats) != 2 or not played:
            return {}
        shares = [game_of(rollout, self.seats[:1], self.seats).share for rollout in played]
        return {self.seats[0]: Sums(len(shares), sum(shares))}

    def judge(self, window: Sums, first: Sums) -> str | None:
        low, high = wilson(window.mean, int(window.count))
        if low <= 0.5 <= high or abs(window.mean - 0.5) <= self.threshold:
            return None
        return f"wins {window.mean:.0%} of its games (95% interval {low:.0%}-{high:.0%}), not about a half"


class Invalid(Signal):
    """The share of an actor's actions that were illegal, by the rubric's ``legal/<actor>`` or ``valid/<actor>``.

    Unhealthy if the whole 95% interval is above ``threshold``.
    """

    default = 0.2

    def measure(self, results: Sequence[GenerateResult]) -> dict[str, Sums]:
        totals: dict[str, Sums] = {}
        for rollout in _finished(results):
            for actor in {step.actor_id for step in rollout.steps if step.trainable and step.actor_id is not None}:
                legal = rollout.metrics.get(f"legal/{actor}", rollout.metrics.get(f"valid/{actor}"))
                if legal is not None:
                    totals[actor] = totals.get(actor, Sums(0, 0.0)).plus(Sums(1, 1.0 - legal))
        return totals

    def judge(self, window: Sums, first: Sums) -> str | None:
        low, _ = wilson(min(max(window.mean, 0.0), 1.0), int(window.count))
        return None if low <= self.threshold else f"{window.mean:.0%} of its actions are invalid"


class _Fallen(Signal):
    """A signal that is unhealthy below ``threshold`` times its value in the run's first window."""

    measures: ClassVar[str]

    def judge(self, window: Sums, first: Sums) -> str | None:
        if window.mean >= self.threshold * first.mean:
            return None
        return f"{self.measures} is {window.mean:.3g}, it was {first.mean:.3g}"


class Entropy(_Fallen):
    """The mean of ``-log p`` over an actor's sampled tokens, in nats: an estimate of its policy's entropy per token."""

    default, measures = 0.2, "mean -log-prob per token"

    def measure(self, results: Sequence[GenerateResult]) -> dict[str, Sums]:
        totals: dict[str, Sums] = {}
        for actor, step in _live_steps(results):
            sums = Sums(len(step.completion_logprobs), -sum(step.completion_logprobs))
            totals[actor] = totals.get(actor, Sums(0, 0.0)).plus(sums)
        return totals


class Distinct(_Fallen):
    """Share of distinct completions among all completions of an actor in a step."""

    default, measures = 0.3, "share of distinct completions"

    def measure(self, results: Sequence[GenerateResult]) -> dict[str, Sums]:
        completions: dict[str, list[tuple[int, ...]]] = {}
        for actor, step in _live_steps(results):
            completions.setdefault(actor, []).append(tuple(step.completion_token_ids))
        return {actor: Sums(len(texts), len(set(texts))) for actor, texts in completions.items()}


class Distinct2(_Fallen):
    """Distinct-2 of a step: the share of distinct pairs among all pairs of neighbouring tokens in an actor's
    completions (Li et al., "A diversity-promoting objective function", 2016, https://arxiv.org/abs/1510.03055)."""

    default, measures = 0.3, "distinct-2"

    def measure(self, results: Sequence[GenerateResult]) -> dict[str, Sums]:
        pairs: dict[str, list[tuple[int, int]]] = {}
        for actor, step in _live_steps(results):
            ids = step.completion_token_ids
            pairs.setdefault(actor, []).extend(pairwise(ids))
        return {actor: Sums(len(seen), len(set(seen))) for actor, seen in pairs.items() if seen}


SIGNALS: dict[str, type[Signal]] = {
    "seat_skew": SeatSkew,
    "invalid": Invalid,
    "entropy": Entropy,
    "distinct": Distinct,
    "distinct_2": Distinct2,
}
"""Signals by their names in ``health.signals``."""


def _finished(results: Sequence[GenerateResult]) -> Iterator[Rollout]:
    for top in results:
        for result in top.walk():
            if result.rollout.error is None:
                yield result.rollout


def _live_steps(results: Sequence[GenerateResult]) -> Iterator[tuple[str, Step]]:
    for rollout in _finished(results):
        for step in rollout.steps:
            if step.trainable and step.actor_id is not None:
                yield step.actor_id, step
