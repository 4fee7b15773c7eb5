"""Dr. GRPO: GRPO without the division by the standard deviation.

    A_i = R_i - mean(R)

The division gives questions that are almost always solved, or almost never, more weight than those in between. (Liu et
al., https://arxiv.org/abs/2503.20783.) The other half of the method is the loss, a sum over tokens divided by a
constant: ``loss.aggregation = "seq-mean-token-sum-norm"``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.credit.grpo import GRPOCredit


@dataclass(kw_only=True)
class DrGRPOCredit(GRPOCredit):
    """Group ``(uid,)``, one value per trajectory; ``hierarchy`` as in :class:`GRPOCredit`."""

    normalize: bool = field(default=False, kw_only=False)
