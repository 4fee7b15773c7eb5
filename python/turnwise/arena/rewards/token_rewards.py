"""Rewards: one finite number, or one number per token of a completion. Token rewards add up to the reward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnwise.types import Rollout, Step

TOKEN_REWARDS = "token_rewards"
"""Key of ``step.info`` that holds a reward per token, as a list of floats."""


def check_reward(value: Any, where: str) -> float:
    """Return ``value`` as a finite float, else raise ``TypeError`` or ``ValueError``. ``where`` names its origin."""
    if isinstance(value, (str, bytes, bytearray)) or value is None:
        raise TypeError(f"{where}: got {value!r}, expected a number")
    try:
        reward = float(value)
    except OverflowError:
        raise ValueError(f"{where}: the reward is too large, expected a finite number") from None
    except Exception as error:  # a tensor without data raises a RuntimeError
        raise TypeError(f"{where}: got {value!r}, expected a number") from error
    if not math.isfinite(reward):
        raise ValueError(f"{where}: the reward is {reward!r}, expected a finite number")
    return reward


def is_by_token(value: Any) -> bool:
    """True for a sequence, array or tensor: one number per token."""
    if value is None or isinstance(value, (float, int, str, bytes, bytearray)):
        return False
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def sum_tokens(value: Any, step: Step, where: str) -> tuple[float, list[float]]:
    """Return the sum of ``value`` over the tokens of ``step`` that train, and ``value`` as a list.

    ``value`` has one finite number for each completion token. Tokens that ``step.info["loss_mask"]`` masks add nothing.
    Raises ``ValueError`` or ``TypeError`` with a message that begins with ``where``.
    """
    import torch  # imported late, because an arena without token rewards does not need it

    from turnwise.ops import token_reward_sum

    given = value.tolist() if hasattr(value, "tolist") else list(value)
    count = len(step.completion_token_ids)
    if len(given) != count:
        raise ValueError(
            f"{where}: got {len(given)} rewards by token, expected a number, or one for each of the {count} tokens of "
            "the completion"
        )
    rewards = [check_reward(reward, f"{where}, token {index}") for index, reward in enumerate(given)]
    # Apply the loss mask, if any.
    mask = step.info.get("loss_mask")
    if mask is not None:
        mask = torch.as_tensor([float(trains) for trains in mask])[None]
        if mask.shape[1] != count:
            raise ValueError(f"{where}: loss_mask has {mask.shape[1]} entries, expected one for each of {count} tokens")
    # Only the reference backend adds up float64, so use it despite other settings.
    total = token_reward_sum(torch.tensor([rewards], dtype=torch.float64), mask=mask, backend="torch")
    return check_reward(total, f"{where}, the sum over its tokens"), rewards


def set_reward(step: Step, value: Any, where: str) -> None:
    """Make ``value``, a number or one for each token, the reward of ``step``."""
    if is_by_token(value):
        step.reward, step.info[TOKEN_REWARDS] = sum_tokens(value, step, where)
    else:
        step.reward = check_reward(value, where)
        step.info.pop(TOKEN_REWARDS, None)


def settle_steps(rollout: Rollout) -> None:
    """Make floats of the rewards that an episode or a reward function set on steps of ``rollout``, also by token."""
    for index, step in enumerate(rollout.steps):
        if type(step.reward) not in _SINGLE:
            where = f"reward of step {index} (actor {step.actor_id!r}) of rollout {rollout.id!r}"
            where = f"{where}, episode type {rollout.episode_type!r}"
            if is_by_token(step.reward):
                set_reward(step, step.reward, where)
            else:
                step.reward = check_reward(step.reward, where)


_SINGLE = frozenset({type(None), float})


def reward_of(value: Any, actor: str, rollout: Rollout, where: str) -> tuple[float, list[float] | None]:
    """Return a reward function's value for one actor as a sum, and its token rewards or ``None``."""
    if not is_by_token(value):
        return check_reward(value, where), None
    steps = _steps_of(rollout, actor)
    if len(steps) != 1:
        raise ValueError(
            f"{where}: got rewards by token, and the actor has {len(steps)} model calls here: expected a number. Only "
            "where there is one call is it known which is meant; else set step.reward, as step_reward does"
        )
    return sum_tokens(value, steps[0], where)


def keep_tokens(rollout: Rollout, by_actor: Mapping[str, Sequence[float]]) -> None:
    """Add token rewards of :func:`reward_of` to the steps.

    A step is skipped if it has its own reward, or if it led to several ends.
    """
    for actor, rewards in by_actor.items():
        for step in _steps_of(rollout, actor):
            if step.reward is None and len(step.info.get("ends", ())) < 2:
                step.info[TOKEN_REWARDS] = add_tokens(step.info.get(TOKEN_REWARDS), rewards)


def add_tokens(one: Iterable[float] | None, other: Sequence[float], weight: float = 1.0) -> list[float]:
    """Return ``one + weight * other``, token by token; ``None`` counts as zeros."""
    weighted = [weight * reward for reward in other]
    return weighted if one is None else [a + b for a, b in zip(one, weighted, strict=True)]


def _steps_of(rollout: Rollout, actor: str) -> list[Step]:
    return [step for step in rollout.steps if step.actor_id == actor]


def check_rewarded(rollout: Rollout) -> None:
    """Raise ``ValueError`` for a trainable step without a reward. It fails one episode, and later the whole batch."""
    for step in rollout.steps:
        if step.trainable and step.reward is None and step.actor_id not in rollout.rewards_of(step):
            raise ValueError(
                f"actor {step.actor_id!r} of episode {rollout.episode_type!r} acted and has no reward: the rubric "
                f"rewards {sorted(rollout.rewards_of(step))}, and the step has no reward"
            )
