"""Players and records: actors, steps, rollouts, and episodes from request to result."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.types.completions import ToolSource
from turnwise.types.facts import RequestFacts, RolloutFacts, StepFacts, WithFacts
from turnwise.types.model_calls import FinishReason, Messages, PolicyVersions, Sampling
from turnwise.types.prompts import prompt_tokens, shares
from turnwise.utils.copies import deep_copy, own_copy

CHILD = "child"
"""Key of ``rollout.meta`` of a sub-agent's trajectory, with a dict of: ``actor``; ``attempt``, the id of the rollout
that it is a part of; ``parent``, the id of the one that opened it; ``order``, the number of children that this one had
opened before; ``after``, the latest answer to the parent by then, as ``[actor, number of its call]``, or ``None``; and
``inherits``, true if its reward is its parent's."""

CHILD_ACTORS = "child_actors"
"""Key of the ``rollout.meta`` of an attempt: the actors of its sub-agents that take its reward."""

PAID_OTHERS = "paid_others"
"""Key of ``step.info`` of an action in a tree: what other actors got for it at once, by actor."""

PAID_LATER = "paid_later"
"""Key of ``step.info``: the part of ``step.reward`` that later actions of others brought."""

MAX_CONCURRENCY = 1024
"""Default ``max_concurrency`` of an arena and a run: concurrent model calls of all actors together."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A player: a configuration, not a model. ``policy`` names its weights.

    ``max_tokens`` and ``sampling`` override the arena's defaults for this actor. ``max_concurrency`` limits its
    concurrent model calls, in addition to the arena's own limit; ``None`` sets no such limit.

    ``tools`` are functions that it may call, JSON schemas for :meth:`Episode.run_tool`, or sources such as an
    :class:`~turnwise.integrations.mcp.MCPServer`. In each turn it gets the results of at most ``max_tool_rounds``
    answers. At most ``max_tool_calls`` calls of one answer run, each for at most ``tool_timeout`` seconds. The model
    sees ``max_tool_result`` characters of each result.
    ``chat_template_kwargs`` go to the chat template, such as ``{"enable_thinking": False}``.

    Example: ``Actor("solver", system_prompt="Solve the problem.", policy="default", max_tokens=256)``
    """

    id: str
    system_prompt: str = ""
    policy: str = "default"
    max_tokens: int | None = None
    sampling: Sampling | None = None
    max_concurrency: int | None = None
    tools: Sequence[Callable[..., Any] | Mapping[str, Any] | ToolSource] = ()
    max_tool_rounds: int = 8
    max_tool_calls: int = 32
    max_tool_result: int = 2000
    tool_timeout: float = 60.0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_tool_rounds", "max_tool_calls", "max_tool_result", "tool_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Actor.{name}={getattr(self, name)!r} of actor {self.id!r}: expected a number > 0")
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


@shares("prompt", "prompt_token_ids")
@dataclass(slots=True)
class Step(WithFacts):
    """One model call of an episode.

    ``turn`` counts rounds from 0: a new round begins when the next actor has already acted in this one. ``branch`` is
    the index among the siblings in a tree, or 0. ``tree_node`` identifies the node from which the siblings branched.
    ``from_branch`` is the branch that led to this call's state, as (tree node, branch); ``None`` before the first node.
    ``selected`` is true if the step is part of the episode's own trajectory. ``reward`` is the step's own reward; if it
    is ``None``, the reward of its actor is used (:meth:`Rollout.rewards_of`). With token rewards, ``reward`` is their
    sum, and ``info["token_rewards"]`` has them. ``group`` overrides the group key of the credit rule.

    ``completion`` is what the model said outside of its ``thought``. A completion that ended ``in_thought``, as its
    limit cut it or the model never closed it, says nothing.

    ``info`` is the episode's own, with the keys of :data:`~turnwise.types.INFO_KEYS`. ``facts`` is what turnwise notes.

    Example: ``Step("solver", turn=0, prompt=[{"role": "user", "content": "2 + 2 = ?"}], completion="4",
    prompt_token_ids=[1, 17, 9], completion_token_ids=[20, 2], completion_logprobs=[-0.1, -0.01],
    policy_versions=[(2, 7)], finish_reason="stop", policy="default")``
    """

    _own = "info"
    _facts = StepFacts

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
    tree_node: int | None = None
    selected: bool = True
    trainable: bool = True
    info: dict[str, Any] = field(default_factory=dict)
    from_branch: tuple[int, int] | None = None
    thought: str = ""
    in_thought: bool = False
    facts: StepFacts = field(default_factory=StepFacts)

    def __repr__(self) -> str:
        tokens = f"{len(prompt_tokens(self))} + {len(self.completion_token_ids)} tokens"
        return f"<Step of {self.actor_id!r}, turn {self.turn}: {tokens}, reward {self.reward}>"

    @property
    def completion_text(self) -> str:
        """Alias of ``completion``."""
        return self.completion


