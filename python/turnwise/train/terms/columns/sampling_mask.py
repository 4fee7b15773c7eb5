"""Training over the tokens that the sampler kept: top-p, top-k and min-p in rollouts.

The client names the kept tokens of each position (:class:`~turnwise.types.SamplingMask`), a batch has them as a column,
and each pass reads log-probs and entropies over them alone, renormalised: those of the policy that trains, of its
reference, and of the weights before the update ("Keep Sampling Mask", DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
The head computes the logits of the kept tokens, and no others.

Legend: ``N`` tokens of a micro-batch, ``P`` pairs of a token and a kept id.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import Field

from turnwise.arena.stages.stage import Stage
from turnwise.settings.section import RunFacts, Section
from turnwise.train.terms.term import Term
from turnwise.types import Column, GenerateResult, Sample, Sampling
from turnwise.types.columns import Places, Stream
from turnwise.types.model_calls import MAX_TOP_K
from turnwise.types.passes import NOTHING, Restriction
from turnwise.utils.values import problem

NAME = "sampling_mask"
"""Name of the column, of the fact of a step, and of the client's field; and the cause of calls without it."""


class CutSettings(Section):
    """The tokens that rollouts leave out."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest likeliest tokens with this probability, over which log-probs and losses are; 1: all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens at most, over which log-probs and losses are; 0: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens with at least this share of the highest probability, over which losses are; 0: all."""


@dataclass(frozen=True, eq=False)
class KeptTokens(Column):
    """The kept tokens of ``n`` positions, those of a sample's completion or of a batch's targets.

    Positions of prompts, and those at which none was left out, have none.
    """

    counts: Any
    """``[n]`` int64."""
    ids: Any
    """``[P]`` int32 (int64 in a micro-batch)."""

    def check(self, prompt: int, completion: int, name: str) -> None:
        if len(self.counts) != completion or len(self.ids) != self.counts.sum():
            raise ValueError(
                f"{name} of {len(self.counts)} positions and {len(self.ids)} tokens: expected {completion} and "
                f"{self.counts.sum()}"
            )

    @classmethod
    def join(cls, parts: Sequence[KeptTokens | None], lengths: np.ndarray) -> KeptTokens:
        counts, own = np.zeros(lengths.sum(), dtype=np.int64), [part for part in parts if part is not None]
        for part, end in zip(parts, lengths.sum(axis=1).cumsum(), strict=True):
            if part is not None:
                counts[end - len(part.counts) : end] = part.counts
        return cls(counts, np.concatenate([part.ids for part in own]))

    def select(self, places: Places) -> KeptTokens:
        counts, starts = self.counts[places.tokens], (self.counts.cumsum() - self.counts)[places.tokens]
        at = np.repeat(starts - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
        return KeptTokens(counts, self.ids[at])

    def lay_out(self, stream: Stream) -> KeptTokens | None:
        return KeptTokens(self.counts, self.ids.astype(np.int64)) if self.counts.any() else None

    def restriction(self, tokens: Any) -> Restriction | None:
        counts_n, starts_n = self.counts[tokens], (self.counts.cumsum(0) - self.counts)[tokens]

        def read(pairs: Any, index: Any, targets: Any, temperature: Any) -> tuple[Any, Any]:
            counts, starts = counts_n[index], starts_n[index]
            of_P = counts.new_tensor(range(len(counts))).repeat_interleave(counts)
            ids_P = self.ids[(starts - (counts.cumsum(0) - counts))[of_P] + counts.new_ones(len(of_P)).cumsum(0) - 1]
            raw_P = pairs(index[of_P], ids_P)
            return kept_logprob(raw_P / temperature[of_P].to(raw_P.dtype), of_P, ids_P, targets)

        return Restriction(counts_n > 0, read)


def kept_logprob(scaled_P: Any, of_P: Any, ids_P: Any, targets: Any) -> tuple[Any, Any]:
    """Return log-probs and entropies ``[m]`` of the distributions over the kept tokens.

    ``scaled_P`` are the logits of all pairs over the temperature, ``of_P`` their tokens, 0 to ``m - 1``. A target that
    is not kept gets ``-inf``.

    Example: logits ``log([1, 4])`` of one token's ids ``[3, 7]``: the target 7 has ``log(0.8)``
    """
    blank = scaled_P.new_zeros(len(targets))
    top = blank.scatter_reduce(0, of_P, scaled_P.detach(), "amax", include_self=False)
    shifted_P = scaled_P - top[of_P]
    logs_P = shifted_P - blank.index_add(0, of_P, shifted_P.exp()).log()[of_P]
    hits_P = ids_P == targets[of_P]
    hit = blank.index_add(0, of_P, hits_P.to(blank.dtype)) > 0
    logprobs = blank.index_add(0, of_P, logs_P.where(hits_P, blank.new_zeros(()))).masked_fill(~hit, -np.inf)
    return logprobs, -blank.index_add(0, of_P, logs_P.exp() * logs_P)


class MasksToKeep(Stage):
    """Takes the kept tokens that the client returned. Calls whose sampling left tokens out do not train without."""

    name = NAME

    def prepare(self, arena: Any, samples: Sequence[Sample]) -> dict[int, str]:
        unknown, cut = dict[int, str](), None
        for place, sample in enumerate(samples):
            if (mask := sample.facts.sampling_mask) is not None:
                if mask.counts.any():
                    sample.columns[NAME] = KeptTokens(mask.counts, mask.ids)
            elif sample.facts.cut is not None:
                unknown[place], cut = f"no_{NAME}", sample.facts.cut
        if unknown:
            warnings.warn(
                f"calls that were sampled with {cut} do not train, as the client did not name the kept tokens: with "
                f"vLLM, expected top_k from 2 to {MAX_TOP_K}",
                RuntimeWarning,
                stacklevel=2,
            )
        return unknown

    def selected(self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]) -> dict[str, float]:
        columns = [column for sample in samples if isinstance(column := sample.columns.get(NAME), KeptTokens)]
        if not columns:
            return {}
        counts = np.concatenate([column.counts[column.counts > 0] for column in columns])
        return {f"{NAME}/kept": float(counts.mean()), f"{NAME}/single": float((counts == 1).mean())}


