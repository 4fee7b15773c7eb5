"""Describe each model call of an agent loop, and hand the descriptions of a batch to the estimator.

An agent loop of verl returns one ``AgentLoopOutput`` per model call. verl's estimators see neither who made a call nor
its own reward: every call of a session gets the reward of the last one. :func:`call_fields` puts both into the output's
``extra_fields``, and the trainers of ``trainers`` carry them to the credit rule.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

FIELD = "turnwise"
"""The key in ``AgentLoopOutput.extra_fields``."""


def call_fields(
    agent: str,
    *,
    turn: int = 0,
    reward: float | None = None,
    trajectory_reward: float | None = None,
    node: int | None = None,
    state: Hashable = None,
) -> dict[str, Any]:
    """Return the ``extra_fields`` of one ``AgentLoopOutput``.

    - ``agent``: the agent that made the call.
    - ``turn``: the number of the agent's call in its session, from 0.
    - ``reward``: the call's own reward. It replaces the session's, which verl gives to every call; ``None`` keeps that.
    - ``trajectory_reward``: the session's reward for this agent, for ``turnwise_rae``, ``turnwise_hierarchy`` and
      ``turnwise_episodic``. By default the call's reward.
    - ``node``: the tree node that the call and its siblings branch from; ``None`` outside a tree.
    - ``state``: the state in which the call was made, which ``turnwise_gigpo`` needs.

    The result also has an empty ``reward_extra_info``, which verl reads from the last output of a session.

    Raises ``ValueError`` that names an argument of the wrong kind.

    Example: ``AgentLoopOutput(..., reward_score=0.0, extra_fields=call_fields("solver", turn=0, reward=1.0))``
    """
    if not isinstance(agent, str) or not agent:
        raise ValueError(f"agent={agent!r}: expected a name")
    if not _is_whole(turn) or turn < 0:
        raise ValueError(f"turn={turn!r}: expected a whole number >= 0")
    if node is not None and not _is_whole(node):
        raise ValueError(f"node={node!r}: expected a whole number or None")
    for name, value in (("reward", reward), ("trajectory_reward", trajectory_reward)):
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ValueError(f"{name}={value!r}: expected a finite number or None")
    call = {"agent": agent, "turn": turn, "node": node, "state": state}
    rewards = {"reward": reward, "trajectory_reward": trajectory_reward}
    return {FIELD: call | rewards, "reward_extra_info": {}}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Calls:
    """The calls of a batch, one entry per row, in the order in which verl gives the rows to the estimator.

    ``padding`` marks the rows that verl appended to fill the batch; no rule sees them.
    """

    sessions: Sequence[Hashable]
    agents: Sequence[str]
    turns: Sequence[int]
    nodes: Sequence[int | None]
    states: Sequence[Hashable]
    trajectory_rewards: Sequence[float | None]
    padding: Sequence[bool]


_calls: ContextVar[Calls | None] = ContextVar("turnwise_verl_calls", default=None)


@contextmanager
def calls_of_batch(calls: Calls) -> Iterator[None]:
    """Make ``calls`` those of the batch whose advantages verl computes in this block."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


def current_calls() -> Calls | None:
    """Return the calls of the batch, or ``None`` if verl's own trainer runs."""
    return _calls.get()
