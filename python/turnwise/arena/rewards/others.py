"""Rewards that an action in a tree brings to other actors. They belong to those actors' last actions on the same path.

An action in a tree earns what its actor gets at once. What other actors get at once is in
``step.info[PAID_OTHERS]``: the loser's reward for the winner's last move, or that of an agent which chose before this
one and whose choice counts only now. Each branch has its own step, so it holds what that branch pays.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.arena.runtime.tool_rounds import ROUND
from turnwise.samples.ledger import note
from turnwise.types import PAID_LATER, PAID_OTHERS, Step


def pay_others(paths: Sequence[Sequence[Step]]) -> None:
    """Add what the actions of each path pay others to the last actions of these, with ``info[PAID_LATER]``.

    ``paths`` are the model calls up to each end of a tree. A step of several gets the mean. An actor that had not acted
    yet gets nothing.
    """
    owed: dict[int, list[float]] = {}
    steps = {id(step): step for path in paths for step in path if step.facts.env_response is not None}
    for path in paths:
        amounts = {id(step): 0.0 for step in path if id(step) in steps}
        latest: dict[str, int] = {}
        for step in path:
            if id(step) not in steps:
                continue
            for actor, amount in step.info.get(PAID_OTHERS, {}).items():
                if actor in latest:
                    amounts[latest[actor]] += amount
            latest[str(step.actor_id)] = id(step)
        for key, amount in amounts.items():
            owed.setdefault(key, []).append(amount)
    for key, found in owed.items():
        step, amount = steps[key], sum(found) / len(found)
        if not amount or step.reward is None:
            continue
        same_turn = [
            each
            for path in paths
            for each in path
            if ROUND in each.info and (each.actor_id, each.turn) == (step.actor_id, step.turn)
        ]
        step.info[PAID_LATER] = amount
        note(step.facts, "reward", "paid_by_others", step.reward, step.reward + amount)
        step.reward += amount
        for each in same_turn:
            each.reward = step.reward