class SamplingMasks(Term):
    """Reads what a batch has; it changes no loss."""

    name = "sampling_mask"
    effect = None
    settings = MappingProxyType({"rollout": CutSettings})
    needs = NOTHING

    def stages(self, config: Any, learner: Any) -> Iterator[Stage]:
        yield MasksToKeep()

    def problems(self, run: RunFacts) -> Iterator[str]:
        rollout, settings = run.config.rollout, dict[str, Sampling]()
        if (sampling := rollout.sampling()).cut:
            settings["rollout"] = sampling
        for actor in run.actors:
            if actor.sampling is not None and actor.sampling.cut:
                settings[f"actor {actor.id!r}: sampling"] = actor.sampling
        for where, sampling in settings.items():
            name, value = next(iter(sampling.cut.items()))
            if run.config.learner.is_remote:
                why = f"expected {Sampling.__dataclass_fields__[name].default}: a Tinker server names no kept tokens"
                yield problem(f"{where}.{name}", why, value)
            elif sampling.top_k == 1:
                yield problem(f"{where}.top_k", "expected 0 or at least 2: the likeliest token alone trains nothing", 1)
            elif self._asks_vllm(run.config) and not 1 < sampling.top_k <= MAX_TOP_K:
                why = (
                    f"expected 2 to {MAX_TOP_K} with {where}.{name}, as vLLM names the kept tokens only up to a number"
                )
                yield problem(f"{where}.top_k", why, sampling.top_k)
            if teachers := run.config.teachers():
                why = f"expected all tokens with actors.{next(iter(teachers))}.teacher, whose log-probs are over all"
                yield problem(f"{where}.{name}", why, value)

    @staticmethod
    def _asks_vllm(config: Any) -> bool:
        cluster = config.cluster
        if cluster.has_engines:
            return any(pool.engine != "transformers" for pool in cluster.engines.values())
        return bool(config.rollout.client == "vllm")
