"""Records the attempts at stored artifacts in their stores, once the update of their batch has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.arena.stages.stage import Stage
from turnwise.arena.stores.contents import Attempt, attempts_of, record_attempts
from turnwise.types import GenerateResult


class StoreAttempts(Stage):
    """Keeps the attempts of packed batches for their stores. Draws don't see those of a batch before its update."""

    name = "store_attempts"
    always = True

    def __init__(self) -> None:
        self._waiting: deque[list[Attempt]] = deque()

    def packed(self, arena: Any, results: Sequence[GenerateResult]) -> Mapping[str, float]:
        if arena.stores:
            self._waiting.append(attempts_of(results, arena.attempt_result))
        return {}

    def settle(self, arena: Any) -> None:
        while self._waiting:
            record_attempts(arena.stores, self._waiting.popleft())

    def taken_back(self) -> None:
        self._waiting.clear()
