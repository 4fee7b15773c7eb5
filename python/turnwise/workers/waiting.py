"""Groups of episodes that wait for a worker."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from turnwise.workers.link import EpisodeBatch, EpisodeGroup


class WaitingGroups:
    """Groups that wait for a worker, in one queue for each lane of each batch, so that only first ones are looked at.

    A group that doesn't fit keeps the later ones of its lane waiting.
    """

    def __init__(self) -> None:
        self._lanes: dict[EpisodeBatch, dict[int, list[tuple[int, EpisodeGroup]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, group: EpisodeGroup) -> None:
        lane = self._lanes.setdefault(group.batch, {}).setdefault(group.lane, [])
        heapq.heappush(lane, (group.number, group))

    def first(self) -> list[EpisodeGroup]:
        """Return the first group of each lane, in order."""
        return [group for _, group in sorted(lane[0] for lanes in self._lanes.values() for lane in lanes.values())]

    def remove_first(self, group: EpisodeGroup) -> None:
        """Remove ``group``, which is the first of its lane."""
        lanes = self._lanes[group.batch]
        heapq.heappop(lanes[group.lane])
        if not lanes[group.lane]:
            del lanes[group.lane]
        if not lanes:
            del self._lanes[group.batch]

    def forget(self, batches: Iterable[EpisodeBatch]) -> None:
        """Remove all groups of ``batches``."""
        for batch in batches:
            self._lanes.pop(batch, None)

    def take_all(self) -> list[EpisodeGroup]:
        """Remove and return all groups."""
        lanes, self._lanes = self._lanes, {}
        return [group for batch in lanes.values() for lane in batch.values() for _, group in lane]
