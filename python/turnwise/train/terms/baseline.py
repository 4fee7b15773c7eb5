"""The optimal token baseline as ``loss.baseline``: advantages per token, ``A = G - B`` (https://arxiv.org/abs/2602.07078).

    G   the advantage that the credit rule gave the row, at each of its trained tokens
    B   the mean of G over the rows of the credit rule's group at this token position, each weighed by the squared norm
        of its gradient so far: :func:`turnwise.ops.optimal_token_baseline`

A rule's own baseline cancels out in ``G - B``, except where only one row of the group reaches the position: there ``B``
is 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from turnwise.arena.stages.stage import Stage
from turnwise.settings.section import RunFacts, Section
from turnwise.train.terms.term import Term
from turnwise.types import GenerateResult, GroupedCredit, RowColumn, Sample, TrainingBatch
from turnwise.types.passes import NOTHING, Needs
from turnwise.utils.values import problem

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.train.model.micro_batch import MicroBatch
    from turnwise.train.model.policy import Policy

GROUPS = "group_index"


class BaselineSettings(Section):
    """The choice of the baseline."""

    baseline: Literal["credit", "optimal_token"] = "credit"
    """Baseline of the advantages: the credit rule's, or one per token that minimises the gradient's variance."""


class GroupIndex(Stage):
    """Numbers the groups in which the credit rule compares samples. Without a rule there is no column.

    A rule without groups compares an actor's calls of the same turn at one question.
    """

    name = GROUPS

    def selected(self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]) -> dict[str, float]:
        credit = arena.credit
        numbers: dict[Hashable, int] = {}
        for sample in samples if credit is not None else ():
            key: Hashable = (sample.group_id, sample.episode_type, sample.actor, sample.turn)
            if isinstance(credit, GroupedCredit):
                key = credit.key_of(sample)
            sample.columns[GROUPS] = RowColumn(numbers.setdefault(key, len(numbers)))
        return {}


class OptimalTokenBaseline(Term):
    """Gives a batch advantages per token, in one pass of the present weights."""

    name = "baseline"
    effect = "replaces"
    settings = MappingProxyType({"loss": BaselineSettings})
    described = (("token_baseline", "reward", "trained tokens", "", "mean baseline of a token"),)
    needs = NOTHING

    def is_on(self, config: Any) -> bool:
        on: bool = config.baseline == "optimal_token"
        return on

    def stages(self, config: Any, learner: Any) -> Iterator[Stage]:
        if self.is_on(config):
            yield GroupIndex()

    def problems(self, run: RunFacts) -> Iterator[str]:
        loss = run.config.loss
        if self.is_on(loss) and loss.critic is not None:
            why = "expected 'credit' with loss.critic, whose values are the baseline"
            yield problem("loss.baseline", why, loss.baseline)

    def needing_rewards(self, config: Any) -> Iterator[str]:
        if self.is_on(config):
            yield "loss.baseline"

    def unserved(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        if self.is_on(config):
            yield "loss.baseline", config.baseline, "the server has no probabilities of all tokens: expected 'credit'"

    def beside_advantage(self, config: Any) -> list[str]:
        return ["loss.baseline"] if self.is_on(config) else []

    def prepare(self, policy: Policy, batch: TrainingBatch, rows: np.ndarray, max_tokens: int | str) -> TrainingBatch:
        """Return ``batch`` with advantages per token for ``rows``. Raises ``ValueError`` for a batch without groups."""
        groups = batch.columns.get(GROUPS)
        if not isinstance(groups, RowColumn):
            raise ValueError(
                f"batch.columns has no {GROUPS!r}: expected the groups of a credit rule with loss.baseline: call "
                "arena.add_stage(GroupIndex())"
            )
        self._mean = 0.0
        if not len(rows):
            return batch

        import torch

        from turnwise.ops import optimal_token_baseline
        from turnwise.train.model.micro_batch import pack
        from turnwise.train.terms.columns.token_advantages import at_last_token, with_token_advantages

        def read_both(micro: MicroBatch) -> Tensor:
            read = policy.read(micro, Needs(squares=True))
            return torch.stack([read.logprobs_N, read.squares_N], dim=-1)

        policy.model.eval()
        whole = pack(batch, rows)
        with torch.no_grad():
            micros = policy.cut(batch, rows, policy.micro_batch_tokens(max_tokens))
            stream = policy.over_stream(len(batch.targets), micros, read_both)
            logprobs_N, squares_N = stream.cpu()[whole.token_N].unbind(-1)
            advantages_N, returns_N = optimal_token_baseline(
                at_last_token(whole.advantages_B, whole.row_N, whole.mask_N != 0),
                logprobs_N,
                squares_N,
                torch.from_numpy(groups.values[rows]),
                mask=whole.mask_N,
                cu_seqlens=whole.cu_seqlens,
            )
        trained = max(1, int((whole.mask_N != 0).sum()))
        self._mean = float((returns_N - advantages_N).double().sum()) / trained
        return with_token_advantages(batch, rows, whole, advantages_N)

    def metrics(self, measured: Mapping[str, float], rows: int) -> dict[str, float]:
        return {"token_baseline": self._mean}
