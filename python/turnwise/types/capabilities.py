"""Capabilities of clients, credit rules and tasks beyond their protocols.

Each object declares them once, as its ``capabilities``. Optional methods have their own protocols, which ``isinstance``
tests: those below, and :class:`turnwise.types.ScoringClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from turnwise.types.model_calls import Tokenizer

C = TypeVar("C", "ClientCapabilities", "CreditCapabilities", "TaskCapabilities")

DEFAULT_CREDIT = "at_grpo"
"""Credit rule of tasks that declare none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCapabilities:
    """An inference client's capabilities.

    Example: ``ClientCapabilities(fixed_policies=frozenset({"judge"}))``
    """

    shares_weights: bool = False
    """It samples with the trainer's own modules, so it can't sample while they change."""
    fixed_policies: frozenset[str] = frozenset()
    """Policies that accept no weights, such as a judge behind an API."""
    grammars: bool = False
    """It samples under ``Sampling.grammar``, and its log-probabilities are those over the allowed tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditCapabilities:
    """A credit rule's capabilities.

    Example: ``CreditCapabilities(trees=False, step_rewards=False)``
    """

    trees: bool = True
    """It can compare the siblings of a tree."""
    ends: bool = True
    """It distinguishes trajectories of one rollout (``select="none"``) by ``Sample.trajectory_key``."""
    step_rewards: bool = True
    """It compares rewards of single calls, so that a reward may differ by turn (``reward.turn_shaping``)."""
    mixed_rewards: bool = True
    """False if its advantages don't depend on the rewards of calls, as it reads the values of reward functions one by
    one, or none: settings of ``reward``, a KL in the reward and edges would change nothing."""
    values_of_states: bool = False
    """It needs values of states, estimated from branches or playouts."""
    whole_episodes: bool = False
    """It needs whole trees of episodes, and can't compute from a trainer's own columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCapabilities:
    """A task's capabilities.

    Example: ``TaskCapabilities(credit_rule="rae", seats=("player0", "player1"))``
    """

    credit_rule: str = DEFAULT_CREDIT
    """The rule that ``credit.rule = "task"`` selects."""
    credit_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this rule."""
    seats: tuple[str, ...] = ()
    """Actors that play against each other; the rubric may have a metric ``score/<seat>``, 0 to 1, for each."""
    measured: tuple[str, ...] = ()
    """Names other than the actors' for which the rubric makes metrics, such as ``model`` in ``score/model``."""


def capabilities_of(declaring: object, kind: type[C]) -> C:
    """Return ``declaring.capabilities``, or the defaults of ``kind`` for an object that declares none.

    Raises ``TypeError`` for a declaration of another type.
    """
    declared = getattr(declaring, "capabilities", None)
    if declared is None or isinstance(declared, property):  # the class of a task whose instances declare them
        return kind()
    if not isinstance(declared, kind):
        raise TypeError(f"capabilities={declared!r:.80}: expected a {kind.__name__}")
    return declared


@runtime_checkable
class MeasuredClient(Protocol):
    """A client that reports metrics of its work."""

    def stats(self) -> dict[str, float]:
        """Return totals since the start, by name."""
        ...

    def peaks(self) -> dict[str, float]:
        """Return the largest values since the last call, by name."""
        ...


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says of its queue and its memory now.

    Example: ``EngineReport(running=96, waiting=12, kv_cache_use=0.83, preemptions=4)``
    """

    running: int
    """Requests that it computes."""
    waiting: int
    """Requests that it has accepted and does not compute yet."""
    kv_cache_use: float
    """Share of its memory for keys and values that requests hold, 0 to 1."""
    preemptions: int
    """Requests that lost their keys and values and recompute them, since the engine's start."""
    prompt_tokens: int = 0
    """Tokens of all prompts since the engine's start, also of recomputed ones."""
    cached_tokens: int = 0
    """Those among them whose keys and values were in the prefix cache."""


@runtime_checkable
class ReportingClient(Protocol):
    """A client that can ask its engines for their load."""

    async def load(self) -> dict[str, EngineReport | None]:
        """Return the report of each engine that answers now, by its name; ``None`` for one that makes no reports."""
        ...


@runtime_checkable
class TokenizedClient(Protocol):
    """A client that has its own tokenizer."""

    tokenizer: Tokenizer | None


@runtime_checkable
class CheckedClient(Protocol):
    """A client that can ask its engine whether it is healthy."""

    async def check_health(self) -> None:
        """Raise ``ModelError`` or ``OSError`` if the engine is not healthy."""
        ...


@runtime_checkable
class RecoverableClient(Protocol):
    """A client that can send the last weights again."""

    async def recover(self) -> None:
        """Send the last weights again if the engine lost them."""
        ...


@runtime_checkable
class RoutedClient(Protocol):
    """A client that hands the requests of each policy to that policy's own client."""

    clients: dict[str, Any]
    """The clients by policy; one may serve several."""


@runtime_checkable
class PooledClient(Protocol):
    """A client of several engines."""

    def serving(self) -> Sequence[str]:
        """Return the names of the engines that serve now."""
        ...

    def versions(self) -> Mapping[str, Mapping[str, int]]:
        """Return for each engine that serves now the version of each policy that it acknowledged last."""
        ...
