"""Which samples train. Every sample that a filter takes out is counted under the filter's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.types import Sample


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

    def before_credit(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, int]]:
        """The samples that credit rules see, and how many were dropped, by reason."""
        kept = [s for s in samples if not (self.truncated and s.finish_reason == "length")]
        return kept, _counts(truncated=len(samples) - len(kept))

    def after_credit(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, int]]:
        """The samples that train, of those with an advantage, and how many were dropped, by reason."""
        told = [s for s in samples if not self.zero_advantage or s.advantage != 0]
        kept = told if self.max_length is None else [s for s in told if _length(s) <= self.max_length]
        return kept, _counts(zero_advantage=len(samples) - len(told), max_length=len(told) - len(kept))


def _length(sample: Sample) -> int:
    return len(sample.prompt_token_ids) + len(sample.completion_token_ids)


def _counts(**counts: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
