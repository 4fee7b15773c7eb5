"""The policy losses by name: ``loss.type`` of a configuration, with ``loss.options`` as their arguments.

Each is a :class:`turnwise.ops.Variant`, whose docstring has its formula and source. Name a custom loss by its import
path, ``"my_module:my_loss"``. It is a PyTorch function ``(logprobs [n], old_logprobs [n], advantages [n], **options)
-> loss [n]`` over the tokens that train, or a class that takes the options and has instances to call in this way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from turnwise.ops import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GPG,
    GSPO,
    LUSPO,
    SAPO,
    VESPO,
    Clip,
    ClipCov,
    Custom,
    KLCov,
    Reinforce,
    Variant,
)
from turnwise.train.config.optimization import LossConfig
from turnwise.utils.registry import build_with_options, defines, import_by_name
from turnwise.utils.values import problem

registry: dict[str, Callable[..., Variant]] = {
    "ppo": Clip,
    "clip-higher": partial(Clip, high=0.28),
    "gspo": GSPO,
    "luspo": LUSPO,
    "cispo": CISPO,
    "reinforce": Reinforce,
    "gpg": GPG,
    "sapo": SAPO,
    "gmpo": GMPO,
    "clip-cov": ClipCov,
    "kl-cov": KLCov,
    "dppo": DPPO,
    "dro": DRO,
    "vespo": VESPO,
}

STREAMS = ("logprobs", "old_logprobs", "advantages")
"""Arguments of a custom loss, before its options."""


def make_variant(config: LossConfig) -> Variant:
    """Build the loss that ``loss.type`` names, with ``loss.options``. Raises ``ValueError`` naming the wrong key."""
    made = build_with_options(find_loss(config.type), config.options, "loss.options")
    return made if isinstance(made, Variant) else Custom(made)


def find_loss(kind: str) -> Callable[..., Any]:
    """Return the function that builds the loss ``kind`` from its options. Raises ``ValueError`` if there is none."""
    imported = import_by_name(registry, kind, "loss.type")
    if kind in registry:
        return imported
    if inspect.isclass(imported):
        fits = issubclass(imported, Variant) or defines(imported, "__call__")
    else:
        fits = _is_loss(imported)
    if not fits:
        calls = f"expected a function of ({', '.join(STREAMS)}), a class of objects to call so"
        raise ValueError(problem("loss.type", f"{calls}, or a turnwise.ops.Variant, got {imported!r}", kind))
    return imported if inspect.isclass(imported) else _with_options(imported)


def _is_loss(function: Any) -> bool:
    """Return True if it can be called with the streams as separate parameters."""
    if not callable(function):
        return False
    streams = list(inspect.signature(function).parameters.values())[: len(STREAMS)]
    return len(streams) == len(STREAMS) and all(
        each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in streams
    )


def _with_options(function: Any) -> Callable[..., Any]:
    """Return a function that binds options, the parameters of ``function`` after the streams, and returns the loss."""
    signature = inspect.signature(function)

    def bind(**options: Any) -> Any:
        signature.bind(*STREAMS, **options)  # a missing option fails now, not at the first update
        return partial(function, **options)

    rest = list(signature.parameters.values())[len(STREAMS) :]
    bind.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    bind.__module__ = function.__module__  # the module in which its annotations can be resolved
    return bind
