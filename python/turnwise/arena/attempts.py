"""What a batch says of the artifacts that it was played on, for the stores that they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.arena.store import ArtifactStore
from turnwise.types import Artifact, GenerateResult, Rollout


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rollout on artifact ``id``. ``score`` is the batch's mean ``|advantage|`` on that artifact, ``None`` where
    nothing of it had one."""

    id: str
    reward: float
    success: float
    score: float | None


def attempts_of(results: Sequence[GenerateResult], judge: Callable[[Rollout], tuple[float, float]]) -> list[Attempt]:
    """The finished rollouts of ``results``, nested ones too, whose artifact has an id; ``judge`` gives reward and
    success of one."""
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
    """The id of the stored artifact that was played on: of the artifact itself, or ``request.meta["artifact_id"]``."""
    if isinstance(rollout.artifact, Artifact):
        return rollout.artifact.id
    return rollout.meta.get("artifact_id")


def mean_reward(rollout: Rollout) -> tuple[float, float]:
    """The mean over the rewarded actors, and 1 where it is above 0."""
    reward = sum(rollout.rewards.values()) / len(rollout.rewards) if rollout.rewards else 0.0
    return reward, float(reward > 0)


def tell(stores: Mapping[str, ArtifactStore], attempts: Iterable[Attempt]) -> None:
    """Record ``attempts`` in each store that has an artifact of their id; those of artifacts that are gone nowhere."""
    attempts = list(attempts)
    for store in stores.values():
        mine = [attempt for attempt in attempts if attempt.id in store]
        if mine:
            with store.together():
                for attempt in mine:
                    store.record(attempt.id, attempt.reward, success=attempt.success, score=attempt.score)
