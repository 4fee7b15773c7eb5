"""The trainer's inputs: samples, batches, and the rules that turn rewards into advantages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from turnwise.types.columns import Column
from turnwise.types.facts import StepFacts
from turnwise.types.model_calls import FinishReason, PolicyVersions
from turnwise.types.play import GenerateResult, Step
from turnwise.types.prompts import NO_TOKENS, Prefix, begins, prompt_tokens, shares


@shares("prompt_token_ids")
@dataclass(slots=True)
class Sample:
    """One trainable model call, the input of the trainer and the credit rules.

    Example: ``Sample(group_id="puzzle-5", episode_type="sudoku", actor="proposer", turn=0, branch=3, tree_node=0,
    rollout_id="r-17", step_index=3, policy="default", prompt_token_ids=[1, 17, 9], completion_token_ids=[20, 2],
    rollout_logprobs=[-0.1, -0.01], policy_versions=[(2, 7)], reward=1.25, trajectory_reward=1.0)``
    """

    group_id: Hashable
    """Identifies the question; its rollouts share it."""
    episode_type: str
    actor: str
    turn: int
    branch: int
    tree_node: int | None
    """The tree node that this call and its siblings branch from; ``None`` outside a tree."""
    rollout_id: str
    step_index: int
    """Index in ``rollout.steps``."""
    policy: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    rollout_logprobs: list[float]
    policy_versions: PolicyVersions
    reward: float
    """The step's own reward if ``has_step_reward``, else the rollout's reward of this actor."""
    trajectory_reward: float
    advantage: float | None = None
    finish_reason: FinishReason = "stop"
    loss_mask: list[int] | None = None
    temperature: float = 1.0
    parent_rollout_id: str | None = None
    """Id of the rollout that spawned this one; ``None`` at the top."""
    group: tuple[Hashable, ...] | None = None
    has_step_reward: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)
    """The step's own ``info``."""
    facts: StepFacts = field(default_factory=StepFacts, kw_only=True)
    """The step's own ``facts``."""
    root_result: GenerateResult | None = field(default=None, repr=False, compare=False)
    """The result at the top of this call's tree of episodes."""
    columns: dict[str, Column] = field(default_factory=dict, repr=False, compare=False)
    """What only some samples have, by name, such as ``allowed``, the tokens that its grammar allowed, and
    ``token_advantages``, which are added to ``advantage``."""
    attempt_id: str | None = None
    """Id of the rollout that this trajectory is a sub-agent's part of. Those of one attempt count once in a group.
    ``None``: the trajectory is an attempt by itself."""
    weight: float = 1.0
    """Factor of the advantage in the loss: 1 / n for a trajectory of one of n sub-agents of its actor in an attempt."""
    step: Step | None = field(default=None, repr=False, compare=False)
    """The step that the sample was collected from."""

    def __repr__(self) -> str:
        tokens = f"{len(prompt_tokens(self))} + {len(self.completion_token_ids)} tokens"
        return f"<Sample {self.step_index} of {self.rollout_id!r}, {self.actor!r}: {tokens}, reward {self.reward}>"

    @property
    def trajectory_key(self) -> tuple[str, int | None]:
        """Return the key of the trajectory for credit rules: the rollout's id and the number of its end.

        The end is ``None``, unless a tree has several ends and this step led to only one (``Step.info["ends"]``).
        """
        ends = self.info.get("ends", ())
        return (self.rollout_id, ends[0] if len(ends) == 1 else None)


