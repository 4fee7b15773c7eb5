"""The facts that turnwise notes of model calls, episodes and requests, beside the users' own ``info`` and ``meta``.

A fact is a typed field, so that a misspelt one is an error. ``info`` and ``meta`` belong to the author of the episode,
apart from the keys of :data:`INFO_KEYS` and :data:`META_KEYS`, which the documentation names.

Records show both in one dict, as they did before facts had fields: :meth:`WithFacts.recorded` joins them, and
:func:`separate` is the one place that takes them apart again, in new records as in older ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, NotRequired, Self, TypedDict, TypeVar

from turnwise.types.model_calls import RoutedExperts, SamplingMask

INFO_KEYS = {
    "rewards": "set by an episode for the rule gdpo: rewards by name",
    "state": "set by an episode for the rule gigpo: the anchor state",
    "loss_mask": "set by an episode: 1 for each token of the completion that trains, else 0",
    "token_advantages": "set by an episode or by a teacher: what to add to the advantages of the tokens",
    "token_rewards": "the rewards of the tokens",
    "invalid_action": "the reason why the completion is no valid action",
    "shortened": "true if the chat was shortened to fit into the context",
    "handed": "what the action did to the team's answer",
    "round": "the number of the answer in its turn, with tools",
    "paid_others": "in a tree, what other actors got for the action at once, by actor",
    "paid_later": "the part of the reward that later actions of others brought",
    "selected_by": "in a tree, how the branch was selected",
    "ends": "in a tree, the numbers of the ends that the call led to",
    "playouts": "in a tree, the returns of the playouts from here",
    "order": "the number of the call in an agent's attempt",
    "call": "the number of the actor's call in an agent's attempt",
    "extends": "the actor's call whose tokens the prompt begins with",
    "rewritten": "why the chat began a new row",
    "carries": "the actor's call whose whole answer stands in the new chat",
}
"""Keys of ``step.info`` with a meaning: those that an episode sets, and those that turnwise sets to be read."""

META_KEYS = {
    "ended": "why the episode ended",
    "ends": "the ends of a tree",
    "group": "what the rubric's functions of rollouts said",
    "continues": "the id of the rollout that this one continues",
    "child": "whose sub-agent's trajectory this is",
    "child_actors": "the actors of the sub-agents that take the attempt's reward",
    "level": "set by a task: the level of a request's question",
    "artifact_id": "set by a task: the stored artifact that a request attempts",
}
"""Keys of ``rollout.meta`` and ``request.meta`` with a meaning, like :data:`INFO_KEYS`."""

USERS = "user:"
"""Begins the name, in a record, of an entry of a user that is called like a fact."""


class _Facts:
    __slots__ = ()

    def known(self) -> dict[str, Any]:
        """Return the facts that differ from their defaults, by name."""
        return {
            name: value
            for name, default in _DEFAULTS[type(self)].items()
            if (value := getattr(self, name)) is not default and (default is None or value != default)
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.known().items())})"

    def __getstate__(self) -> dict[str, Any]:
        return self.known()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        type(self).__init__(self, **state)  # facts that are newer than the pickle have their defaults


F = TypeVar("F", bound=_Facts)


class Question(TypedDict):
    """A curriculum's note about a drawn question. ``p`` is its solve rate, if it was attempted before."""

    question: str
    batch: int
    p: NotRequired[float]


class Match(TypedDict):
    """A league's note about a game: the step of the past policy, the seat of the live one, and both games' match."""

    member: int
    seat: str
    match: str


@dataclass(slots=True, repr=False)
class StepFacts(_Facts):
    """What turnwise notes of one model call.

    Example: ``StepFacts(temperature=1.0, seed=7, max_tokens=256)``
    """

    temperature: float | None = None
    seed: int | None = None
    """Seed of the sampling."""
    max_tokens: int | None = None
    """Limit of the completion, in tokens."""
    cached: bool = False
    """The client had the answer and sampled nothing."""
    grammar: str | None = None
    """Text of the grammar under which the tokens were sampled."""
    routed_experts: RoutedExperts | None = None
    """Experts that the tokens took, if the client returns them. No record has them."""
    cut: dict[str, float] | None = None
    """Settings of the sampling that left tokens out: top-p, top-k, min-p."""
    sampling_mask: SamplingMask | None = None
    """The tokens that they kept, if the client returns them. No record has them."""
    private: list[str] | None = None
    """Texts of the prompt that only some actors may see."""
    greedy: bool = False
    """Sampled greedily in a run that trains, so its tokens are no draws from the policy."""
    error: str | None = None
    """Why the step does not train although its episode is valid."""
    unpaid: bool = False
    """The episode ended before the step was paid: by another actor's invalid action, or at its context."""
    env_response: str | None = None
    """What the environment said to an action; ``None`` for a call that a hook made."""
    context: str | None = None
    """Error of the results of tools that left no room in the context."""
    tool_calls: list[str] | None = None
    """Status of each call of a tool in the answer."""
    illegal_move: str | None = None
    """Why the completion is no legal move of the environment."""
    trace: str | None = None
    """Id of the run of an agent, in an environment of verifiers."""
    continued: bool = False
    """A later chat of the agent goes on from this answer."""
    lost: bool = False
    """The agent never got the answer."""
    team_difference: float | None = None
    """Value of the team's answer after the action minus before it, without its weight."""
    unshaped_reward: float | None = None
    """Part of the reward that turn shaping does not change: difference and cost."""
    turn_factor: float | None = None
    """Factor of the turn, once it is applied."""
    overlong_penalty: float | None = None
    """What the completion lost as it came close to its token limit."""
    raw_reward: float | None = None
    """Reward of the step before that penalty."""
    teacher_kl: float | None = None
    """Mean of the tokens' log-probabilities minus the teacher's."""
    ledger: list[list[Any]] | None = None
    """What changed the reward or the advantage, in order: ``[what, name, before, after]``, ``what`` is ``"reward"`` or
    ``"advantage"``."""

    @property
    def sampled_from_all(self) -> bool:
        """False where a grammar, or top-p, top-k or min-p, left tokens out of the distribution."""
        return self.grammar is None and self.cut is None


