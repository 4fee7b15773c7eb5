"""Apply a credit rule to the columns of another trainer's batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.credit.base import Credit, GroupCredit, build_rule
from turnwise.credit.rules.gdpo import GDPOCredit
from turnwise.credit.rules.gigpo import GiGPOCredit
from turnwise.types import CreditCapabilities, Sample, capabilities_of


def credit_columns(
    rule: Credit | str,
    rewards: Sequence[float] | np.ndarray,
    *,
    questions: Sequence[Hashable],
    actors: Sequence[str] | None = None,
    turns: Sequence[int] | None = None,
    trajectories: Sequence[Hashable] | None = None,
    nodes: Sequence[int | None] | None = None,
    trajectory_rewards: Sequence[float] | np.ndarray | None = None,
    states: Sequence[Hashable] | None = None,
    lengths: Sequence[int] | None = None,
    components: Mapping[str, Sequence[float] | np.ndarray] | None = None,
    options: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Return advantages ``[B]`` float32 of ``B`` model calls, computed by ``rule`` from a trainer's own columns.

    ``rule`` is a rule or its name in ``turnwise.credit.registry``, built with ``options``. Pass an object to a rule
    with state (RAE) and keep it between batches. Each column has one entry per model call:

    - ``rewards``: the call's reward. A rule that compares trajectories takes the mean over a trajectory's calls.
    - ``questions``: the question's id; the attempts at one question share it.
    - ``actors``: the agent that made the call. By default one agent, ``"actor"``.
    - ``turns``: the number of the agent's call in its trajectory, from 0. By default all 0.
    - ``trajectories``: the attempt's id. By default each row is one attempt.
    - ``nodes``: the tree node that the call and its siblings branch from; ``None`` outside a tree.
    - ``trajectory_rewards``: the attempt's reward for this actor, for rules that compare whole attempts (``"rae"``,
      ``"hierarchy"``, ``"episodic"``). By default ``rewards``.
    - ``states``: the state in which the call was made, which ``"gigpo"`` needs.
    - ``lengths``: completion tokens, which ``"opo"`` needs.
    - ``components``: a column for each of the rewards by name, which ``"gdpo"`` needs. It reads them instead of
      ``rewards``.

    Raises ``ValueError`` that names a column of another length, a reward that is not finite, and a rule that needs more
    than columns (``"levels"``, ``"vine"``).

    Example: ``credit_columns("dr_mas", [1, 0, 0, 1], questions=[7, 7, 7, 7], actors=["solver", "verifier"] * 2)``
    """
    if options and not isinstance(rule, str):
        raise ValueError(f"options={dict(options)!r}: expected None, as rule is {rule!r} and not a name")
    assigner = build_rule(rule, dict(options or {}), "rule", "options") if isinstance(rule, str) else rule
    name = type(assigner).__name__
    can = capabilities_of(assigner, CreditCapabilities)
    if can.values_of_states or can.whole_episodes:
        raise ValueError(f"rule={name}: it needs whole trees of episodes; expected a rule that needs only columns")
    if lengths is None and isinstance(assigner, GroupCredit) and assigner.center == "length_weighted":
        raise ValueError(f"lengths=None: {name} weighs rewards by completion tokens; pass one number per row")
    if states is None and isinstance(assigner, GiGPOCredit):
        raise ValueError(f"states=None: {name} compares calls made in one state; pass one hashable per row")
    if components is None and isinstance(assigner, GDPOCredit):
        raise ValueError(f"components=None: {name} normalises each reward by itself; pass a column for each by name")
    values = _numbers("rewards", rewards)
    wholes = values if trajectory_rewards is None else _numbers("trajectory_rewards", trajectory_rewards)
    count = len(values)
    columns: dict[str, Sequence[Any]] = {
        "trajectory_rewards": wholes.tolist(),
        "states": [None] * count if states is None else states,
        "questions": questions,
        "actors": ["actor"] * count if actors is None else actors,
        "turns": [0] * count if turns is None else turns,
        "trajectories": range(count) if trajectories is None else trajectories,
        "nodes": [None] * count if nodes is None else nodes,
        "lengths": [1] * count if lengths is None else lengths,
    }
    for key, column in columns.items():
        if len(column) != count:
            raise ValueError(f"{key}: has {len(column)} entries, and rewards has {count}; expected one per row")
    parts = {key: _numbers(f"components[{key!r}]", column) for key, column in (components or {}).items()}
    for key, part in parts.items():
        if len(part) != count:
            raise ValueError(f"components[{key!r}]: has {len(part)} entries, and rewards has {count}")
    names: dict[Hashable, str] = {}  # a trajectory may be any hashable, and a rollout's id is text
    samples = [
        Sample(
            group_id=question,
            episode_type="episode",
            actor=str(actor),
            turn=int(turn),
            branch=0 if node is None else row,
            tree_node=None if node is None else int(node),
            rollout_id=names.setdefault(trajectory, str(len(names))),
            step_index=row,
            policy="default",
            prompt_token_ids=[],
            completion_token_ids=range(int(length)),  # type: ignore[arg-type]  # only its length counts
            rollout_logprobs=[],
            policy_versions=[],
            reward=reward,
            trajectory_reward=whole,
            info=({} if states is None else {"state": state})
            | ({} if components is None else {"rewards": {key: float(part[row]) for key, part in parts.items()}}),
        )
        for row, (reward, whole, state, question, actor, turn, trajectory, node, length) in enumerate(
            zip(values.tolist(), *columns.values(), strict=True)
        )
    ]
    return np.asarray(assigner.compute_columns(samples), dtype=np.float32)


def needs_several_attempts(rule: Any) -> bool:
    """Return True if ``rule`` gives only advantages of 0 where each question has one attempt, in a batch of several.

    A copy of it is tried on four questions with different rewards. A rule that can't be tried like that counts as
    False.
    """
    rewards = np.repeat([0.0, 0.25, 0.5, 1.0], 3)
    questions = np.repeat(range(4), 3).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rules say themselves that nothing is compared
        try:
            advantages = credit_columns(
                copy.deepcopy(rule),
                rewards,
                questions=questions,
                actors=["a", "b", "a"] * 4,
                turns=[0, 0, 1] * 4,
                trajectories=questions,
                states=range(12),
                components={"reward": rewards},
            )
        except Exception:  # a rule may need more than columns, or a larger group
            return False
    return not advantages.any()


def _numbers(name: str, column: Sequence[float] | np.ndarray) -> np.ndarray:
    values = np.asarray(column, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(
            f"{name}: expected [B] finite numbers, got shape {values.shape} or a number that is not finite"
        )
    return values
