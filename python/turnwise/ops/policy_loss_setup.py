"""What the policy losses make of their arguments before they compute: one objective, and its metrics by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .aggregation import as_normalizer, check_normalizer, check_normalizer_values, find_aggregation
from .metrics import Metrics
from .options import GMPO, KL, Clip, ImportanceCorrection, Variant
from .policy_loss_reference import Objective, metric_names
from .policy_loss_variants import is_known, select
from .streams import Streams, check_stream_values, check_streams, count_actors


def choose_variant(clip: Clip | None, variant: Variant | None, correction: ImportanceCorrection | None) -> Variant:
    """The one that is meant. Raises for what can't go together."""
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
    if not (kl is None or type(kl) is KL):
        raise TypeError(f"kl={kl!r}: expected a KL, such as KL('k3', coef=1e-3), or None")
    if not (correction is None or type(correction) is ImportanceCorrection):
        raise TypeError(f"correction={correction!r}: expected an ImportanceCorrection, or None")
    chosen = choose_variant(clip, variant, correction)
    if kl is not None and s.ref_logprobs is None:
        raise ValueError("ref_logprobs=None: expected log-probabilities, as kl is given")
    if correction is not None and s.rollout_logprobs is None:
        raise ValueError("rollout_logprobs=None: expected log-probabilities, as correction is given")
    actors = 0 if s.actor_ids is None else count_actors(num_actors)
    return Objective(chosen, kl, correction, found, actors, max_length)


def check_call(s: Streams, objective: Objective, normalizer: Tensor | None, check: bool = False) -> None:
    """Raises for the first argument that is wrong. Values are looked at on a CPU, on a GPU with ``check``."""
    check_streams(s, objective.num_actors)
    if (check or s.logprobs.is_cpu) and not torch.compiler.is_compiling():
        check_stream_values(s, objective.num_actors)
        if normalizer is not None:
            check_normalizer_values(normalizer)


def make_selected(s: Streams, variant: Variant, selected: Tensor | None) -> Tensor | None:
    """Which tokens the variant singles out, given or chosen here; ``None`` where it singles out none."""
    if selected is None:
        return select(s, variant) if variant.selects else None
    if not variant.selects:
        raise ValueError(f"selected: expected None, as variant={variant!r} singles out no tokens")
    if not isinstance(selected, Tensor) or selected.dtype is not torch.bool:
        got = getattr(selected, "dtype", type(selected).__name__)
        raise TypeError(f"selected: expected a bool tensor, from select_tokens, got {got}")
    if selected.shape != s.logprobs.shape:
        raise ValueError(f"selected has shape {tuple(selected.shape)}: expected {tuple(s.logprobs.shape)}, as logprobs")
    if selected.device != s.logprobs.device:
        raise ValueError(f"selected is on {selected.device}: expected {s.logprobs.device}, as logprobs")
    return selected


def make_normalizer(
    normalizer: Tensor | float | None, objective: Objective, logprobs: Tensor, num_actors: int | None
) -> Tensor | None:
    if normalizer is None:
        return None
    normalizer = as_normalizer(normalizer, logprobs.device)
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