@dataclass(slots=True, repr=False)
class RequestFacts(_Facts):
    """What turnwise notes of a request, and of the rollout of its episode.

    Example: ``RequestFacts(task="sudoku")``
    """

    task: str | None = None
    """Name of the task, in a run with several."""
    curriculum: Question | None = None
    """The question that a curriculum drew."""
    league: Match | None = None
    """The match that a league set up."""


@dataclass(slots=True, repr=False)
class RolloutFacts(RequestFacts):
    """What turnwise notes of one episode, with the facts of its request.

    Example: ``RolloutFacts(policy_versions={"default": 7})``
    """

    policy_versions: dict[str, int] = field(default_factory=dict)
    """Versions of the policies when the top episode began."""
    policies: dict[str, str] = field(default_factory=dict)
    """Policies that replace those of the actors, by actor."""
    attempt: int = 0
    """Number of earlier attempts, which failed."""
    lost_tokens: int = 0
    """Tokens sampled in these."""
    mishaps: dict[str, int] | None = None
    """Counts of what went wrong, by metric."""
    dropped: str | None = None
    """Why the rubric dropped the rollout."""
    draw: int | None = None
    """Number of the draw of dynamic sampling, from 0."""
    drop_reason: str | None = None
    """Why dynamic sampling left the question out: ``"over_quota"`` or ``"resample"``."""
    raw_rewards: dict[str, float] | None = None
    """Rewards by actor before the penalty of long completions."""
    spawned_by: Sequence[int] | None = None
    """Branch of the parent's tree that spawned the episode, as (tree node, branch)."""
    own_end: int | None = None
    """Number of the tree's selected end; ``None`` if all count."""
    playouts: list[dict[str, Any]] | None = None
    """Returns of the playouts from the first state."""
    ledger: list[list[Any]] | None = None
    """What changed the rewards, in order: ``[actor, name, before, after]``."""


_DEFAULTS: dict[type, dict[str, Any]] = {
    kind: {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(kind)
    }
    for kind in (StepFacts, RequestFacts, RolloutFacts)
}


def separate(kind: type[F], recorded: Mapping[str, Any]) -> tuple[F, dict[str, Any]]:
    """Return the facts in an ``info`` or ``meta`` of a record, and the user's own entries.

    Example: ``separate(StepFacts, {"seed": 7, "hint": "a"}) == (StepFacts(seed=7), {"hint": "a"})``
    """
    names = _DEFAULTS[kind]
    facts = {key: value for key, value in recorded.items() if key in names}
    own = {
        key.removeprefix(USERS) if isinstance(key, str) and key.removeprefix(USERS) in names else key: value
        for key, value in recorded.items()
        if key not in names
    }
    return kind(**facts), own


class WithFacts:
    """A step, rollout or request: a dataclass with ``facts`` and with a dict of its user, ``info`` or ``meta``."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _own: ClassVar[str]
    """Name of the user's dict."""
    _facts: ClassVar[type[_Facts]]
    facts: Any

    def recorded(self, **others: Any) -> dict[str, Any]:
        """Return the fields by name as records have them, with the facts among the user's entries.

        ``others`` stand in place of fields, which are then not read.
        """
        names = [name for name in self.__dataclass_fields__ if name not in ("facts", self._own)]
        known = {name: others[name] if name in others else getattr(self, name) for name in names}
        facts, users = _DEFAULTS[self._facts], getattr(self, self._own)
        own = {f"{USERS}{key}" if key in facts else key: value for key, value in users.items()}
        return {**known, self._own: {**self.facts.known(), **own}}

    @classmethod
    def of_record(cls, row: Mapping[str, Any]) -> Self:
        """Return the object that :meth:`recorded` described, or a record from before facts had fields."""
        facts, own = separate(cls._facts, row[cls._own])
        return cls(**{**row, cls._own: own, "facts": facts})

    def __setstate__(self, state: tuple[None, Mapping[str, Any]]) -> None:
        values = state[1]
        for name, value in values.items():
            setattr(self, name, value)
        if "facts" not in values:  # a pickle of before
            facts, own = separate(self._facts, values[self._own])
            self.facts = facts
            setattr(self, self._own, own)
