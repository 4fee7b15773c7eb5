"""The context of a running episode: its lineage, seed, deadline and records."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnwise.arena.runtime.hashing import LazyRandom, derive_seed
from turnwise.arena.runtime.private_text import PrivateTexts
from turnwise.state import forkable
from turnwise.types import (
    CHILD_ACTORS,
    Chat,
    EpisodeRequest,
    EpisodeState,
    GenerateResult,
    ModelRequest,
    ModelResponse,
    Rollout,
    RolloutFacts,
    Step,
)
from turnwise.utils.copies import own_copy

_OF_ONE_ATTEMPT = ("ended", "ends", CHILD_ACTORS)
"""Keys of ``rollout.meta`` that belong to one attempt. A retry starts without them."""


@dataclass(slots=True)
class EpisodeContext:
    """One running episode, or one branch of it.

    A context variable holds the current context, so nested episodes, branches and reward functions inherit it.

    Example: ``with use_context(context.branch("n0b1", fork)): ...`` runs one branch of a tree.
    """

    rollout: Rollout
    state: EpisodeState
    lazy_rng: LazyRandom
    group_id: Hashable = None
    """The question; copies of it share this id."""
    parent_id: str | None = None
    """Id of the rollout that spawned this episode."""
    is_trainable: bool = True
    priority: int = 0
    depth: int = 0
    """Levels of nesting above this episode."""
    root: int = 0
    """Number of the top episode."""
    batch: int = 0
    """Number of the training batch, from 0."""
    deadline: float | None = None
    """Time of the event loop at which the episode is cancelled."""
    scope: str = ""
    """Branch or reward function inside the episode; empty for the episode itself."""
    calls: int = 0
    """Model calls so far; with ``scope`` it fixes the seed of the next one."""
    spawned: int = 0
    """Nested episodes so far."""
    nodes: int = 0
    """Tree nodes so far."""
    steps: list[Step | None] = field(default_factory=list)
    """Recorded model calls, in the order in which they started; ``None`` while a call is running."""
    children: list[GenerateResult] = field(default_factory=list)
    """Results of nested episodes."""
    unselected_children: list[GenerateResult] = field(default_factory=list)
    """Results spawned by branches that were not selected. They may train, but the episode's state never saw them."""
    private: PrivateTexts = field(default_factory=PrivateTexts)
    """Text that only some actors may see."""
    parent_private: PrivateTexts | None = None
    """Private text of the episode that spawned this one."""
    sampled_completions: set[Hashable] = field(default_factory=set)
    """Actor and tokens of every completion sampled here, for ``check_private``."""
    recorder: Recorder | None = None
    """Records this episode for replay, or replays it."""
    record_key: str = ""
    """Name of this episode or branch in the recording."""
    record_count: int = 0
    """Events recorded here so far."""
    secrets: list[str] = field(default_factory=list)
    """Keys that no record may show."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Policies that replace those of the actors, by actor id."""
    continuations: list[EpisodeRequest] = field(default_factory=list)
    """Episodes that this one asked to run next."""
    beams: list[Beam] = field(default_factory=list)
    """Paths of a tree-sampled episode that are still being played."""
    ends: list[Beam] = field(default_factory=list)
    """Finished paths of a tree-sampled episode that has several."""
    forked: list[EpisodeState] = field(default_factory=list)
    """Earlier states of a tree, to close when the episode ends."""
    sources: dict[Any, Any] = field(default_factory=dict)
    """Open sources of tools of this attempt, by source. Its branches have the same."""
    listings: dict[str, list[Any]] = field(default_factory=dict)
    """Schemas that sources of tools have listed, by actor and place."""
    original: Any = None
    """The artifact as it was requested; while the episode plays, its state and its rollout have a copy."""

    @property
    def rng(self) -> random.Random:
        """Random generator of the episode or branch."""
        return self.lazy_rng.rng

    def next_call_seed(self) -> int:
        self.calls += 1
        return derive_seed(self.rollout.seed, self.scope, "call", self.calls - 1)

    def next_child(self) -> tuple[str, int]:
        """Return id and default seed of the next episode spawned from here."""
        index, self.spawned = self.spawned, self.spawned + 1
        return f"{self.rollout.id}{self.scope}.{index}", derive_seed(self.rollout.seed, self.scope, "child", index)

    def next_node(self) -> int:
        """Return the id of the next tree node. It is unique over rollouts, so that two trees never share a group."""
        self.nodes += 1
        return derive_seed(self.rollout.id, "node", self.nodes - 1) >> 15

    def next_record_key(self) -> str:
        """Return the key of the next event in the recording."""
        self.record_count += 1
        return f"{self.record_key}#{self.record_count - 1}"

    def scratch_copy(self, *, draws: bool) -> EpisodeContext:
        """Return a context for work that keeps only its result and records nothing.

        With ``draws`` it has its own generator, seeded from the episode's.
        """
        return replace(
            self,
            lazy_rng=LazyRandom(self.rng.getrandbits(64)) if draws else self.lazy_rng,
            scope=f"{self.scope}/aside{self.record_count}",
            calls=0,
            steps=[],
            children=[],
            unselected_children=[],
            sampled_completions=set(),
            recorder=None,
        )

    def branch(self, name: str, state: EpisodeState | None = None) -> EpisodeContext:
        """Return a context for one concurrent part of the episode: own call seeds and records, a copied generator."""
        return EpisodeContext(
            rollout=self.rollout,
            state=self.state if state is None else state,
            lazy_rng=self.lazy_rng.fork(),
            group_id=self.group_id,
            parent_id=self.parent_id,
            is_trainable=self.is_trainable,
            priority=self.priority,
            depth=self.depth,
            root=self.root,
            batch=self.batch,
            deadline=self.deadline,
            scope=f"{self.scope}/{name}",
            private=self.private.copy(),
            parent_private=self.parent_private,
            recorder=self.recorder,
            record_key="" if self.recorder is None else self.recorder.unique_key(f"{self.record_key}/{name}"),
            policies=self.policies,
            secrets=self.secrets,
            sources=self.sources,
            listings=dict(self.listings),
        )

    def merge(self, part: EpisodeContext, *, selected: bool) -> None:
        """Add a finished branch's records. A selected branch also passes on its state, generator and private texts."""
        self.steps.extend(part.steps)
        self.unselected_children.extend(part.unselected_children)
        self.sampled_completions |= part.sampled_completions
        if not selected:
            self.unselected_children.extend(part.children)
            return
        self.children.extend(part.children)
        self.state, self.lazy_rng, self.private = part.state, part.lazy_rng, part.private
        self.listings = part.listings

    def for_retry(self, attempt: int) -> EpisodeContext:
        """Return a fresh context, with another seed, for one more attempt at the same request."""
        old = self.rollout
        nested = (node for child in (*self.children, *self.unselected_children) for node in child.walk())
        steps = [*self.steps, *(step for node in nested for step in node.rollout.steps)]
        lost = sum(len(step.completion_token_ids) for step in steps if step and not step.facts.cached)
        lost += int(old.metrics.get("tree/playout_tokens", 0))
        meta = {key: value for key, value in old.meta.items() if key not in _OF_ONE_ATTEMPT}
        lost += old.facts.lost_tokens
        facts = replace(
            old.facts, attempt=attempt, lost_tokens=lost, dropped=None, own_end=None, playouts=None, ledger=None
        )
        fresh = self.branch("", EpisodeState())
        fresh.scope = ""
        fresh.sources, fresh.listings = {}, {}
        fresh.record_key = "" if self.recorder is None else self.recorder.unique_key(f"{self.record_key}~")
        fresh.private = PrivateTexts() if self.parent_private is None else self.parent_private.copy()
        seed = derive_seed(old.seed, "retry")
        fresh.rollout = Rollout(old.id, old.episode_type, old.artifact, seed=seed, meta=meta, facts=facts)
        fresh.lazy_rng = LazyRandom(derive_seed(fresh.rollout.seed, "environment"))
        return fresh

    def out_of_time(self) -> bool:
        if self.deadline is None:
            return False
        deadline = self.deadline

        def past() -> bool:
            return asyncio.get_running_loop().time() >= deadline

        return past() if self.recorder is None else bool(self.recorder.record_input(self, "deadline", (), past))

    def explain(self, error: Exception) -> str:
        """Return the traceback of ``error`` without keys, with a note if the episode ran past its deadline."""
        text = self.without_secrets("".join(traceback.format_exception(error)))
        if isinstance(error, TimeoutError) and self.out_of_time():
            return f"episode {self.rollout.episode_type!r} ({self.rollout.id}) ran past its deadline\n{text}"
        return text

    def without_secrets(self, value: Any) -> Any:
        """Return ``value``, a text or containers of texts, with ``***`` for each of ``secrets``."""
        if isinstance(value, str):
            for secret in self.secrets:
                value = value.replace(secret, "***")
            return value
        if isinstance(value, Mapping):
            return {self.without_secrets(key): self.without_secrets(item) for key, item in value.items()}
        return type(value)(map(self.without_secrets, value)) if type(value) in (list, tuple, set) else value

    def result(self) -> GenerateResult:
        """Return the episode as it is now, complete or failed."""
        self.rollout.steps = [step for step in self.steps if step is not None]
        if self.secrets:
            self.rollout.meta = self.without_secrets(self.rollout.meta)
            self.rollout.extras = self.without_secrets(self.rollout.extras)
            self.rollout.facts = RolloutFacts(**self.without_secrets(self.rollout.facts.known()))
            for step in self.rollout.steps:
                texts = {name: said for name, said in step.info.items() if isinstance(said, str)}
                step.info.update(self.without_secrets(texts))
                for name, said in step.facts.known().items():
                    if isinstance(said, str):
                        setattr(step.facts, name, self.without_secrets(said))
        return GenerateResult(
            self.rollout,
            children=self.children + self.unselected_children,
            continuation=list(self.continuations),
            # A rollout that its rubric dropped has no rewards, so it can't train.
            is_trainable=self.is_trainable and self.rollout.facts.dropped is None,
            group_id=self.group_id,
            parent_id=self.parent_id,
        )


