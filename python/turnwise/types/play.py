"""Who plays, and what happened: actors, steps, rollouts, and episodes from the request to the result."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.copies import deep_copy
from turnwise.types.model_calls import FinishReason, Messages, PolicyVersions, Sampling


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


@dataclass(slots=True)
class Step:
    """One model call of an episode.

    ``turn`` counts rounds from 0: a new one begins when the next actor has already acted in the present one.
    ``branch`` is the index among siblings of a tree (0 without one); ``parent`` names the node of the tree that the
    siblings grew from; ``origin`` is the branch that led to this call's state, as its (parent, branch), ``None`` before
    the first node; ``selected`` says whether the episode's own trajectory holds the step. ``reward`` is this step's own
    reward, ``None`` until scored: then its actor's by :meth:`Rollout.rewards_of`. Where it was given token by token, it
    is their sum, and ``info["token_rewards"]`` has them. ``group`` overrides the group key that a credit rule would
    build.

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
        """``n`` independent copies. Finished steps and child results are shared, ``data`` is copied.

        Raises ``TypeError`` for data whose copies would not be what it is, as those of an
        environment that pickles by its constructor.
        """
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
            data=deep_copy(self.data),
        )


@dataclass(slots=True)
class Artifact:
    """A thing that episodes work on, as a store keeps it. ``source`` is the rollout that made it, ``parents`` holds the
    ids of the artifacts that it was made from. Rollouts are numbered anew in each run: in a file that several write to,
    ``run`` says whose ``source`` is.

    Example: ``Artifact(id="q-3", data={"question": "2 + 2 = ?", "answer": "4"}, source="r-17", parents=("q-1",))``
    """

    id: str
    data: Any
    weight: float = 1.0
    source: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    run: str | None = None
