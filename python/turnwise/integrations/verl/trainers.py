"""verl's trainers, with the agent, turn, session and node of each model call passed to the credit rule.

Importing this module registers them with verl.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)

from turnwise.integrations.verl.calls import FIELD, Calls, calls_of_batch


class _CarriesCalls:
    """Mixin that reads ``call_fields`` of a batch from TransferQueue before verl computes its advantages.

    verl compares ``trainer.v1.trainer_mode`` with the names of its own modes, so ``mode`` replaces the name there.
    """

    mode: str
    config: Any

    def __init__(self, config: Any) -> None:
        config.trainer.v1.trainer_mode = self.mode
        super().__init__(config)  # type: ignore[call-arg]  # of verl's trainer

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        estimator = str(self.config.algorithm.adv_estimator)
        if not estimator.startswith("turnwise_"):
            raise ValueError(
                f"algorithm.adv_estimator={estimator!r}: expected one of turnwise's, as "
                f"trainer.v1.trainer_mode=turnwise_{self.mode} passes agents to those alone"
            )
        with calls_of_batch(read_calls(batch)):
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]


def read_calls(batch: Any) -> Calls:
    """Return the calls of ``batch``, a ``KVBatchMeta``, and write their own rewards into its ``rm_scores``.

    Everything that follows in verl then reads the calls' own rewards: the KL penalty in the reward, the credit rule and
    the metrics. Raises ``ValueError`` that names a row without ``call_fields``.
    """
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields", "responses", "rm_scores"]
    )
    padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
    calls: list[dict[str, Any]] = []
    column = data["extra_fields"]  # a list or a NonTensorStack, by TransferQueue's storage
    for key, fields in zip(batch.keys, column.tolist() if hasattr(column, "tolist") else column, strict=True):
        if not isinstance(fields, dict) or FIELD not in fields:
            raise ValueError(
                f"extra_fields of {key!r} has no {FIELD!r}: expected extra_fields=call_fields(agent, ...) in every "
                "AgentLoopOutput. A loop with one agent can use trainer.v1.trainer_mode=sync"
            )
        calls.append(fields[FIELD])

    rows = [row for row, call in enumerate(calls) if call["reward"] is not None and not padding[row]]
    if rows:
        scores = [row.clone() for row in data["rm_scores"].unbind()]
        for row in rows:
            scores[row].zero_()
            scores[row][-1] = calls[row]["reward"]
        nested = torch.nested.as_nested_tensor(scores, layout=torch.jagged)
        tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict({"rm_scores": nested}, batch_size=len(scores)),
        )
    return Calls(
        sessions=[key.rpartition("_")[0] for key in batch.keys],  # a key is {uid}_{session}_{output}
        agents=[call["agent"] for call in calls],
        turns=[call["turn"] for call in calls],
        nodes=[call["node"] for call in calls],
        states=[call["state"] for call in calls],
        trajectory_rewards=[call["trajectory_reward"] for call in calls],
        padding=padding,
    )


@register_trainer("turnwise_sync")
class TurnwiseTrainerSync(_CarriesCalls, PPOTrainerSync):
    """verl's ``sync`` trainer, with the agents passed to the credit rule."""

    mode = "sync"


@register_trainer("turnwise_colocate_async")
class TurnwiseTrainerColocateAsync(_CarriesCalls, PPOTrainerColocateAsync):
    """verl's ``colocate_async`` trainer, with the agents passed to the credit rule."""

    mode = "colocate_async"


@register_trainer("turnwise_separate_async")
class TurnwiseTrainerSeparateAsync(_CarriesCalls, PPOTrainerSeparateAsync):
    """verl's ``separate_async`` trainer, with the agents passed to the credit rule."""

    mode = "separate_async"
