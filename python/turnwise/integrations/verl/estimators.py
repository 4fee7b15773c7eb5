"""Make verl advantage estimators of turnwise's credit rules."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.credit import Credit, build_rule, credit_columns, registry
from turnwise.integrations.verl.calls import Calls, current_calls

NEEDS_MORE = ("levels", "vine", "gdpo")
"""Rules that need whole trees of episodes, or each reward by itself. verl has rows with one reward each."""

NEEDS_AGENTS = ("at_grpo", "dr_mas", "gigpo", "hierarchy", "rae", "turn_returns")
"""Rules that distinguish agents."""

RULES = tuple(name for name in registry if name not in NEEDS_MORE)

Estimator = Callable[..., tuple[Tensor, Tensor]]

_PADDING_UID = re.compile(r"pad[0-9a-f]{32}")  # of the rows that verl appends to fill a batch


def make_estimator(name: str) -> Estimator:
    """Return the estimator of verl for the credit rule ``name``.

    verl calls it with ``token_level_rewards [B, T]``, ``response_mask [B, T]``, ``index`` (the ``uid`` of each row) and
    ``config`` (``algorithm`` of its configuration). A row's reward is the sum of its tokens' rewards. The estimator
    returns advantages and returns ``[B, T]``, both the rule's advantage of the row, and 0 where the mask is 0.

    Agents, turns, sessions and nodes come from the trainers of ``trainers``. Under verl's own trainers each row is a
    separate attempt by one agent; a rule that distinguishes agents then warns.

    Options of the rule are the keys of ``algorithm.turnwise``, for example ``+algorithm.turnwise.eps=1e-8``.
    ``algorithm.norm_adv_by_std_in_grpo=False`` sets ``scale="none"`` in a rule that has this option.
    """
    rules: dict[str, Credit] = {}  # kept between batches, as a rule may have state

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Sequence[Any] | np.ndarray | None = None,
        config: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        if index is None:
            raise ValueError(f"index=None: expected the uid of each row, as turnwise_{name} compares answers")
        options = _options(name, config)
        rule = rules.get(repr(options))
        if rule is None:
            rule = rules[repr(options)] = build_rule(name, options, "algorithm.adv_estimator", "algorithm.turnwise")
        calls = current_calls()
        if calls is None and name in NEEDS_AGENTS:
            warnings.warn(
                f"turnwise_{name} tells agents apart, and verl's trainer passes no agents to it: every row counts as "
                "an attempt of its own by one agent. Set trainer.v1.trainer_mode=turnwise_sync",
                stacklevel=2,
            )
        advantages = _advantages(rule, token_level_rewards, response_mask, list(index), calls)
        spread = advantages.to(token_level_rewards)[:, None] * response_mask
        return spread, spread.clone()

    estimate.__name__ = estimate.__qualname__ = f"turnwise_{name}"
    return estimate


def _options(name: str, config: Any) -> dict[str, Any]:
    """Return the rule's options from ``algorithm`` of verl's configuration."""
    get = (lambda key, default: default) if config is None else config.get
    given = get("turnwise", None) or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"algorithm.turnwise={given!r}: expected the options of the rule {name!r}")
    options = {str(key): given[key] for key in sorted(given)}
    cls = registry[name]
    has_scale = is_dataclass(cls) and any(field.name == "scale" for field in fields(cls))
    if has_scale and not get("norm_adv_by_std_in_grpo", True) and not {"scale", "normalize"} & set(options):
        options["scale"] = "none"
    return options


def _advantages(rule: Credit, token_rewards: Tensor, mask: Tensor, uids: list[Any], calls: Calls | None) -> Tensor:
    """Return the advantages ``[B]`` float32 of the rows, 0 for rows that verl appended."""
    if calls is None:
        rows = [row for row, uid in enumerate(uids) if not _PADDING_UID.fullmatch(str(uid))]
    else:
        if len(calls.agents) != len(uids):
            raise ValueError(f"index has {len(uids)} rows: expected {len(calls.agents)}, as the trainer's batch has")
        rows = [row for row, padding in enumerate(calls.padding) if not padding]
    rewards = token_rewards.sum(-1).double().cpu().numpy()[rows]
    columns: dict[str, Any] = {
        "questions": [uids[row] for row in rows],
        "lengths": mask.sum(-1).long().cpu().numpy()[rows],
    }
    if calls is not None:
        for key, column in (
            ("actors", calls.agents),
            ("turns", calls.turns),
            ("trajectories", calls.sessions),
            ("nodes", calls.nodes),
        ):
            columns[key] = [column[row] for row in rows]
        wholes = [calls.trajectory_rewards[row] for row in rows]
        columns["trajectory_rewards"] = [
            reward if whole is None else whole for reward, whole in zip(rewards.tolist(), wholes, strict=True)
        ]
        states = [calls.states[row] for row in rows]
        columns["states"] = None if any(state is None for state in states) else states
    advantages = torch.zeros(len(uids))
    advantages[rows] = torch.from_numpy(credit_columns(rule, rewards, **columns))
    return advantages