@dataclass(slots=True, eq=False)
class Beam:
    """One path through a tree-sampled episode, up to its latest action.

    Example: an unbranched episode is one beam, ``Beam(context)``.
    """

    context: EpisodeContext
    """State, generator and private texts of the path. The first beam uses the episode's own context."""
    steps: list[Step] = field(default_factory=list)
    """All model calls on the path, in order."""
    children: list[GenerateResult] = field(default_factory=list)
    """Results of the episodes spawned on the path."""
    from_branch: tuple[int, int] | None = None
    """The last branch that the path took, as ``(node, index)``; ``None`` before the first node."""
    total_reward: float = 0.0
    """Sum of the rewards on the path."""
    score: float = 0.0
    """Number that selection compares."""
    skipped: bool = False
    """The current actor skipped its turn."""
    ended: str = ""
    """Reason why the path ended, for example ``"done"``; empty while it goes on."""

    @property
    def state(self) -> EpisodeState:
        return self.context.state

    @property
    def last_action(self) -> Step | None:
        return next((step for step in reversed(self.steps) if step.facts.env_response is not None), None)


@dataclass(slots=True, eq=False)
class ModelCall:
    """One model call of an episode that is recorded or replayed."""

    key: str
    """Key of the call in the recording."""
    actor_id: str | None
    turn: int
    messages: Chat
    request: ModelRequest | None
    """The request; ``None`` once ``step`` holds its content."""
    step: Step | None = None
    """``None`` while the call runs, or if it failed or was cancelled."""
    error: tuple[str, str] | None = None
    """Type and text of the exception that the call raised."""
    text_only: bool = False
    """The response came as text, so it does not train."""


