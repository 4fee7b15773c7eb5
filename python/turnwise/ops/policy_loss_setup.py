"""What the policy losses make of their arguments before they compute: one objective, and its metrics by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .aggregation import check_normalizer, find_aggregation
from .metrics import Metrics
from .options import GMPO, KL, Clip, ImportanceCorrection, Variant
from .policy_loss_reference import Objective, metric_names
from .policy_loss_variants import select
from .streams import Streams


def choose_variant(clip: Clip | None, variant: Variant | None, correction: ImportanceCorrection | None) -> Variant:
    """The one that is meant. Raises for what can't go together."""
    if variant is None:
        return _DEFAULT if clip is None else clip
    if clip is not None:
        raise ValueError(f"clip={clip!r} and variant={variant!r}: expected one of them, as either says what to clip")
    if not isinstance(variant, Variant):
        raise TypeError(f"variant={variant!r}: expected one of the option objects, such as GSPO()")
    if isinstance(variant, GMPO) and correction is not None and correction.level == "token":
        raise ValueError(f"correction={correction!r}: expected level='sequence', as GMPO has one ratio per sequence")
    return variant


_DEFAULT = Clip()


def make_objective(
    s: Streams,
    clip: Clip | None,
    variant: Variant | None,
    kl: KL | None,
    correction: ImportanceCorrection | None,
    aggregation: str,
    num_actors: int | None,
    max_length: float | None,
) -> Objective:
    """The options as one object, with the streams at hand that they need."""
    found = find_aggregation(aggregation, s.actor_ids, max_length)
    chosen = choose_variant(clip, variant, correction)
    if kl is not None and s.ref_logprobs is None:
        raise ValueError("ref_logprobs=None: expected log-probabilities, as kl is given")
    if correction is not None and s.rollout_logprobs is None:
        raise ValueError("rollout_logprobs=None: expected log-probabilities, as correction is given")
    if s.actor_ids is not None and (num_actors is None or num_actors < 1):
        raise ValueError(f"num_actors={num_actors!r}: expected a count >= 1, as actor_ids is given")
    actors = num_actors if s.actor_ids is not None and num_actors is not None else 0
    return Objective(chosen, kl, correction, found, actors, max_length)


def make_selected(s: Streams, variant: Variant, selected: Tensor | None) -> Tensor | None:
    """Which tokens the variant singles out, given or chosen here; ``None`` where it singles out none."""
    if selected is None:
        return select(s, variant) if variant.selects else None
    if not variant.selects:
        raise ValueError(f"selected: expected None, as variant={variant!r} singles out no tokens")
    if not isinstance(selected, Tensor) or selected.dtype is not torch.bool:
        raise TypeError(f"selected={selected!r}: expected a bool tensor, from select_tokens")
    if selected.shape != s.logprobs.shape:
        raise ValueError(f"selected has shape {tuple(selected.shape)}: expected {tuple(s.logprobs.shape)}, as logprobs")
    return selected


def make_normalizer(
    normalizer: Tensor | float | None, objective: Objective, logprobs: Tensor, num_actors: int | None
) -> Tensor | None:
    if normalizer is None:
        return None
    if isinstance(normalizer, int | float):  # filled in where it is: to copy a number to a GPU would wait for it
        normalizer = torch.full((), normalizer, dtype=torch.float32, device=logprobs.device)
    normalizer = torch.as_tensor(normalizer, dtype=torch.float32, device=logprobs.device)
    check_normalizer(objective.aggregation, normalizer, num_actors)
    return normalizer


def named_metrics(s: Streams, table: Tensor) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """``metrics`` and ``actor_metrics`` from ``[1 + num_actors, K]``."""
    names = metric_names(s.ref_logprobs is not None, s.rollout_logprobs is not None, s.entropy is not None)
    make = _as_dict if torch.compiler.is_compiling() else Metrics
    return make(names, table, 0), make(names, table, _ACTORS) if s.actor_ids is not None else {}


_ACTORS = slice(1, None)


def _as_dict(names: tuple[str, ...], table: Tensor, rows: int | slice) -> dict[str, Tensor]:
    return dict(Metrics(names, table, rows))
