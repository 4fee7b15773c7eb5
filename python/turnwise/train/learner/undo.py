"""Takes back an update that failed, so that the step before it can still be saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from turnwise.train.checkpoint.checkpoint import describe_progress, restore_progress
from turnwise.train.model.policy import Policy

MOST_BYTES = 1 << 30
"""Weights and optimizers up to this size are copied before each update."""


class Undo:
    """The state of ``policies`` before an update. Larger ones than :data:`MOST_BYTES` keep no copy of their weights.

    Example::

        undo = Undo(policies)
        try:
            update(policies)
        except BaseException:
            intact = undo.restore()
            raise
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.policies = {name: policy for name, policy in policies.items() if policy.optimizer is not None}
        self._progress = {name: copy.deepcopy(describe_progress(policy)) for name, policy in self.policies.items()}
        self._copies: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] | None = None
        if sum(map(_bytes_of, self.policies.values())) <= MOST_BYTES:
            self._copies = {
                name: ({key: tensor.clone() for key, tensor in policy.saved_weights()}, _copied(policy.optimizer))
                for name, policy in self.policies.items()
            }

    def restore(self) -> bool:
        """Restore everything, and return True; False if weights have changed of which there is no copy."""
        changed = any(
            policy.is_stepping or policy.updates != self._progress[name]["updates"]
            for name, policy in self.policies.items()
        )
        if changed and self._copies is None:
            return False
        for name, policy in self.policies.items():
            assert policy.optimizer is not None
            policy.optimizer.zero_grad(set_to_none=True)
            if changed and self._copies is not None:
                weights, optimizer = self._copies[name]
                with torch.no_grad():
                    for key, tensor in policy.saved_weights():
                        tensor.copy_(weights[key])
                policy.masters.write()
                policy.optimizer.load_state_dict(optimizer)
            policy.is_stepping = False
            restore_progress(policy, self._progress[name])
        return True


def _bytes_of(policy: Policy) -> int:
    """Return the bytes of the trained weights and of AdamW's two moments, of which a new optimizer has none yet."""
    return sum(3 * parameter.nbytes for parameter in policy.trained_parameters())


def _copied(optimizer: Any) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state_dict()
    slots = {
        index: {key: value.clone() if isinstance(value, Tensor) else value for key, value in each.items()}
        for index, each in state["state"].items()
    }
    return {"state": slots, "param_groups": copy.deepcopy(state["param_groups"])}
