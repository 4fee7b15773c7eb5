"""Actions on an unhealthy run: one class per action, found by name in :data:`ACTIONS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from turnwise.train.callbacks import TrainerView
from turnwise.train.checkpoint.checkpoint import checkpoint_at, list_checkpoints
from turnwise.train.league.league import League


class Action(ABC):
    """An action on an unhealthy run; its fields are the options of the configuration."""

    @abstractmethod
    async def apply(self, trainer: TrainerView, healthy_step: int | None) -> str:
        """Apply the action between two steps, and describe it. ``healthy_step`` is the step of the last healthy
        checkpoint."""


@dataclass(frozen=True, slots=True)
class IncreaseLeagueShare(Action):
    """Raise the share of games against past policies by ``by``, up to ``most`` of all games."""

    by: float = 0.1
    most: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.by <= 1 or not 0 < self.most <= 1:
            raise ValueError(f"by={self.by!r}, most={self.most!r}: expected shares above 0")

    async def apply(self, trainer: TrainerView, healthy_step: int | None) -> str:
        league = trainer.callbacks["league"]
        assert isinstance(league, League)
        league.raised = max(league.raised, min(league.raised + self.by, self.most - league.config.share))
        return f"{league.share:.0%} of the games are against past policies now"


@dataclass(frozen=True, slots=True)
class LowerLearningRate(Action):
    """Multiply the learning rate of every trained policy by ``factor``, for the rest of the run."""

    factor: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ValueError(f"factor={self.factor!r}: expected a number in (0, 1)")

    async def apply(self, trainer: TrainerView, healthy_step: int | None) -> str:
        for name, policy in trainer.policies.items():
            if policy.trainable:
                trainer.learner.scale_rate(name, self.factor)
        return f"learning rates are {self.factor:g} of what they were"


@dataclass(frozen=True, slots=True)
class RestoreCheckpoint(Action):
    """Restore weights, optimizers and the credit rule's baselines from the last healthy checkpoint.

    Steps, questions and random generators continue, or the same failure would repeat. Versions and lowered learning
    rates continue as well.
    """

    async def apply(self, trainer: TrainerView, healthy_step: int | None) -> str:
        trainer.learner.finish_saving()
        path = None if healthy_step is None else checkpoint_at(trainer.checkpoints, healthy_step)
        if path is None or path not in list_checkpoints(trainer.checkpoints):
            return "there is no healthy checkpoint to go back to"
        # Load the checkpoint, but keep lowered rates, and count versions up so that the client gets the weights.
        now = {name: (policy.version, policy.rate_scale) for name, policy in trainer.policies.items()}
        _, state = trainer.learner.load(path, generators=False)
        for name, policy in trainer.policies.items():
            version, scale = now[name]
            trainer.learner.scale_rate(name, scale / policy.rate_scale)
            policy.version = version + 1 if policy.trainable else version
        if trainer.arena.credit is not None and state["arena"]["credit"] is not None:
            trainer.arena.credit.load_state_dict(state["arena"]["credit"])
        await trainer.sync_weights()
        return f"weights and optimizers are those of step {healthy_step}"


ACTIONS: dict[str, type[Action]] = {
    "increase_league_share": IncreaseLeagueShare,
    "lower_learning_rate": LowerLearningRate,
    "restore_checkpoint": RestoreCheckpoint,
}
"""Actions by their names in ``health.signals.<name>.actions``."""