@dataclass(slots=True)
class Rollout(WithFacts):
    """The trace of one episode, every branch of a tree included.

    ``rewards`` holds one number per actor, from the rubric. ``metrics`` holds the rubric's unweighted values and the
    tree's counts. ``error`` is the traceback of a failed episode, which never trains. ``meta`` is a copy of the
    request's, with the keys of :data:`~turnwise.types.META_KEYS`. ``facts`` is what turnwise notes.

    Example: ``Rollout(id="r-17", episode_type="sudoku", artifact={"puzzle": "1_3_..."}, rewards={"proposer": 1.25})``
    """

    _own = "meta"
    _facts = RolloutFacts

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
    facts: RolloutFacts = field(default_factory=RolloutFacts)

    def __repr__(self) -> str:
        end = f"rewards {self.rewards}" if self.error is None else "failed"
        return f"<Rollout {self.id!r} of {self.episode_type!r}: {len(self.steps)} steps, {end}>"

    def rewards_of(self, step: Step) -> Mapping[str, float]:
        """Return the rewards by actor for ``step``.

        In a tree with several ends (``meta["ends"]``), a step that led to only one of them has the rewards of that end.
        Any other step has the rollout's rewards.
        """
        ends = step.info.get("ends", ()) if step.info else ()
        return self.meta["ends"][ends[0]]["rewards"] if ends and len(ends) == 1 else self.rewards


@dataclass(slots=True)
class EpisodeRequest(WithFacts):
    """An episode to run. Copies of one question share ``group_id``; ``timeout`` is in seconds.

    Nested episodes inherit lineage, seed, policy version and deadline. ``policies`` maps actors to policies that
    replace their own, here and in nested episodes. Completions of these policies never train.

    Example: ``EpisodeRequest("sudoku", {"puzzle": "1_3_..."}, group_id="puzzle-5", seed=11)``
    """

    _own = "meta"
    _facts = RequestFacts

    episode_type: str
    artifact: Any
    group_id: Hashable | None = None
    seed: int | None = None
    priority: int = 0
    timeout: float | None = None
    is_trainable: bool = True
    meta: dict[str, Any] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)
    facts: RequestFacts = field(default_factory=RequestFacts)

    def __repr__(self) -> str:
        return f"<EpisodeRequest of {self.episode_type!r}: group {reprlib.repr(self.group_id)}, seed {self.seed}>"


@dataclass(slots=True)
class GenerateResult:
    """A finished episode: its rollout, the results of episodes that it spawned, and its requests to run next.

    ``group_id`` identifies the question: the request's ``group_id``, else a key of its artifact. ``parent_id`` is the
    id of the rollout that spawned this one. ``children`` also holds the episodes that continue this one: they have this
    result's ``parent_id``, and ``rollout.meta["continues"]`` has the id of the rollout that they continue. So do the
    sub-agents of an agent's attempt: they have the attempt's ``parent_id``, and ``rollout.meta["child"]``
    (:data:`~turnwise.types.CHILD`) says whose they are. A top episode's ``recording``, if kept, has the data for a
    replay (:mod:`turnwise.arena.recording.recorder`).

    Example: ``GenerateResult(Rollout("r-1", "propose", None), children=[GenerateResult(Rollout("r-2", "solve", 1))])``
    """

    rollout: Rollout
    children: list[GenerateResult] = field(default_factory=list)
    continuation: list[EpisodeRequest] = field(default_factory=list)
    is_trainable: bool = True
    group_id: Hashable = None
    parent_id: str | None = None
    recording: Any = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"<GenerateResult of {self.rollout!r}, {len(self.children)} children>"

    @property
    def uid(self) -> Hashable:
        """Alias of ``group_id``."""
        return self.group_id

    @property
    def rewards(self) -> dict[str, float]:
        """Return the rollout's rewards by actor; empty if the episode failed."""
        return self.rollout.rewards

    def walk(self) -> Iterable[GenerateResult]:
        """Yield this result and all results below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(slots=True)
class EpisodeState:
    """The state of a running episode. ``data`` is its scratch space.

    ``artifact`` is this attempt's own copy of the request's artifact, which hooks get. ``fork`` copies both deeply.

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
    artifact: Any = None
    transcripts: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The chats of a multi-turn episode by actor, which later turns go on from."""

    def __repr__(self) -> str:
        done = ", done" if self.done else ""
        return f"<EpisodeState of {self.current_actor!r}, turn {self.turn}: {len(self.trajectory)} steps{done}>"

    def fork(self, n: int) -> list[EpisodeState]:
        """Return ``n`` independent copies. They share finished steps and child results alone.

        Raises ``TypeError`` for data that a copy would lose, such as an environment that is unpickled by calling its
        constructor.
        """
        if n < 0:
            raise ValueError(f"n={n!r}: expected a count >= 0")
        return [self._copy() for _ in range(n)]

    def snapshot(self) -> EpisodeState:
        """Return a copy for :meth:`restore`."""
        return self._copy()

    def restore(self, snapshot: EpisodeState) -> None:
        """Set every field from ``snapshot``, which stays usable."""
        fresh = snapshot._copy()
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(fresh, name))

    def _copy(self) -> EpisodeState:
        memo: dict[Any, Any] = {}  # an object in both stays one
        return replace(
            self,
            trajectory=list(self.trajectory),
            child_results=list(self.child_results),
            transcripts=dict(self.transcripts),
            data=deep_copy(self.data, memo),
            artifact=own_copy(self.artifact, memo),
        )


@dataclass(slots=True)
class Artifact:
    """An object in a store that episodes work on. ``source`` is the id of the rollout that made it.

    ``parents`` holds the ids of the artifacts from which it was made. Each run numbers its rollouts from 0, so in a
    file that several runs write to, ``run`` identifies the run of ``source``.

    Example: ``Artifact(id="q-3", data={"question": "2 + 2 = ?", "answer": "4"}, source="r-17", parents=("q-1",))``
    """

    id: str
    data: Any
    weight: float = 1.0
    source: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    run: str | None = None
