"""The policy losses by name: ``loss.kind`` of a configuration, with ``loss.options`` as their arguments.

Each is a :class:`turnwise.ops.Variant`, whose docstring has its formula and source. One of your own goes by import
path, ``"my_module:my_loss"``: a function ``(logprobs [n], old_logprobs [n], advantages [n], **options) -> loss [n]``
over the tokens that train, in PyTorch, or a class that is made with the options and called so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from turnwise.naming import construct, find
from turnwise.ops import CISPO, GMPO, GPG, GSPO, SAPO, Clip, ClipCov, Custom, KLCov, Reinforce, Variant
from turnwise.train.config import LossConfig

registry: dict[str, Callable[..., Variant]] = {
    "ppo": Clip,
    "clip-higher": partial(Clip, high=0.28),
    "gspo": GSPO,
    "cispo": CISPO,
    "reinforce": Reinforce,
    "gpg": GPG,
    "sapo": SAPO,
    "gmpo": GMPO,
    "clip-cov": ClipCov,
    "kl-cov": KLCov,
}

STREAMS = ("logprobs", "old_logprobs", "advantages")
"""What a loss of one's own is called with, before its options."""


def make_variant(config: LossConfig) -> Variant:
    """The loss that ``loss.kind`` names, with ``loss.options``. Raises ``ValueError`` naming the key that is wrong."""
    made = construct(find_loss(config.kind), config.options, "loss.options")
    if isinstance(made, Variant):
        return made
    if not callable(made):
        raise ValueError(
            f"config key 'loss.kind' = {config.kind!r} gave {made!r}: expected a function or an object to call with "
            f"({', '.join(STREAMS)}), or a turnwise.ops.Variant"
        )
    return Custom(made)


def find_loss(kind: str) -> Callable[..., Any]:
    """What makes the loss ``kind`` from its options. Raises ``ValueError`` where there is none."""
    found = find(registry, kind, "loss.kind")
    return found if inspect.isclass(found) or kind in registry else _with_options(found)


def _with_options(function: Any) -> Callable[..., Any]:
    """Options in, the loss with these options out; what follows the streams in its signature are its options."""
    if not callable(function):
        return lambda: function
    signature = inspect.signature(function)

    def bind(**options: Any) -> Any:
        signature.bind(*STREAMS, **options)  # one that is missing shows now, not at the first update
        return partial(function, **options)

    rest = list(signature.parameters.values())[len(STREAMS) :]
    bind.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    bind.__module__ = function.__module__  # where its annotations mean something
    return bind
