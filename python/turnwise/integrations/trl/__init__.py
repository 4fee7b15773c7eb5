"""TRL's ``GRPOTrainer`` with turnwise's forward pass, fused loss and credit rules.

Read in this order: rows, loss, trainer.
May import: types, utils, ops, credit, train.model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.integrations.trl.trainer import TurnwiseGRPOMixin, TurnwiseGRPOTrainer

__all__ = ["TurnwiseGRPOMixin", "TurnwiseGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnwise.integrations.trl import trainer

    return getattr(trainer, name)
