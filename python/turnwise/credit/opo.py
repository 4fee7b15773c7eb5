"""OPO: the baseline that makes the gradient's variance least, if its norm grows with the length.

    A_i = R_i - sum_j(l_j R_j) / sum_j(l_j)

over the answers ``j`` to one question, ``l_j`` being the completion tokens of a trajectory. There is no standard
deviation. (Hao et al., https://arxiv.org/abs/2505.23585.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.credit.grpo import GRPOCredit


@dataclass(kw_only=True)
class OPOCredit(GRPOCredit):
    """Group ``(uid,)``, one value per trajectory; ``hierarchy`` as in :class:`GRPOCredit`."""

    center: str = "length_weighted"
    normalize: bool = field(default=False, kw_only=False)
