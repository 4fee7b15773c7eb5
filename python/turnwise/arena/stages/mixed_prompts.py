"""Reports the groups that compare calls with different prompts, as agents behind a gateway make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.arena.stages.stage import BatchNotes, Stage
from turnwise.types import GenerateResult, GroupedCredit, Sample
from turnwise.types.prompts import prompt_tokens


class MixedPrompts(Stage):
    """Adds the metric ``groups/mixed_prompts`` (:func:`mixed_prompts`)."""

    name = "mixed_prompts"
    always = True

    def credited(
        self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample], notes: BatchNotes
    ) -> None:
        notes.metrics |= mixed_prompts(samples, arena.credit)


def mixed_prompts(samples: Sequence[Sample], credit: Any) -> dict[str, float]:
    """Return the share of the groups that compare calls with different prompts, as ``groups/mixed_prompts``.

    It is reported for agents behind a gateway, which may call models in any situation, and for rules that compare in
    groups. A high share is normal and harmless under a rule that compares whole attempts.
    """
    if not isinstance(credit, GroupedCredit) or not any("call" in sample.info for sample in samples):
        return {}
    prompts: dict[Any, list[tuple[int, ...]]] = {}
    for sample in samples:
        prompts.setdefault(credit.key_of(sample), []).append(tuple(prompt_tokens(sample)))
    compared = [group for group in prompts.values() if len(group) > 1]
    if not compared:
        return {}
    return {"groups/mixed_prompts": sum(len(set(group)) > 1 for group in compared) / len(compared)}
