"""The nouns: what the rooms of turnwise hand to one another.

Stages meet only here. Nothing in this file imports torch or another room of the package.

Legend for array shapes: ``B`` samples, ``N`` tokens of a packed stream, ``P`` prompt tokens, ``C`` completion tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

Message = dict[str, Any]
"""One chat message as the OpenAI API writes it: ``{"role": "user", "content": "2 + 2 = ?"}``."""

Messages = list[Message]
"""A chat: ``[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?"}]``."""

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: a stop token was sampled (and is kept); ``length``: the token limit; ``abort``: cut off from outside."""

PolicyVersions = list[tuple[int, int]]
"""Which weights sampled which tokens, as runs: ``[(5, 12), (3, 13)]`` is 5 tokens by version 12, then 3 by 13."""


# ---------------------------------------------------------------------------------------------------------------------
# Who plays
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    ``temperature`` 0 means greedy. ``max_tokens`` counts completion tokens, the stop token included.
    ``stop_token_ids`` are added to the tokenizer's end-of-sequence token. ``seed`` fixes the draw of this one request,
    whatever else is in the batch; ``None`` lets the client choose one.

    Example: ``Sampling(temperature=1.0, max_tokens=32)``
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature!r}: expected a number >= 0 (0 is greedy)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r}: expected at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: expected a number in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k!r}: expected 0 (off) or a positive count")

    def with_(self, **changes: Any) -> Sampling:
        """A copy with some fields changed: ``sampling.with_(temperature=0.0)``; unknown names raise ``TypeError``."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who plays: a configuration, not a model. ``policy`` names the weights behind it.

    ``max_tokens`` and ``sampling`` override the arena's defaults for this actor. At most ``max_concurrency`` of its
    model calls are in flight at once, whatever room the arena's own limit leaves; ``None`` sets no limit of its own.

    Example: ``Actor("solver", system_prompt="Solve the problem.", policy="default", max_tokens=256)``
    """

    id: str
    system_prompt: str = ""
    policy: str = "default"
    max_tokens: int | None = None
    sampling: Sampling | None = None
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(
                f"Actor.max_concurrency={self.max_concurrency!r} of actor {self.id!r}: expected at least 1, or None"
            )
        if not self.id or not isinstance(self.id, str):
            raise ValueError(f"Actor.id={self.id!r}: expected a non-empty string")
        if not self.policy or not isinstance(self.policy, str):
            raise ValueError(
                f"Actor.policy={self.policy!r} of actor {self.id!r}: expected the name of a policy, such as 'default'"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Model calls
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One completion asked of an inference client. Siblings of a tree are requests with equal prompts, own seeds.

    ``messages`` is the chat behind the prompt, for clients that send text.

    Example: ``ModelRequest([1, 17, 9], Sampling(max_tokens=8, seed=3), policy="default")``
    """

    prompt_token_ids: Sequence[int]
    sampling: Sampling = Sampling()
    policy: str = "default"
    messages: Messages | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class ModelResponse:
    """What one model call gave. Lists run over the ``C`` completion tokens, the stop token included.

    ``logprobs`` are those of the distribution sampled from: ``log_softmax(logits / temperature)``, and for greedy
    decoding ``log_softmax(logits)``. ``text`` is the completion without special tokens. What is not ``trainable`` came
    as text: its token ids are a tokenizer's reading of it, and its log-probabilities are unknown. What is ``cached``
    was sampled for another call that asked the same.

    Example: ``ModelResponse(text="4", completion_token_ids=[20, 2], logprobs=[-0.1, -0.01], finish_reason="stop",
    policy_versions=[(2, 7)], prompt_token_ids=[1, 17, 9])``
    """

    text: str
    completion_token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_versions: PolicyVersions
    prompt_token_ids: list[int] = field(default_factory=list)
    trainable: bool = True
    cached: bool = False


class ModelError(RuntimeError):
    """A model call failed; the episode that made it becomes a result with ``error`` set, never a training row."""


class ContextLengthError(ModelError):
    """The prompt leaves no room in the model's context."""


@runtime_checkable
class InferenceClient(Protocol):
    """Token ids in, token ids out. One response per request, in the order of the requests.

    ``generate`` raises :class:`ModelError` (``ContextLengthError`` for a prompt that is too long) where it can't serve.
    ``load_weights`` checks names and shapes before it changes a byte, and then answers for ``version``.
    """

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]: ...

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None: ...

    def version(self, policy: str) -> int: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class ScoringClient(Protocol):
    """A client that can also tell how likely a given completion is."""

    async def score(self, requests: Sequence[ModelRequest], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of ``completions[i]``, token by token, after the prompt of ``requests[i]``: those of
        ``log_softmax(logits / temperature)``, before top-p and top-k, as in a response of :meth:`generate`."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that turnwise uses."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: Messages, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...


# ---------------------------------------------------------------------------------------------------------------------
# What happened
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Step:
    """One model call of an episode.

    ``turn`` counts rounds from 0: a new one begins when the next actor has already acted in the present one.
    ``branch`` is the index among siblings of a tree (0 without one); ``parent`` names the node of the tree that the
    siblings grew from; ``origin`` is the branch that led to this call's state, as its (parent, branch), ``None`` before
    the first node; ``selected`` says whether the episode's own trajectory holds the step. ``reward`` is this step's own
    reward, ``None`` until scored: then its actor's by :meth:`Rollout.rewards_of`. ``group`` overrides the group key
    that a credit rule would build.

    Example: ``Step("solver", turn=0, prompt=[{"role": "user", "content": "2 + 2 = ?"}], completion="4",
    prompt_token_ids=[1, 17, 9], completion_token_ids=[20, 2], completion_logprobs=[-0.1, -0.01],
    policy_versions=[(2, 7)], finish_reason="stop", policy="default")``
    """

    actor_id: str | None
    turn: int
    prompt: Messages
    completion: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    completion_logprobs: list[float]
    policy_versions: PolicyVersions
    finish_reason: FinishReason
    policy: str = "default"
    reward: float | None = None
    advantage: float | None = None
    group: tuple[Hashable, ...] | None = None
    branch: int = 0
    parent: int | None = None
    selected: bool = True
    trainable: bool = True
    info: dict[str, Any] = field(default_factory=dict)
    origin: tuple[int, int] | None = None

    @property
    def completion_text(self) -> str:
        """``completion``, by the name that a response's text goes by elsewhere."""
        return self.completion


@dataclass(slots=True)
class Rollout:
    """The trace of one episode, every branch of a tree included.

    ``rewards`` holds one number per actor, from the rubric; ``metrics`` what the rubric measured besides;
    ``error`` is the traceback of a failed episode, which never trains.

    Example: ``Rollout(id="r-17", episode_type="sudoku", artifact={"puzzle": "1_3_..."}, rewards={"proposer": 1.25})``
    """

    id: str
    episode_type: str
    artifact: Any
    steps: list[Step] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def rewards_of(self, step: Step) -> Mapping[str, float]:
        """The rewards by actor that hold for ``step``: where a tree has several ends (``meta["ends"]``) and it led to
        one alone, those of that end; else the rollout's."""
        ends = step.info.get("ends", ())
        return self.meta["ends"][ends[0]]["rewards"] if len(ends) == 1 else self.rewards


@dataclass(slots=True)
class EpisodeRequest:
    """An episode to run. Copies of one question share ``group_id``; ``timeout`` is in seconds.

    Lineage, seed, policy version and deadline reach nested episodes by themselves. ``policies`` names, by actor, whose
    weights play for it here and in nested episodes in place of its own; what they say never trains.

    Example: ``EpisodeRequest("sudoku", {"puzzle": "1_3_..."}, group_id="puzzle-5", seed=11)``
    """

    episode_type: str
    artifact: Any
    group_id: Hashable | None = None
    seed: int | None = None
    priority: int = 0
    timeout: float | None = None
    is_trainable: bool = True
    meta: dict[str, Any] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class GenerateResult:
    """A finished episode: its rollout, the results of the episodes that it spawned, and what it asked to run next.

    ``uid`` names the question (the request's ``group_id``, else its artifact); ``parent_id`` the rollout that spawned
    this one. Episodes that continue it stand among the ``children`` as well, with its own ``parent_id``, and its id
    under ``rollout.meta["continues"]``. A top episode's ``tape`` has what a replay of it needs
    (:mod:`turnwise.arena.tape`), where one was kept.

    Example: ``GenerateResult(Rollout("r-1", "propose", None), children=[GenerateResult(Rollout("r-2", "solve", 1))])``
    """

    rollout: Rollout
    children: list[GenerateResult] = field(default_factory=list)
    continuation: list[EpisodeRequest] = field(default_factory=list)
    is_trainable: bool = True
    uid: Hashable = None
    parent_id: str | None = None
    tape: Any = field(default=None, compare=False, repr=False)

    @property
    def rewards(self) -> dict[str, float]:
        """The rollout's rewards by actor; none where it failed."""
        return self.rollout.rewards

    def walk(self) -> Iterable[GenerateResult]:
        """This result and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(slots=True)
class EpisodeState:
    """What an episode knows while it runs; ``data`` is its scratch space and the only part that ``fork`` copies.

    Example: ``EpisodeState(current_actor="proposer", data={"grid": [[1, 0], [0, 1]]})``
    """

    trajectory: list[Step] = field(default_factory=list)
    current_actor: str = ""
    turn: int = 0
    data: Any = field(default_factory=dict)
    done: bool = False
    child_results: list[GenerateResult] = field(default_factory=list)
    last_completion_text: str = ""
    acted: tuple[str, ...] = ()

    def fork(self, n: int) -> list[EpisodeState]:
        """``n`` independent copies. Finished steps and child results are shared, ``data`` is copied."""
        if n < 0:
            raise ValueError(f"n={n!r}: expected a count >= 0")
        return [self._copy() for _ in range(n)]

    def snapshot(self) -> EpisodeState:
        """A copy to go back to with :meth:`restore`."""
        return self._copy()

    def restore(self, snapshot: EpisodeState) -> None:
        """Take every field from ``snapshot``, which stays usable."""
        fresh = snapshot._copy()
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(fresh, name))

    def _copy(self) -> EpisodeState:
        return replace(
            self,
            trajectory=list(self.trajectory),
            child_results=list(self.child_results),
            data=copy.deepcopy(self.data),
        )


@dataclass(slots=True)
class Artifact:
    """A thing that episodes work on, as a store keeps it. ``source`` is the rollout that made it, ``parents`` holds the
    ids of the artifacts that it was made from.

    Example: ``Artifact(id="q-3", data={"question": "2 + 2 = ?", "answer": "4"}, source="r-17", parents=("q-1",))``
    """

    id: str
    data: Any
    weight: float = 1.0
    source: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------
# What the trainer sees
# ---------------------------------------------------------------------------------------------------------------------
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
    ``min_version [B]`` int64, the oldest policy version that sampled a token of the row. ``dropped`` counts the
    samples that filters removed, by reason; ``metrics`` describe the whole step.

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
    dropped: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1


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


RewardFunction = Callable[..., "Mapping[str, float] | float | Awaitable[Any]"]
"""A reward function names the arguments it wants, for example ``def f(extras, artifact) -> dict[str, float]``."""
