"""Dr. MAS: each agent against its own baseline.

    A = (r - mean_k) / (std_k + eps)        k = (question, actor)

over all model calls of actor ``k`` for that question: one called twice counts twice. A shared baseline would let the
agent with the wider rewards set the scale, and the gradient norm, of the others. In the published code a group of one
keeps its raw reward (``singleton="raw"``); here it gets 0 by default. (Feng et al., Dr. MAS,
https://arxiv.org/abs/2602.08847.)
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.credit.base import GroupCredit, Key
from turnwise.types import Sample


@dataclass(kw_only=True)
class DrMASCredit(GroupCredit):
    """Group ``(group_id, actor)``, every row. ``scale="none"`` leaves out the standard deviation."""

    def group_key(self, sample: Sample) -> Key:
        return (sample.group_id, sample.actor)
