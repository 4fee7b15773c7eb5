"""Which samples train. Every sample that a filter takes out is counted under its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnwise.types import Sample, Step

Call = Sample | Step

ZERO_ADVANTAGE = "zero_advantage"
"""The cause of an advantage of 0 that its rule says nothing more of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What leaves a batch, and whether questions are drawn to take its place.

    All drop after credit, so what they drop still counts in the statistics of its group: ``truncated`` completions that
    ran into their token limit, ``zero_advantage`` those with nothing to learn from (tied groups), ``max_length`` those
    with more tokens in prompt and completion.
    ``resample`` draws up to so many more batches, until as many questions have an advantage as the first one held
    (:mod:`turnwise.arena.resampling`).

    Example: ``Arena(client, tokenizer, credit=GRPOCredit(), filters=Filters(max_length=4096, resample=2))``
    """

    zero_advantage: bool = True
    truncated: bool = False
    max_length: int | None = None
    resample: int = 0

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length!r}: expected at least 2 tokens, or None")
        if self.resample < 0:
            raise ValueError(f"resample={self.resample!r}: expected a count >= 0")

    def causes(self, calls: Sequence[Call], zero_causes: Mapping[int, str] | None = None) -> list[str | None]:
        """Why each of ``calls``, all of which have an advantage, is dropped; ``None`` for those that train.

        ``zero_causes`` tells by ``id(call)`` why an advantage is 0, where that is known.
        """
        known = zero_causes or {}
        return [self._cause(call, known) for call in calls]

    def _cause(self, call: Call, zero_causes: Mapping[int, str]) -> str | None:
        if self.truncated and call.finish_reason == "length":
            return "truncated"
        if self.zero_advantage and call.advantage == 0:
            return zero_causes.get(id(call), ZERO_ADVANTAGE)
        if (
            self.max_length is not None
            and len(call.prompt_token_ids) + len(call.completion_token_ids) > self.max_length
        ):
            return "max_length"
        return None
