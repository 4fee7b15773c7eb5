"""Filters of the training batch. Each dropped sample is counted under its cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.types import Sample
from turnwise.types.columns import TOKEN_ADVANTAGES
from turnwise.types.prompts import prompt_tokens

StepKey = tuple[str, int]
"""Identifies a step in a batch: the rollout's id and the step's index in it."""

ZERO_ADVANTAGE = "zero_advantage"
"""Cause of an advantage of 0 if the credit rule gives no other cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Samples to drop from a batch, and how often to draw more questions in exchange.

    Example: ``Arena(client, tokenizer, credit=GRPOCredit(), filters=Filters(dynamic_sampling_rounds=2))``

    All filters act after credit assignment, so dropped samples still count in their group's statistics.
    """

    drop_zero_advantage: bool = True
    """Drop samples with advantage 0, as in tied groups, that have no advantages of single tokens either."""
    keep: Callable[[Sample], bool] | None = None
    """Samples that ``drop_zero_advantage`` keeps; a trainer sets it if other terms of its loss train them."""
    drop_truncated: bool = False
    """Drop completions that reached their token limit."""
    max_length: int | None = None
    """Maximum number of tokens in prompt and completion together."""
    dynamic_sampling_rounds: int = 0
    """Maximum number of further batches to draw until as many questions are informative as the first batch had."""

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length!r}: expected at least 2 tokens, or None")
        if self.dynamic_sampling_rounds < 0:
            raise ValueError(f"dynamic_sampling_rounds={self.dynamic_sampling_rounds!r}: expected a count >= 0")

    def causes(self, samples: Sequence[Sample], zero_causes: Mapping[StepKey, str] | None = None) -> list[str | None]:
        """Return the cause of dropping each sample; ``None`` if it trains. All must have an advantage.

        ``zero_causes`` has the credit rule's causes of advantages of 0.
        """
        causes: list[str | None] = [None] * len(samples)
        # Of several causes the last one here counts.
        if self.max_length is not None:
            for row, sample in enumerate(samples):
                if len(prompt_tokens(sample)) + len(sample.completion_token_ids) > self.max_length:
                    causes[row] = "max_length"
        if self.drop_zero_advantage:
            for row, cause in _without_advantage(samples, zero_causes or {}):
                if self.keep is None or not self.keep(samples[row]):
                    causes[row] = cause
        if self.drop_truncated:
            for row, sample in enumerate(samples):
                if sample.finish_reason == "length":
                    causes[row] = "truncated"
        return causes


def count_without_advantage(samples: Sequence[Sample], zero_causes: Mapping[StepKey, str]) -> dict[str, float]:
    """Return ``without_advantage/<cause>``: the number of ``samples`` that train without an advantage, by cause."""
    causes = Counter(cause for _, cause in _without_advantage(samples, zero_causes))
    return {f"without_advantage/{cause}": count for cause, count in causes.items()}


def _without_advantage(samples: Sequence[Sample], zero_causes: Mapping[StepKey, str]) -> list[tuple[int, str]]:
    """Return the row of each sample with advantage 0, also for each of its tokens, and the cause."""
    return [
        (row, zero_causes.get((sample.rollout_id, sample.step_index), ZERO_ADVANTAGE))
        for row, sample in enumerate(samples)
        if sample.advantage == 0 and TOKEN_ADVANTAGES not in sample.columns
    ]
