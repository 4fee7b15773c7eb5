"""The learning rate over a run: where a policy is in it, and the share of the peak rate there."""

from __future__ import annotations

import math
from collections.abc import Callable

from turnwise.train.config.policies import OptimizerConfig

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
}
"""Decay shapes: the rate falls from 1 to 0 while the progress goes from 0 to 1."""


class RunPlace:
    """Place of a policy in its run of ``total`` planned updates, from 0 at the start to 1 at the end.

    Each update advances it by ``1 / total``, and :meth:`follow` sets it.
    """

    def __init__(self, total: int) -> None:
        self.total = max(1, total)
        self._share, self._updates = 0.0, 0

    def follow(self, share: float, updates: int) -> None:
        """Set the place to ``share`` at the present number of ``updates``."""
        self._share, self._updates = share, updates

    def rate(self, config: OptimizerConfig, updates: int) -> float:
        """Return the learning rate after ``updates`` updates, as a share of its peak.

        It rises over the first ``warmup`` updates, and falls from 1 at the place where these should end to
        ``min_lr_ratio`` at the end of the run.
        """
        place, floor = self._share + (updates - self._updates) / self.total, config.min_lr_ratio
        rising = min(1.0, (updates + 1) / config.warmup) if config.warmup else 1.0
        begin = config.warmup / self.total
        progress = (place - begin) / (1 - begin) if begin < 1 else 0.0
        return rising * (floor + (1 - floor) * SCHEDULES[config.schedule](min(1.0, max(0.0, progress))))
