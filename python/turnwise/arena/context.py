"""What a running episode knows about itself: who spawned it, its seed, its deadline, and what it has recorded.

It travels in a context variable, so nested episodes, branches of a tree and reward functions inherit it by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import inspect
import random
import traceback
from collections.abc import Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.arena.privacy import PrivateTexts
from turnwise.state import StateDict, StateList, to_python
from turnwise.types import Artifact, EpisodeRequest, EpisodeState, GenerateResult, Rollout, Step

if TYPE_CHECKING:
    from turnwise.arena.beams import Beam
    from turnwise.arena.tape import Taping

_OF_ONE_ATTEMPT = ("dropped", "ended", "ends", "own_end", "playouts")
"""What a rollout's ``meta`` says of one attempt alone."""


def derive_seed(*parts: Any) -> int:
    """A seed below 2**63 from numbers and strings, the same on every machine and in every process.

    Seeds are hashed from names, never drawn in order, so no result depends on which coroutine ran first.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Luck:
    """A seeded generator, made when somebody first draws: most episodes never do, and 624 words are slow to make."""

    __slots__ = ("_rng", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng: random.Random | None = None

    @property
    def rng(self) -> random.Random:
        if self._rng is None:
            self._rng = random.Random(self._seed)
        return self._rng

    def ended(self) -> float | None:
        """The number that would come next, which tells where the generator stands; ``None`` if nobody ever drew."""
        return None if self._rng is None else self._rng.random()

    def copy(self) -> Luck:
        """One that goes on from where this one is."""
        fresh = Luck(self._seed)
        fresh._rng = copy.copy(self._rng)
        return fresh


def rng_state(rng: random.Random) -> list[Any]:
    """The state of a generator as JSON-ready lists."""
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def set_rng_state(rng: random.Random, state: Any) -> None:
    version, words, gauss = state
    rng.setstate((version, tuple(words), gauss))


@dataclass(slots=True)
class EpisodeContext:
    """One running episode, or one branch of it.

    ``scope`` is "" for the episode itself, and names the branch or reward function below it; together with the counter
    ``calls`` it fixes the seed of each model call. ``pruned`` holds the children that losing branches spawned: they may
    still train, but the episode's state never saw them. ``place`` and ``marks`` name what stands on the ``tape``;
    ``batch`` is the number of the training batch, from 0; ``policies`` play in place of their actors' own;
    ``following`` is what the episode asked to run next. ``beams`` are the ways that a branched episode goes at once,
    and ``ends`` where several of them ended (:mod:`turnwise.arena.beams`).
    """

    rollout: Rollout
    state: EpisodeState
    luck: Luck
    uid: Hashable = None
    parent_id: str | None = None
    is_trainable: bool = True
    priority: int = 0
    depth: int = 0
    root: int = 0
    batch: int = 0
    deadline: float | None = None
    scope: str = ""
    calls: int = 0
    spawned: int = 0
    nodes: int = 0
    steps: list[Step | None] = field(default_factory=list)
    children: list[GenerateResult] = field(default_factory=list)
    pruned: list[GenerateResult] = field(default_factory=list)
    private: PrivateTexts = field(default_factory=PrivateTexts)
    outer: PrivateTexts | None = None
    sampled: set[Hashable] = field(default_factory=set)
    tape: Taping | None = None
    place: str = ""
    marks: int = 0
    policies: Mapping[str, str] = field(default_factory=dict)
    following: list[EpisodeRequest] = field(default_factory=list)
    beams: list[Beam] = field(default_factory=list)
    ends: list[Beam] = field(default_factory=list)

    @property
    def rng(self) -> random.Random:
        """The generator of the episode, or of the branch."""
        return self.luck.rng

    def next_call_seed(self) -> int:
        self.calls += 1
        return derive_seed(self.rollout.seed, self.scope, "call", self.calls - 1)

    def next_child(self) -> tuple[str, int]:
        """Id and default seed of the next episode spawned from here."""
        index, self.spawned = self.spawned, self.spawned + 1
        return f"{self.rollout.id}{self.scope}.{index}", derive_seed(self.rollout.seed, self.scope, "child", index)

    def next_node(self) -> int:
        """Id of the next tree node: unique over rollouts, so that two trees never share a group."""
        self.nodes += 1
        return derive_seed(self.rollout.id, "node", self.nodes - 1) >> 15

    def next_key(self) -> str:
        """The name of the next thing that happens here, for the tape."""
        self.marks += 1
        return f"{self.place}#{self.marks - 1}"

    def aside(self, *, draws: bool) -> EpisodeContext:
        """A context for work whose answer alone counts: off the tape, with records to nowhere, and with luck of its own
        where it ``draws``."""
        return replace(
            self,
            luck=Luck(self.rng.getrandbits(64)) if draws else self.luck,
            scope=f"{self.scope}/aside{self.marks}",
            calls=0,
            steps=[],
            children=[],
            pruned=[],
            sampled=set(),
            tape=None,
        )

    def branch(self, name: str, state: EpisodeState | None = None) -> EpisodeContext:
        """A context for one concurrent part of this episode: own call seeds, own records, a copy of the generator."""
        return EpisodeContext(
            rollout=self.rollout,
            state=self.state if state is None else state,
            luck=self.luck.copy(),
            uid=self.uid,
            parent_id=self.parent_id,
            is_trainable=self.is_trainable,
            priority=self.priority,
            depth=self.depth,
            root=self.root,
            batch=self.batch,
            deadline=self.deadline,
            scope=f"{self.scope}/{name}",
            private=self.private.copy(),
            outer=self.outer,
            tape=self.tape,
            place="" if self.tape is None else self.tape.claim(f"{self.place}/{name}"),
            policies=self.policies,
        )

    def adopt(self, part: EpisodeContext, *, selected: bool) -> None:
        """Take over what a finished branch recorded; the selected one also hands on its state and its generator."""
        self.steps.extend(part.steps)
        self.pruned.extend(part.pruned)
        self.sampled |= part.sampled
        if not selected:
            self.pruned.extend(part.children)
            return
        self.children.extend(part.children)
        self.state, self.luck, self.private = part.state, part.luck, part.private

    def again(self, attempt: int) -> EpisodeContext:
        """A fresh context for one more attempt at the same request, with luck of its own."""
        old = self.rollout
        lost = sum(len(step.completion_token_ids) for step in self.steps if step and "cached" not in step.info)
        lost += int(old.metrics.get("tree/playout_tokens", 0))
        meta = {key: value for key, value in old.meta.items() if key not in _OF_ONE_ATTEMPT}
        meta |= {"attempt": attempt, "lost_tokens": meta.get("lost_tokens", 0) + lost}
        fresh = self.branch("", EpisodeState())
        fresh.scope = ""
        fresh.place = "" if self.tape is None else self.tape.claim(f"{self.place}~")
        fresh.private = PrivateTexts() if self.outer is None else self.outer.copy()
        fresh.rollout = Rollout(old.id, old.episode_type, old.artifact, seed=derive_seed(old.seed, "retry"), meta=meta)
        fresh.luck = Luck(derive_seed(fresh.rollout.seed, "environment"))
        return fresh

    def out_of_time(self) -> bool:
        if self.deadline is None:
            return False
        deadline = self.deadline

        def past() -> bool:
            return asyncio.get_running_loop().time() >= deadline

        return past() if self.tape is None else bool(self.tape.read(self, "deadline", (), past))

    def explain(self, error: Exception) -> str:
        """The traceback of what failed this episode."""
        text = "".join(traceback.format_exception(error))
        if isinstance(error, TimeoutError) and self.out_of_time():
            return f"episode {self.rollout.episode_type!r} ({self.rollout.id}) ran past its deadline\n{text}"
        return text

    def result(self) -> GenerateResult:
        """The episode as it stands, complete or failed."""
        self.rollout.steps = [step for step in self.steps if step is not None]
        return GenerateResult(
            self.rollout,
            children=self.children + self.pruned,
            continuation=list(self.following),
            # A rubric that dropped the rollout leaves it without rewards, so nothing of it can train.
            is_trainable=self.is_trainable and "dropped" not in self.rollout.meta,
            uid=self.uid,
            parent_id=self.parent_id,
        )


_current: ContextVar[EpisodeContext | None] = ContextVar("turnwise_episode", default=None)


def current_context() -> EpisodeContext | None:
    """The episode (or branch) that this coroutine runs in; ``None`` outside of episodes."""
    return _current.get()


@contextlib.contextmanager
def inside(context: EpisodeContext) -> Iterator[EpisodeContext]:
    """Make ``context`` the current one for the block, and for the tasks started in it."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


