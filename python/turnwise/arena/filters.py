"""Which samples train. Every sample that a filter takes out is counted under the filter's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.types import Sample, Step

Call = Sample | Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What leaves a batch, and whether questions are drawn to take its place.

    ``truncated`` drops completions that ran into their token limit, before credit: they enter no statistics.
    ``zero_advantage`` (tied groups) and ``max_length`` (more tokens in prompt and completion) drop after credit.
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

    def before_credit(self, calls: Sequence[Call]) -> tuple[list[bool], dict[str, int]]:
        """Which of ``calls`` credit rules see, and how many are dropped, by reason."""
        kept = [call.finish_reason != "length" for call in calls] if self.truncated else [True] * len(calls)
        return kept, _counts(truncated=kept.count(False))

    def after_credit(self, calls: Sequence[Call]) -> tuple[list[bool], dict[str, int]]:
        """Which of ``calls`` train, all of which have an advantage, and how many are dropped, by reason."""
        told = [call.advantage != 0 for call in calls] if self.zero_advantage else [True] * len(calls)
        most = self.max_length
        kept = (
            told if most is None else [tell and _length(call) <= most for tell, call in zip(told, calls, strict=True)]
        )
        return kept, _counts(zero_advantage=told.count(False), max_length=kept.count(False) - told.count(False))


def _length(call: Call) -> int:
    return len(call.prompt_token_ids) + len(call.completion_token_ids)


def _counts(**counts: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
