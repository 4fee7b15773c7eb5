"""The cross entropy of what came back after an actor's answers (ECHO, https://arxiv.org/abs/2605.24517).

``loss.observation_coef`` times the mean of ``-log p(token)`` over the observed tokens of the minibatch joins the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from turnwise.arena.stages.stage import Stage
from turnwise.settings.section import Section
from turnwise.train.terms.term import Added, Part, Term
from turnwise.types import GenerateResult, Sample, Step, TokenColumn, TrainingBatch
from turnwise.types.columns import Stream
from turnwise.types.passes import Read
from turnwise.types.prompts import as_prefix, begins, kept, prompt_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.train.model.micro_batch import MicroBatch
    from turnwise.train.model.policy import Policy

MEAN, COUNT = "loss_observations", "observation_tokens"
"""Metrics: the mean cross entropy of the observed tokens, in nats, and their number."""

NAME = "observation_mask"


class ObservationSettings(Section):
    """The coefficient of the term."""

    observation_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the cross entropy of what came back after an actor's answers (https://arxiv.org/abs/2605.24517)."""


@dataclass(frozen=True, eq=False)
class Observed(TokenColumn):
    """Marks the observed tokens with 1, which are read too. No policy sampled them, so their temperature is 1."""

    start: int = 0
    """Number of a sample's first tokens that are not observed, and have no values."""

    def check(self, prompt: int, completion: int, name: str) -> None:
        super().check(prompt - self.start, completion, name)

    def first(self, prompt: int) -> int:
        return self.start

    def behind(self, start: int) -> Observed:
        values = np.asarray(self.values)[max(0, start - self.start) :]
        return Observed(np.concatenate([np.zeros(max(0, self.start - start), values.dtype), values]))

    def read(self, mask: np.ndarray) -> np.ndarray:
        read: np.ndarray = mask | self.values
        return read

    def lay_out(self, stream: Stream) -> Observed:
        return replace(self, values=self.values != 0)

    def temperatures(self, temperature_N: Tensor) -> Tensor:
        return temperature_N.masked_fill(self.values, 1.0)


class ObservationMarks(Stage):
    """Marks the tokens of each prompt after the actor's previous answer in the same chat.

    The actor's earlier call in the rollout whose chat has one answer less precedes a prompt that begins with all tokens
    of the call's prompt and answer. What follows was written by the environment, tools, other actors and the chat
    template. A first call has observed nothing, and neither has one whose chat was shortened, or rendered again with
    other tokens. The metric ``observations/unmatched/<actor>`` is the share of calls for which a chat with one answer
    less exists, but not with these tokens.
    """

    name = "observation_marks"

    def selected(self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]) -> dict[str, float]:
        calls: dict[tuple[str, str, int], list[Step]] = {}
        answers: dict[tuple[str, int], int] = {}
        for rollout in (node.rollout for top in results for node in top.walk()):
            for index, step in enumerate(rollout.steps):
                count = sum(message["role"] == "assistant" for message in kept(step, "prompt"))
                answers[rollout.id, index] = count
                if step.actor_id is not None and step.completion_token_ids:
                    calls.setdefault((rollout.id, step.actor_id, count), []).append(step)
        unmatched: dict[str, list[bool]] = {}
        for sample in samples:
            prompt, count = as_prefix(prompt_tokens(sample)), answers[sample.rollout_id, sample.step_index]
            earlier = calls.get((sample.rollout_id, sample.actor, count - 1), [])
            asked = [(as_prefix(prompt_tokens(step)), step.completion_token_ids) for step in earlier]
            starts = [len(call) + len(answer) for call, answer in asked if begins(prompt, call, answer)]
            start = max(starts, default=len(prompt))
            marks = np.repeat(np.array([1, 0], np.uint8), [len(prompt) - start, len(sample.completion_token_ids)])
            sample.columns[NAME] = Observed(marks, start)
            if earlier:
                unmatched.setdefault(sample.actor, []).append(not starts)
        return {f"observations/unmatched/{actor}": sum(each) / len(each) for actor, each in unmatched.items()}


class Observations(Term):
    """Adds the cross entropy of the observed tokens, which the arena marks in its batches."""

    name = "observations"
    after = ("policy_loss",)
    settings = MappingProxyType({"loss": ObservationSettings})
    described = (
        (MEAN, "nats per token", "observed tokens", "falls", "cross entropy of observations"),
        (COUNT, "tokens", "step", "", "observed tokens"),
        ("observations/unmatched/<actor>", "count", "step", "0", "calls whose observation has other tokens"),
    )
    weights = MappingProxyType({MEAN: COUNT})
    trains_alone = True

    def is_on(self, config: Any) -> bool:
        return bool(config.observation_coef)

    def stages(self, config: Any, learner: Any) -> Iterator[Stage]:
        if self.is_on(config):
            yield ObservationMarks()

    def unserved(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        if config.observation_coef:
            yield (
                "loss.observation_coef",
                config.observation_coef,
                "its losses have no cross entropy of prompts: expected 0",
            )

    def beside_advantage(self, config: Any) -> list[str]:
        return ["loss.observation_coef"] if config.observation_coef else []

    def prepare(self, policy: Policy, batch: TrainingBatch, rows: np.ndarray, max_tokens: int | str) -> TrainingBatch:
        """Raise ``ValueError`` if the observed tokens are not marked. Warn if ``rows`` have none."""
        marks = batch.columns.get(NAME)
        if not isinstance(marks, Observed):
            raise ValueError(
                f"batch.columns has no {NAME!r}: expected marked observations with loss.observation_coef: call "
                "arena.add_stage(ObservationMarks())"
            )
        sums = np.concatenate([[0], marks.values.cumsum(dtype=np.int64)])[batch.cu_targets]
        if not np.diff(sums)[rows].any():
            text = "no chat of this batch goes on after an answer with the same tokens, so there is nothing to predict"
            warnings.warn(f"loss.observation_coef, policy {policy.name!r}: {text}", RuntimeWarning, stacklevel=4)
        return batch

    def minibatch(self, policy: Policy | None, parts: list[Part]) -> None:
        self.count = sum(int(observed_N(part.micro).sum()) for part in parts)

    def loss(self, read: Read, part: Part) -> Added:
        losses_n = -read.logprobs_N[observed_N(part.micro)]
        total, count = losses_n.sum(), len(losses_n)
        mean, number = total.detach() / max(1, count), total.new_tensor(float(count)).detach()
        return Added(self.config.observation_coef * total / max(1, self.count), {MEAN: mean, COUNT: number})


def observed_N(micro: MicroBatch) -> Tensor:
    """Return the mask ``[N]`` bool of the observed tokens."""
    column = micro.columns[NAME]
    assert isinstance(column, Observed)
    observed: Tensor = column.values
    return observed
