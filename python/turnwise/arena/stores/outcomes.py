"""Records the attempts of a batch at stored artifacts, with reward and success."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.arena.stores.store import ArtifactStore
from turnwise.types import Artifact, GenerateResult, Rollout


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rollout on artifact ``id``."""

    id: str
    reward: float
    success: float
    score: float | None
    """Mean ``|advantage|`` of the batch on this artifact; ``None`` without advantages."""


def attempts_of(results: Sequence[GenerateResult], judge: Callable[[Rollout], tuple[float, float]]) -> list[Attempt]:
    """Return the finished attempts at stored artifacts, nested ones too. ``judge`` returns reward and success."""
    everything = (result.rollout for top in results for result in top.walk())
    rollouts = [
        (id, rollout)
        for rollout in everything
        if (id := artifact_id(rollout)) is not None and rollout.error is None and "dropped" not in rollout.meta
    ]
    surprises: dict[str, list[float]] = {}
    for id, rollout in rollouts:
        surprises.setdefault(id, []).extend(abs(s.advantage) for s in rollout.steps if s.advantage is not None)
    scores = {id: sum(found) / len(found) if found else None for id, found in surprises.items()}
    return [Attempt(id, *judge(rollout), scores[id]) for id, rollout in rollouts]


def artifact_id(rollout: Rollout) -> str | None:
    """Return the id of the rollout's artifact, or ``request.meta["artifact_id"]``; ``None`` without either."""
    if isinstance(rollout.artifact, Artifact):
        return rollout.artifact.id
    return rollout.meta.get("artifact_id")


def mean_reward(rollout: Rollout) -> tuple[float, float]:
    """Return the mean reward of the rewarded actors, and 1 if it is above 0, else 0."""
    reward = sum(rollout.rewards.values()) / len(rollout.rewards) if rollout.rewards else 0.0
    return reward, float(reward > 0)


def record_attempts(stores: Mapping[str, ArtifactStore], attempts: Iterable[Attempt]) -> None:
    """Record ``attempts`` in each store that has their artifact. Ignore attempts at removed artifacts."""
    attempts = list(attempts)
    for store in stores.values():
        mine = [attempt for attempt in attempts if attempt.id in store]
        if mine:
            with store.transaction():
                for attempt in mine:
                    store.record(attempt.id, attempt.reward, success=attempt.success, score=attempt.score)
