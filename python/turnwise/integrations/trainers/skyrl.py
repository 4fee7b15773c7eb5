"""Credit rules and policy losses in SkyRL's registries (https://github.com/NovaSky-AI/SkyRL), tested with SkyRL 0.3.0.

SkyRL calls an estimator with token rewards, a mask and ``index``, the uid of each row. So a row's agent and turn can
only be part of its uid: see :func:`make_uid`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise import ops
from turnwise.credit import Credit, credit_columns
from turnwise.integrations.trainers import import_from, make_rule
from turnwise.utils.registry import did_you_mean

_UID = re.compile(
    r"(?P<question>.*)#agent=(?P<agent>[^#]*)#turn=(?P<turn>\d+)(#attempt=(?P<attempt>\d+))?", flags=re.DOTALL
)
_PADDING = re.compile(r"pad\d+")
"""The uids of rows that SkyRL adds to fill the last batch."""


def make_uid(question: str, agent: str, turn: int = 0) -> str:
    """Return the uid of a row that an agent produced: SkyRL's ``TrajectoryID.instance_id``.

    Rows with equal uids are one group of SkyRL, and must lie side by side. ``turn`` is the number of the agent's call
    in its trajectory. Raises ``ValueError`` for a ``#`` in ``agent``.

    Example: ``make_uid("7", "solver") == "7#agent=solver#turn=0"``
    """
    if "#" in agent:
        raise ValueError(f"agent={agent!r}: expected a name without '#'")
    return f"{question}#agent={agent}#turn={int(turn)}"


# ---------------------------------------------------------------------------------------------------------------------
# Advantages
# ---------------------------------------------------------------------------------------------------------------------
def register_credit(rule: Credit | str, name: str | None = None, **options: Any) -> str:
    """Register ``rule`` with SkyRL and return its name there, by default ``turnwise_<rule>``.

    ``rule`` is a name in ``turnwise.credit.registry``, built with ``options``, or a rule. Use the result as
    ``trainer.algorithm.advantage_estimator``. A rule with baselines (``"rae"``) keeps them as long as the process
    lives.

    Raises ``ModuleNotFoundError`` without SkyRL, and ``ValueError`` for a name that is taken and a rule that needs more
    than rewards, questions, agents, turns and lengths (``"gigpo"``, ``"levels"``, ``"vine"``).

    Example: ``register_credit("dr_mas", singleton="raw")``
    """
    registry = _host().AdvantageEstimatorRegistry
    assigner, name = make_rule(rule, name, options)
    registry.register(name, CreditEstimator(assigner))
    return name


@dataclass(frozen=True)
class CreditEstimator:
    """An advantage estimator with SkyRL's signature. It is an object, not a closure, as SkyRL pickles it for Ray.

    ``token_level_rewards [B, T]`` float, ``response_mask [B, T]`` and ``index``, the ``B`` uids, give ``(advantages,
    advantages)``, each ``[B, T]`` in the type of the rewards and 0 where masked. A row's reward is the sum over its
    tokens. Rows that SkyRL added as padding get 0 and count in no group or baseline.
    """

    rule: Credit

    def __call__(
        self, token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], **_: Any
    ) -> tuple[Tensor, Tensor]:
        rows = [row for row, uid in enumerate(index) if not _PADDING.fullmatch(str(uid))]
        uids = [_UID.fullmatch(str(index[row])) for row in rows]
        advantages = np.zeros(len(index), dtype=np.float32)
        advantages[rows] = credit_columns(
            self.rule,
            token_level_rewards.sum(dim=-1).double().cpu().numpy()[rows],
            questions=[uid["question"] if uid else str(index[row]) for row, uid in zip(rows, uids, strict=True)],
            actors=[uid["agent"] if uid else "agent" for uid in uids],
            turns=[int(uid["turn"]) if uid else 0 for uid in uids],
            # Without the number of the attempt, each row is an attempt of its own.
            trajectories=[
                (uid["question"], uid["attempt"]) if uid and uid["attempt"] else row
                for row, uid in zip(rows, uids, strict=True)
            ],
            lengths=response_mask.sum(dim=-1).int()[rows].tolist(),
        )
        spread = torch.from_numpy(advantages).to(token_level_rewards)[:, None] * response_mask
        return spread, spread


class AgentUids:
    """Mixin of SkyRL's trainers for batches whose uids are those of :func:`make_uid`.

    SkyRL counts distinct uids and expects ``train_batch_size`` of them. With the mixin it counts questions, whose rows
    must lie side by side. The estimator gets the whole uids, and ``TrajectoryID.repetition_id`` as the attempt in which
    the row's call was made.

    Example: ``class Trainer(AgentUids, RayPPOTrainer): ...``, which ``BasePPOExp.get_trainer`` returns
    """

    def convert_to_training_input(self, generator_output: Any, uids: Sequence[str]) -> Any:
        matches = [_UID.fullmatch(uid) for uid in uids]
        questions = [each["question"] if each else uid for each, uid in zip(matches, uids, strict=True)]
        batch = super().convert_to_training_input(generator_output, questions)  # type: ignore[misc]
        if any(matches):
            ids = generator_output["trajectory_ids"]
            uids = [
                f"{uid}#attempt={at.repetition_id}" if each else uid
                for each, uid, at in zip(matches, uids, ids, strict=True)
            ]
        batch.metadata["uids"] = [*uids, *batch.metadata["uids"][len(uids) :]]  # rows of padding follow
        return batch


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------
LOSSES: dict[str, Callable[[Any], ops.Variant]] = {
    "regular": lambda config: ops.Clip(config.eps_clip_low, config.eps_clip_high),
    "dual_clip": lambda config: ops.Clip(config.eps_clip_low, config.eps_clip_high, config.clip_ratio_c),
    "gspo": lambda config: ops.GSPO(config.eps_clip_low, config.eps_clip_high),
    "cispo": lambda config: ops.CISPO(config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high),
    "sapo": lambda config: ops.SAPO(config.sapo.tau_pos, config.sapo.tau_neg),
}
"""SkyRL's own losses by name, with the settings that SkyRL gives them (``trainer.algorithm``)."""


