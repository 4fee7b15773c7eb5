"""Turn the arguments of a policy loss into one checked objective, and its table of metrics into named metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import warn_caller
from turnwise.ops.common.layout import (
    Streams,
    check_stream_values,
    check_streams,
    check_tensors,
    count_actors,
    is_transformed,
)
from turnwise.ops.loss.aggregation import as_normalizer, check_normalizer, check_normalizer_values, find_aggregation
from turnwise.ops.loss.options import GMPO, KL, VESPO, Clip, ImportanceCorrection, Variant
from turnwise.ops.loss.reference import Objective, metric_names
from turnwise.ops.loss.variants import is_known, select_by_covariance


def choose_variant(clip: Clip | None, variant: Variant | None, correction: ImportanceCorrection | None) -> Variant:
    """The variant to use. Raises for options that contradict each other."""
    if not (clip is None or type(clip) is Clip):
        raise TypeError(f"clip={clip!r}: expected a Clip, such as Clip(low=0.2, high=0.28), or None")
    if variant is None:
        return _DEFAULT if clip is None else clip
    if clip is not None:
        raise ValueError(f"clip={clip!r} and variant={variant!r}: expected one of them, as either says what to clip")
    if not is_known(variant):
        raise TypeError(f"variant={variant!r}: expected one of the option objects, such as GSPO()")
    if isinstance(variant, GMPO) and correction is not None and correction.level == "token":
        raise ValueError(f"correction={correction!r}: expected level='sequence', as GMPO has one ratio per sequence")
    if isinstance(variant, VESPO) and correction is not None and correction.level == "sequence":
        raise ValueError(f"correction={correction!r}: expected level='token', as VESPO multiplies a sequence's weights")
    return variant


_DEFAULT = Clip()


class LossOptions(NamedTuple):
    """The options of a policy loss as the caller gave them: the arguments of :func:`policy_loss`."""

    clip: Clip | None
    variant: Variant | None
    kl: KL | None
    correction: ImportanceCorrection | None
    aggregation: str
    normalizer: Tensor | float | None
    num_actors: int | None
    max_length: float | None


def prepare(s: Streams, o: LossOptions) -> tuple[Streams, Objective]:
    """Check and combine the options, and put the normaliser among the streams. Raises if they need a missing stream."""
    aggregation = find_aggregation(o.aggregation, s.actor_ids, o.max_length)
    if not (o.kl is None or type(o.kl) is KL):
        raise TypeError(f"kl={o.kl!r}: expected a KL, such as KL('k3', coef=1e-3), or None")
    if not (o.correction is None or type(o.correction) is ImportanceCorrection):
        raise TypeError(f"correction={o.correction!r}: expected an ImportanceCorrection, or None")
    variant = choose_variant(o.clip, o.variant, o.correction)
    if variant.aggregations and o.aggregation not in variant.aggregations:
        expected = " or ".join(map(repr, variant.aggregations))
        raise ValueError(f"aggregation={o.aggregation!r}: expected {expected}, as variant={variant!r}")
    if o.kl is not None and s.ref_logprobs is None:
        raise ValueError("ref_logprobs=None: expected log-probabilities, as kl is given")
    if o.correction is not None and s.rollout_logprobs is None:
        raise ValueError("rollout_logprobs=None: expected log-probabilities, as correction is given")
    actors = 0 if s.actor_ids is None else count_actors(o.num_actors)
    check_tensors(s)
    if o.normalizer is not None:
        normalizer = as_normalizer(o.normalizer, s.logprobs.device)
        check_normalizer(aggregation, normalizer, o.num_actors)
        s = s._replace(normalizer=normalizer)
    return s, Objective(variant, o.kl, o.correction, aggregation, actors, o.max_length)


def check_call(s: Streams, objective: Objective, check: bool = False) -> None:
    """Raise for the first argument that is wrong. Values are checked on a CPU, and on a GPU only with ``check``."""
    check_streams(s, objective.num_actors)
    if (check or s.logprobs.is_cpu) and not torch.compiler.is_compiling():
        check_stream_values(s, objective.num_actors)
        if s.normalizer is not None:
            check_normalizer_values(s.normalizer)


def warn_ambiguous(s: Streams) -> None:
    """Warn about packed advantages ``[B]`` that could be meant per token: some rows are empty, and the
    numbers of tokens and rows are equal. Checked only on a CPU."""
    cu_seqlens, tokens = s.cu_seqlens, s.logprobs.shape[0]
    if cu_seqlens is None or cu_seqlens.shape[0] - 1 != tokens or tuple(s.advantages.shape) != (tokens,):
        return
    hidden = not cu_seqlens.is_cpu or torch.compiler.is_compiling() or is_transformed(cu_seqlens)
    if not hidden and not bool((torch.diff(cu_seqlens) == 1).all()):
        warn_caller(
            f"advantages: {tokens} numbers for {tokens} sequences with {tokens} tokens in all count as one per "
            "sequence; if they are per token, leave sequences without tokens out of cu_seqlens"
        )


def with_selected(s: Streams, variant: Variant) -> Streams:
    """Check the selected tokens. If none are given, and the variant needs them, select them here."""
    if s.selected is None:
        return s._replace(selected=select_by_covariance(s, variant)) if variant.selects else s
    if not variant.selects:
        raise ValueError(f"selected: expected None, as variant={variant!r} singles out no tokens")
    if s.selected.dtype is not torch.bool:
        raise TypeError(f"selected: expected a bool tensor, from select_tokens, got {s.selected.dtype}")
    if s.selected.shape != s.logprobs.shape:
        shapes = tuple(s.selected.shape), tuple(s.logprobs.shape)
        raise ValueError(f"selected has shape {shapes[0]}: expected {shapes[1]}, as logprobs")
    return s


class Metrics(Mapping[str, Tensor]):
    """The columns of ``table[rows]`` under their ``names``. They are unbound on first use, as many steps log none.

    Reads like a dict. ``dict(metrics)`` and ``metrics | more`` give a real dict.
    """

    __slots__ = ("_names", "_rows", "_table", "_values")

    def __init__(self, names: tuple[str, ...], table: Tensor, rows: int | slice) -> None:
        self._names = names
        self._table = table
        self._rows = rows
        self._values: dict[str, Tensor] | None = None

    def _all(self) -> dict[str, Tensor]:
        if self._values is None:
            self._values = dict(zip(self._names, self._table[self._rows].unbind(-1), strict=True))
        return self._values

    def __getitem__(self, name: str) -> Tensor:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other} if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._all())


def named_metrics(s: Streams, table: Tensor) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Turn the table ``[1 + num_actors, K]`` into ``metrics`` and ``actor_metrics``."""
    names = metric_names(s.ref_logprobs is not None, s.rollout_logprobs is not None, s.entropy is not None)
    metrics: Mapping[str, Tensor] = Metrics(names, table, 0)
    actor_metrics: Mapping[str, Tensor] = {} if s.actor_ids is None else Metrics(names, table, _ACTORS)
    if torch.compiler.is_compiling():
        return dict(metrics), dict(actor_metrics)
    return metrics, actor_metrics


_ACTORS = slice(1, None)
