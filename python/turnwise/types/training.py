"""What the trainer sees: samples, batches, and the rules that turn rewards into advantages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from turnwise.types.model_calls import FinishReason, PolicyVersions
from turnwise.types.play import GenerateResult


@dataclass(slots=True)
class Sample:
    """One trainable model call. ``uid`` names the question, ``trajectory`` the rollout, ``parent_node`` the rollout
    that spawned it (``None`` at the top), ``parent`` the tree node that its siblings grew from. ``reward`` is the
    step's own where ``scored``, else the rollout's; ``info`` is the step's; ``top`` is the result at the top of its
    tree of episodes.

    Example: ``Sample(uid="puzzle-5", episode_type="sudoku", actor="proposer", turn=0, branch=3, parent=0,
    trajectory="r-17", step_index=3, policy="default", prompt_token_ids=[1, 17, 9], completion_token_ids=[20, 2],
    rollout_logprobs=[-0.1, -0.01], policy_versions=[(2, 7)], reward=1.25, trajectory_reward=1.0)``
    """

    uid: Hashable
    episode_type: str
    actor: str
    turn: int
    branch: int
    parent: int | None
    trajectory: str
    step_index: int
    policy: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    rollout_logprobs: list[float]
    policy_versions: PolicyVersions
    reward: float
    trajectory_reward: float
    advantage: float | None = None
    finish_reason: FinishReason = "stop"
    loss_mask: list[int] | None = None
    temperature: float = 1.0
    parent_node: str | None = None
    group: tuple[Hashable, ...] | None = None
    scored: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)
    top: GenerateResult | None = field(default=None, repr=False, compare=False)

    @property
    def play(self) -> tuple[str, int | None]:
        """The trajectory as rules compare it: the rollout, and the end that the step alone led to where it has several
        (``Step.info["ends"]``)."""
        ends = self.info.get("ends", ())
        return (self.trajectory, ends[0] if len(ends) == 1 else None)


@dataclass(slots=True)
class TrainingBatch:
    """Many samples, packed column by column: prompt and completion of each sample stand one after the other.

    ``token_ids [N]`` int64, ``cu_seqlens [B+1]`` int64, ``loss_mask [N]`` uint8 (1 on the completion tokens that
    train), ``rollout_logprobs [N]`` float32 (0 on prompts), ``advantages [B]`` float32, ``rewards [B]`` float32,
    ``temperatures [B]`` float32, ``actor_index [B]`` and ``policy_index [B]`` int64 into ``actors`` and ``policies``,
    ``min_version [B]`` int64, the oldest policy version that sampled a token of the row. ``drops`` counts the model
    calls that don't train, by ``(actor, cause)``; ``metrics`` describe the whole step.

    Example: two samples of 5 and 4 tokens have ``cu_seqlens == [0, 5, 9]``.
    """

    token_ids: np.ndarray
    cu_seqlens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    temperatures: np.ndarray
    actor_index: np.ndarray
    policy_index: np.ndarray
    min_version: np.ndarray
    actors: list[str]
    policies: list[str]
    drops: dict[tuple[str, str], int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def dropped(self) -> dict[str, int]:
        """How many model calls don't train, by cause: with the rows they are all calls of actors in the step."""
        counts: dict[str, int] = {}
        for (_, cause), count in self.drops.items():
            counts[cause] = counts.get(cause, 0) + count
        return counts


class CreditAssigner(Protocol):
    """Turns rewards into advantages; one rule is one file under ``turnwise/credit``."""

    def compute(self, results: Sequence[GenerateResult]) -> dict[tuple[str, int], float]:
        """``(rollout id, step index) -> advantage`` for every trainable step of ``results`` and their children."""
        ...

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Advantages ``[B]`` float32 of ``samples``, in their order. May update the rule's own state."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


RewardFunction = Callable[..., "Mapping[str, Any] | float | Sequence[Any] | Awaitable[Any]"]
"""A reward function names the arguments it wants, for example ``def f(extras, artifact) -> dict[str, float]``."""