class Recorder(Protocol):
    """Receives the events of a running episode. It records them, or replays recorded ones."""

    def unique_key(self, key: str) -> str:
        """Return ``key``, with a number appended if it is taken."""
        ...

    def start_call(
        self, context: EpisodeContext, actor_id: str | None, messages: Chat, request: ModelRequest
    ) -> ModelCall:
        """Start a model call."""
        ...

    async def replayed(self, call: ModelCall) -> ModelResponse | None:
        """Return the recorded response or raise the recorded error. Return ``None`` if the call must be sampled."""
        ...

    def finish_call(self, call: ModelCall, response: ModelResponse | Exception) -> None:
        """Finish a sampled call with its response or exception."""
        ...

    def record_input(
        self, context: EpisodeContext, name: str, arguments: Sequence[Any], compute: Callable[[], Any]
    ) -> Any:
        """Return the result of ``compute()``, which may be an awaitable, or raise its error."""
        ...

    def timeout(self, context: EpisodeContext, when: float | None) -> AbstractAsyncContextManager[Any]:
        """Return a context manager like ``asyncio.timeout_at(when)``."""
        ...

    def limit(self, context: EpisodeContext, seconds: float) -> AbstractAsyncContextManager[float | None]:
        """Return a context manager that yields the time limit of a call, ``None`` in a replay."""
        ...

    def finish_episode(self, context: EpisodeContext) -> None:
        """End one attempt at an episode, after its rewards are known."""
        ...


_current: ContextVar[EpisodeContext | None] = ContextVar("turnwise_episode", default=None)


def current_context() -> EpisodeContext | None:
    """Return the context of the episode or branch that this coroutine runs in; ``None`` outside of episodes."""
    return _current.get()


def require_context() -> EpisodeContext:
    """Return the context of the running episode. Raises ``RuntimeError`` outside of episodes."""
    context = _current.get()
    if context is None:
        raise RuntimeError("no episode is running here: start episodes with arena.generate_rollouts(requests)")
    return context


class use_context:
    """Make ``context`` the current context for the block and for the tasks started in it."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: EpisodeContext) -> None:
        self._context = context

    def __enter__(self) -> EpisodeContext:
        self._token = _current.set(self._context)
        return self._context

    def __exit__(self, *failure: object) -> None:
        _current.reset(self._token)


class own_artifact:
    """Give one attempt its own copy of the artifact, in its state and its rollout. Afterwards the rollout has the
    original again: whatever the attempt changes, its siblings, a retry, stores and records don't see it."""

    __slots__ = ("_context", "_rollout")

    def __init__(self, context: EpisodeContext) -> None:
        self._context, self._rollout = context, context.rollout

    def __enter__(self) -> None:
        self._context.original = self._rollout.artifact
        self._rollout.artifact = self._context.state.artifact = own_copy(self._context.original)

    def __exit__(self, *failure: object) -> None:
        self._rollout.artifact = self._context.original


def make_forkable(state: EpisodeState) -> None:
    """Move ``state.data`` into a copy-on-write State, unless it is in one. Forks then copy nothing until a write."""
    state.data = forkable(state.data)
