"""The policy losses by name: ``loss.kind`` of a configuration, with ``loss.options`` as their arguments.

Each is a :class:`turnwise.ops.Variant`, whose docstring has its formula and source; one of your own goes by import
path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from turnwise.ops import CISPO, GMPO, GPG, GSPO, SAPO, Clip, ClipCov, KLCov, Reinforce, Variant

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
