"""The metrics of a run as a diagnosis reads them: its first steps, its latest ones, and facts that don't change."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Self

SAME, ALIKE, FAILED, SUCCEEDED = "tied_same", "tied_alike", "tied_failed", "tied_succeeded"
TIES = (SUCCEEDED, SAME, FAILED, ALIKE)
"""Reasons for which groups tie; ``groups/<reason>/<actor>`` are metrics."""

EARLY, RECENT = 3, 5
"""Number of the first and of the latest steps over which a metric is averaged."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run doesn't write into each step.

    ``actors`` maps the actors that train to their policies, ``""`` if that is unknown. ``paid`` has the reward
    functions with a weight; ``None``: unknown. ``success`` is the metric that says if an episode succeeded.

    Example: ``Facts({"solver": "default"}, success="solved/solver", paid=("solved", "form"))``
    """

    actors: Mapping[str, str]
    success: str | None = None
    paid: tuple[str, ...] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read :meth:`to_json`. Raises ``ValueError`` for other text."""
        try:
            read: dict[str, Any] = json.loads(text)
            paid = read["paid"]
            return cls(read["actors"], read["success"], None if paid is None else tuple(paid))
        except (KeyError, TypeError) as error:
            raise ValueError(f"expected the facts of a run, got {text[:80]!r}") from error

    @classmethod
    def guessed(cls, row: Mapping[str, Any]) -> Facts:
        """Guess the facts from a step of a run that has not written them, such as one of an earlier version."""
        actors = {name.partition("/")[2]: "" for name in row if name.startswith("answers/prompts/")}
        actors = {name.rpartition("/")[2]: "" for name in actors} or {
            name.partition("/")[2]: "" for name in row if name.startswith("samples/")
        }
        policies = {name.partition("/")[0] for name in row if name.endswith("/grad_norm")}
        of_actor = {actor: policy for policy in policies for actor in actors if f"{policy}/{actor}/tokens" in row}
        return cls({actor: of_actor.get(actor, next(iter(policies), "")) for actor in actors})


@dataclass(slots=True)
class History:
    """The metrics so far: the first :data:`EARLY` steps and the latest :data:`RECENT` ones."""

    facts: Facts
    early: list[Mapping[str, float]] = field(default_factory=list)
    recent: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    steps: int = 0
    best: float | None = None
    """The highest recent mean of :meth:`success` so far."""

    def add(self, row: Mapping[str, float]) -> None:
        """Take the metrics of the next step."""
        self.steps += 1
        if len(self.early) < EARLY:
            self.early.append(row)
        self.recent.append(row)
        if (success := self.success()) is not None and len(self.recent) >= EARLY:
            self.best = max(success, self.best or 0.0)

    def at_start(self, name: str) -> float | None:
        """Return the mean of a metric over the first steps; ``None`` if they lack it."""
        return _mean(self.early, name)

    def now(self, name: str, steps: int = RECENT) -> float | None:
        """Return its mean over the latest ``steps``."""
        return _mean(islice(reversed(self.recent), steps), name)

    def of_actor(self, name: str, actor: str) -> str:
        """Return the name of a metric that updates measure by actor, such as ``entropy``."""
        return self.of_policy(f"{actor}/{name}", self.facts.actors[actor])

    def of_policy(self, name: str, policy: str) -> str:
        """Return the name of a metric that updates measure."""
        return f"{policy}/{name}" if policy else name

    def success(self, *, early: bool = False) -> float | None:
        """Return the success while sampling, now or at the start; ``None`` if the run measures none."""
        read = self.at_start if early else self.now
        found = read("success")
        return read("success_selected") if found is None else found

    def functions(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield each reward function with a value of each actor that trains: its mean at the start and now.

        Functions with values outside of 0 to 1, and that which measures success, are left out.
        """
        goal = (self.facts.success or "").partition("/")[0]
        for metric in self.recent[-1]:
            kind, _, rest = metric.partition("/")
            function, _, actor = rest.rpartition("/")
            if kind != "metric" or actor not in self.facts.actors or function in ("", goal) or "/" in function:
                continue
            if self.facts.paid is not None and function not in self.facts.paid:
                continue
            start, now = self.at_start(metric), self.now(metric)
            if start is not None and now is not None and min(start, now) >= 0 and max(start, now) <= 1:
                yield function, actor, start, now


def _mean(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    given = [row.get(name) for row in rows]
    values = [value for value in given if isinstance(value, int | float) and math.isfinite(value)]
    return sum(values) / len(values) if values else None
