"""Clean evaluation: a view of the arena that trains nothing, greedy by default, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.arena import Arena
from turnwise.types import EpisodeRequest, Sampling


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``success`` is the mean of the success metric over all ``episodes``; ``low`` and ``high`` bound it at 95%.

    ``failed`` episodes count as 0 there. ``metrics`` holds the mean of every rubric metric over those that finished.
    """

    success: float
    low: float
    high: float
    episodes: int
    failed: int
    sampled_tokens: int
    metrics: dict[str, float]


async def evaluate(
    arena: Arena, requests: Sequence[EpisodeRequest], metric: str, sampling: Sampling | None = None
) -> Evaluation:
    """Run ``requests`` without trees, filters or updates, and average ``metric`` (a name in ``rollout.metrics``).

    Raises ``ValueError`` where there is nothing to average.
    """
    view = arena.evaluation(sampling=sampling or arena.sampling.with_(temperature=0.0))
    results = await view.generate_rollouts(list(requests))
    done = [result.rollout for result in results if result.rollout.error is None]
    if not done:
        first = next((r.rollout.error for r in results if r.rollout.error), "no requests")
        raise ValueError(f"evaluation of {len(results)} episodes: none finished; first error:\n{first}")
    names = sorted({name for rollout in done for name in rollout.metrics})
    if metric not in names:
        raise ValueError(f"metric={metric!r}: expected one of the rubric's metrics: {', '.join(names)}")
    means = {name: float(np.mean([r.metrics[name] for r in done if name in r.metrics])) for name in names}
    success = means[metric] * len(done) / len(results)
    low, high = wilson(min(max(success, 0.0), 1.0), len(results))
    tokens = sum(len(s.completion_token_ids) for r in results for w in r.walk() for s in w.rollout.steps)
    return Evaluation(success, low, high, len(results), len(results) - len(done), tokens, means)


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share of ``n`` trials (E. B. Wilson, JASA 22, 1927)."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
