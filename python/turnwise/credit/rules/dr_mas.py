"""Dr. MAS: compares each agent with its own baseline.

    A = (r - mean_k) / (std_k + eps)        k = (question, actor)

over all model calls of the actor for that question; an actor called twice counts twice. So an attempt with many calls
moves the baseline more than one with few. If the failed attempts are the long ones, the baseline is near their reward,
and successes get larger advantages. With ``per="attempt"`` each attempt counts once. With a shared baseline, the agent
with the widest rewards would set the scale, and the gradient norm, of the others. In the published code a group of one
keeps its raw reward (``singleton="raw"``); here it gets 0 by default. (Feng et al., Dr. MAS,
https://arxiv.org/abs/2602.08847.)
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.credit.base import GroupCredit, Key
from turnwise.types import Sample


@dataclass(kw_only=True)
class DrMASCredit(GroupCredit):
    """Compares rows in groups ``(group_id, actor)``. ``scale="none"`` leaves out the standard deviation.

    ``per`` is what counts once in a group: each ``"call"``, or each ``"attempt"``, by the mean of the actor's calls.
    """

    per: str = "call"

    def __post_init__(self) -> None:
        if self.per not in ("call", "attempt"):
            raise ValueError(f"per={self.per!r}: expected 'call' or 'attempt'")
        super().__post_init__()

    def group_key(self, sample: Sample) -> Key:
        return (sample.group_id, sample.actor)

    def unit_key(self, sample: Sample) -> Key | None:
        return (sample.trajectory_key, sample.actor) if self.per == "attempt" else None