_PLAIN = frozenset({type(None), bool, int, float, str, list, dict})


async def resolve(value: Any) -> Any:
    """``value``, awaited if it can be: hooks may be written with ``def`` or ``async def``."""
    if type(value) in _PLAIN:  # what nearly all hooks return, and ``isawaitable`` is slow
        return value
    return await value if inspect.isawaitable(value) else value


def outlasting(value: Any) -> Any:
    """``value`` in plain containers if it comes out of an episode's data, which may be gone before ``value`` is."""
    facades = (StateDict, StateList)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return to_python(value) if type(value) in facades or any(type(part) in facades for part in parts) else value


def content_key(value: Any) -> Hashable:
    """A hashable that is equal for equal content: the identity of a question when no ``group_id`` is given.

    Types count, so ``1``, ``1.0`` and ``True`` differ. Raises ``TypeError`` for an object that can't be keyed.
    """
    if value is None or isinstance(value, (str, bytes)):
        return value
    if isinstance(value, (bool, int, float, complex)):
        return (type(value).__name__, value)
    if isinstance(value, Artifact):
        return ("artifact", value.id)
    if isinstance(value, (list, tuple)):
        # Not type(value): a facade of a list is a list here too.
        return (value.__class__.__name__, *map(content_key, value))
    if isinstance(value, dict):
        return ("dict", frozenset((content_key(key), content_key(item)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(map(content_key, value)))
    if isinstance(value, np.ndarray):
        return ("ndarray", str(value.dtype), value.shape, value.tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__qualname__, *((f.name, content_key(getattr(value, f.name))) for f in fields(value)))
    if isinstance(value, Hashable):
        return value
    raise TypeError(
        f"artifact of type {type(value).__name__!r} can't be told apart from others: give the request a group_id, "
        "the same for all copies of one question"
    )