def register_loss(loss: str | ops.Variant, name: str | None = None) -> str:
    """Register a policy loss with SkyRL and return its name there, by default ``turnwise_<loss>``.

    ``loss`` is a name in :data:`LOSSES`, which reads SkyRL's settings, or a variant of ``turnwise.ops`` with its own
    settings. Use the result as ``trainer.algorithm.policy_loss_type``, but not in fully async training, which has no
    old log-probabilities: SkyRL checks that only for its own losses.

    Raises ``ModuleNotFoundError`` without SkyRL, and ``ValueError`` for a name that is unknown or taken, for
    ``ClipCov`` and ``KLCov``, which compare a token with those of other micro-batches, and for a loss that is not
    proportional to the advantage.

    Example: ``register_loss("regular")``, ``register_loss(turnwise.ops.GMPO(), "gmpo")``
    """
    registry = _host().PolicyLossRegistry
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(f"loss={loss!r}: {did_you_mean(loss, LOSSES)}")
    elif not isinstance(loss, ops.Variant):
        raise TypeError(f"loss={loss!r}: expected a name or a variant of turnwise.ops")
    elif loss.selects:
        raise ValueError(f"loss={loss!r}: expected a variant that does not compare tokens of the whole step")
    elif not _is_proportional(loss):
        raise ValueError(
            f"loss={loss!r}: expected a loss proportional to the advantage, as SkyRL averages by scaling advantages"
        )
    elif name is None:
        raise ValueError(f"name=None: expected the name to register {type(loss).__name__} by")
    name = name or f"turnwise_{loss}"
    registry.register(name, LossFunction(loss))
    return name


@dataclass(frozen=True)
class LossFunction:
    """A policy loss with SkyRL's signature: a name in :data:`LOSSES` or a variant.

    All streams are ``[B, T]``. The result is the sum of the token losses, as SkyRL has scaled the advantages by
    ``loss_reduction`` before, and the metrics that SkyRL's own losses log. SkyRL's off-policy correction multiplies the
    advantages instead of the losses, which are proportional to them. ``clip_ratio`` then leaves out the tokens that the
    correction dropped.
    """

    loss: str | ops.Variant

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
        # The correction weighs a loss of ones, and its mask becomes a weight too: GSPO's ratio needs all tokens.
        weights, kept, corrections = _host().apply_off_policy_correction(
            torch.ones_like(log_probs), old_log_probs, rollout_logprobs, mask, config.off_policy_correction
        )
        weighted = advantages * torch.where((mask != 0) & (kept != 0), weights, 0.0)
        variant = LOSSES[self.loss](config) if isinstance(self.loss, str) else self.loss
        result = ops.policy_loss(log_probs, old_log_probs, weighted, mask=mask, variant=variant, normalizer=1.0)
        clipped = result.metrics["clip_fraction_low"] + result.metrics["clip_fraction_high"]
        return result.loss, {"clip_ratio": clipped.item(), **corrections}


def _is_proportional(variant: ops.Variant) -> bool:
    old, new = torch.full((2, 2), -1.0), torch.tensor([[-1.3, -0.2], [-0.9, -1.1]])
    losses = [ops.policy_loss(new, old, scale * torch.tensor([1.0, -1.0]), variant=variant).loss for scale in (1, 4)]
    return torch.allclose(4 * losses[0], losses[1])


def _host() -> Any:
    return import_from("skyrl.backends.skyrl_train.utils.ppo_utils", "SkyRL", "pip install 'skyrl[skyrl-train]'")
