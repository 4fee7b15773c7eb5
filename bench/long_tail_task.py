"""The task of ``bench_long_tail.py --case vllm``: answers of a model that was never trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.arena import Episode, Rubric, TreeSampler
from turnwise.tasks.own import OwnTask
from turnwise.types import EpisodeState, Rollout

MEDIAN = 220
"""Tokens: about half of the answers are longer."""


def is_long(rollout: Rollout) -> float:
    """1 for an answer above the median length."""
    return float(sum(len(step.completion_token_ids) for step in rollout.steps) > MEDIAN)


class Answer(Episode):
    """One answer."""

    episode_type = "long_tail"
    rubric = Rubric([is_long])

    async def rollout(self, arena: Any, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        state = EpisodeState() if state is None else state
        await self.call_model("player", artifact["question"], arena)
        return state


class LongTail(OwnTask):
    name = "long_tail"
    success_metric = "is_long/player"
    system_prompts = {"player": ""}  # noqa: RUF012

    def questions(self) -> Sequence[str]:
        return [f"Tell me about {number}." for number in range(3000)]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        return {"long_tail": Answer()}