@dataclass(slots=True)
class TrainingBatch:
    """Many samples, packed column by column. Prompts are shared, so a conversation takes the memory of its last one.

    A row is a sample's prompt and completion: its context, followed by its targets. ``contexts [B]`` are sequences of
    token ids, prompts that share what they have in common. ``targets [N]`` int64 are the tokens behind them, cut by
    ``cu_targets [B+1]`` int64: the completions, and what a column marks of the prompts' ends. ``target_mask [N]`` uint8
    is 1 on those that train, and ``target_logprobs [N]`` float32 are those of the sampler (0 on prompts).

    ``advantages [B]`` float32, ``rewards [B]`` float32, ``temperatures [B]`` float32, ``actor_index [B]`` and
    ``policy_index [B]`` int64 into ``actors`` and ``policies``, ``min_version [B]`` int64, the oldest policy version
    that sampled a token of the row. ``drops`` counts the model calls that don't train, by ``(actor, cause)``;
    ``metrics`` describe the whole step. ``columns`` has what only some batches have, by name, such as
    ``token_advantages [N]`` and ``allowed`` (:class:`AllowedTokens`). Each is of a kind (:class:`Column`) that says how
    to select and cut it.

    For trainers that take whole rows, ``token_ids [T]``, ``loss_mask [T]``, ``rollout_logprobs [T]`` and ``cu_seqlens
    [B+1]`` are those of all rows, one after the other: new arrays at each access, which are read-only.

    Example: two samples of 3 + 2 and 3 + 1 tokens have ``cu_targets == [0, 2, 3]`` and ``cu_seqlens == [0, 5, 9]``.
    """

    contexts: Sequence[Prefix[int]]
    targets: np.ndarray
    cu_targets: np.ndarray
    target_mask: np.ndarray
    target_logprobs: np.ndarray
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
    columns: dict[str, Column] = field(default_factory=dict)

    @classmethod
    def of_rows(
        cls,
        token_ids: np.ndarray,
        cu_seqlens: np.ndarray,
        loss_mask: np.ndarray,
        rollout_logprobs: np.ndarray,
        **fields: Any,
    ) -> Self:
        """Return a batch of whole rows, which share nothing: all their tokens are targets, and columns are ``[T]``."""
        contexts = [NO_TOKENS] * (len(cu_seqlens) - 1)
        return cls(contexts, token_ids, cu_seqlens, loss_mask, rollout_logprobs, **fields)

    def __len__(self) -> int:
        return len(self.cu_targets) - 1

    def __repr__(self) -> str:
        return f"<TrainingBatch of {len(self)} samples, {int(self.lengths.sum())} tokens, actors {self.actors}>"

    @property
    def context_lengths(self) -> np.ndarray:
        """Number of tokens ``[B]`` int64 before each row's first target."""
        return np.fromiter(map(len, self.contexts), np.int64, len(self.contexts))

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens ``[B]`` int64 of each row."""
        return self.context_lengths + np.diff(self.cu_targets)

    @property
    def cu_seqlens(self) -> np.ndarray:
        """Offsets ``[B+1]`` int64 of the whole rows."""
        return _read_only(np.concatenate([np.zeros(1, np.int64), self.lengths.cumsum()]))

    @property
    def token_ids(self) -> np.ndarray:
        """Token ids ``[T]`` int64 of the whole rows."""
        return _read_only(self.tokens_of(np.arange(len(self))))

    @property
    def loss_mask(self) -> np.ndarray:
        """1 on the tokens of the whole rows that train: ``[T]`` uint8."""
        return _read_only(self._whole(self.target_mask))

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """The sampler's log-probs of the tokens of the whole rows: ``[T]`` float32, 0 on prompts."""
        return _read_only(self._whole(self.target_logprobs))

    def tokens_of(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the token ids of some whole rows, one after the other, int64."""
        parts: list[np.ndarray] = [np.zeros(0, np.int64)]
        for row in rows:
            parts += self.contexts[row].__array__(), self.targets[self.cu_targets[row] : self.cu_targets[row + 1]]
        return np.concatenate(parts, dtype=np.int64)

    def overlapping(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a stream of token ids, int64, and where in it each of some rows begins and ends: ``[b]`` int64 each.

        Rows of one conversation lie on one another: a call's whole row is the beginning of the next call's.
        """
        lengths, parts, size = self.lengths, list[np.ndarray](), 0
        starts, ends = np.zeros((2, len(rows)), np.int64)
        longest: dict[int, tuple[Prefix[int], int]] = {}
        for place in np.argsort(-lengths[rows], kind="stable").tolist():
            row = int(rows[place])
            context, length = self.contexts[row], int(lengths[row])
            targets = self.targets[self.cu_targets[row] : self.cu_targets[row + 1]]
            over, start = longest.get(id(context.shared), (None, 0))
            if over is None or not begins(over, context, targets.tolist()):
                start = size
                parts += context.__array__(), targets
                size += length
                if context.shared is not None:
                    longest.setdefault(id(context.shared), (context, start))
            starts[place], ends[place] = start, start + length
        return np.concatenate([np.zeros(0, np.int64), *parts], dtype=np.int64), starts, ends

    def _whole(self, values: np.ndarray) -> np.ndarray:
        """Return values ``[N]`` of targets as those of the tokens of whole rows ``[T]``: 0 for contexts."""
        counts = np.stack([self.context_lengths, np.diff(self.cu_targets)], axis=1).ravel()
        whole = np.zeros(counts.sum(), values.dtype)
        whole[np.repeat(np.tile([False, True], len(self)), counts)] = values
        return whole

    @property
    def dropped(self) -> dict[str, int]:
        """Count the model calls that don't train, by cause. Rows and these calls add up to all calls of the actors."""
        counts: dict[str, int] = {}
        for (_, cause), count in self.drops.items():
            counts[cause] = counts.get(cause, 0) + count
        return counts


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


class CreditAssigner(Protocol):
    """Turns rewards into advantages. One rule is one file under ``turnwise/credit/rules``.

    A rule that declares ``capabilities`` (:class:`CreditCapabilities`) can do more, or less, than their defaults.
    """

    def compute(self, results: Sequence[GenerateResult]) -> dict[tuple[str, int], float]:
        """Map ``(rollout id, step index)`` to the advantage, for trainable steps of ``results`` and their children."""
        ...

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order. May update the rule's state."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class ExplainedCredit(Protocol):
    """A credit rule that names the cause of each advantage of 0."""

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> Sequence[str]:
        """Return the cause of the advantage 0 for each of ``rows`` of ``samples``; ``dropped/<name>`` counts it."""
        ...


@runtime_checkable
class GroupedCredit(Protocol):
    """A credit rule that compares samples in groups."""

    def key_of(self, sample: Sample) -> tuple[Hashable, ...]:
        """Return the key of the group in which ``sample`` is compared."""
        ...


RewardFunction = Callable[..., "Mapping[str, Any] | float | Sequence[Any] | Awaitable[Any]"]
"""A function whose parameters name the arguments it wants: ``def f(extras, artifact) -> dict[str, float]``."""
