"""A play of a foreign environment, what it shows at each node, the game that starts plays, and its options."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from pydantic import Field

from turnwise.arena import InvalidActionError
from turnwise.arena.rewards.invalid_action import parsing
from turnwise.integrations.environments.base.texts import listed_moves, read_move, with_moves
from turnwise.tasks import TaskOptions
from turnwise.utils.registry import import_by_name


class ForeignOptions(TaskOptions):
    """Options in ``[task_options]`` of every foreign environment.

    Example: ``ForeignOptions(name="FrozenLake-v1", arguments={"is_slippery": False})``
    """

    name: str = Field(min_length=1)
    """Text after the colon of ``task``: the package's own name of the environment."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the package's function that makes the environment."""
    render: str = ""
    """``"module:function"`` that makes an observation a text: ``render(observation) -> str``."""
    parse: str = ""
    """``"module:function"`` that reads a move: ``parse(text, legal) -> action``, or ``None`` if there is none."""
    prompt: str = ""
    """System prompt of every actor; by default a sentence about the format."""
    memory: int = Field(default=0, ge=0)
    """Number of an actor's own earlier turns in its prompt."""
    opponent: Literal["random", "none"] = "random"
    """Player of the other seats of a competitive game in evaluations; with ``"none"`` the model plays all."""
    success: float | None = None
    """Total reward from which a play counts as a success; by default any reward above 0."""
    invalid_cost: float | None = Field(default=None, ge=0)
    """Reward that an illegal move loses; the default depends on the environment."""
    max_turns: int | None = Field(default=None, ge=1)
    """Rounds after which the play is cut off; the default depends on the environment."""
    max_tokens: int = Field(default=64, ge=1)
    """Limit of a completion, in tokens."""


@dataclass(frozen=True, slots=True)
class PlayView:
    """Observation of a play at one node. A fork and its replay must have equal views.

    Example: ``PlayView("player0", "Your card: K", ("check", "bet"), (("player0", 0.0), ("player1", 0.0)))``
    """

    actor: str
    """Id of the actor to act; empty once the play is over."""
    text: str
    """The actor's observation."""
    legal: tuple[str, ...] | None
    """Names of the legal moves; ``None`` if any text can be a move."""
    rewards: tuple[tuple[str, float], ...]
    """Sum of the rewards so far, by actor."""
    terminated: bool = False
    """The environment reached its own end."""
    truncated: bool = False
    """The environment cut the play off."""

    @property
    def is_over(self) -> bool:
        return not self.actor


class Play(ABC):
    """One play of an environment, changed in place."""

    was_legal: bool = True
    """False if the environment itself counted the last action as illegal and went on by its own rule."""

    @abstractmethod
    def look(self) -> PlayView:
        """Return what the play shows now. Called once at the start, and once after each action."""

    @abstractmethod
    def act(self, action: Any) -> None:
        """Do an action of the actor to act. Raises :class:`InvalidActionError` if the environment refuses it."""

    def close(self) -> None:  # noqa: B027 - most plays hold nothing
        """Free what the play holds outside of this process."""


class ForkMethod(ABC):
    """A method to fork a play."""

    @abstractmethod
    def fork(self, game: ForeignGame, play: Play | None) -> Play | None:
        """Return a fork of ``play``, or ``None`` if the fork is replayed on its first use."""


class ForeignGame(ABC):
    """An environment with its settings. It holds no play, and is pickled by its options alone.

    A subclass sets the attributes below in ``__init__``.
    """

    name: str
    """Name of the task, for example ``"gymnasium:FrozenLake-v1"``."""
    actors: tuple[str, ...]
    """Ids of the actors, in the order in which they first act."""
    max_turns: int = 100
    """Rounds after which the episode is cut off, unless ``options.max_turns`` is set."""
    invalid_cost: float = 1.0
    """Reward that an illegal move loses, unless ``options.invalid_cost`` is set."""
    is_competitive: bool = False
    """The actors play against each other."""
    is_blocking: bool = True
    """Calls may take long, so they run in threads: one call of a play at a time, each in any thread."""
    fork_methods: tuple[ForkMethod, ...] = ()
    """Methods to fork a play, the cheapest first; :func:`choose_fork_method` takes the first one that is proved."""
    unforkable: str = ""
    """Reason why no play can be forked."""

    def __init__(self, options: ForeignOptions) -> None:
        self.options = options
        self.set_limits(self.max_turns, self.invalid_cost)
        self.fork_method: ForkMethod | None = self.fork_methods[-1] if self.fork_methods else None
        self.render = named_function(options.render, "render")
        self.parse = named_function(options.parse, "parse")

    def set_limits(self, max_turns: int, invalid_cost: float) -> None:
        """Set the defaults of both limits, which the options override."""
        options = self.options
        self.max_turns = options.max_turns or max_turns
        self.invalid_cost = invalid_cost if options.invalid_cost is None else options.invalid_cost

    def __reduce__(self) -> Any:
        return type(self), (self.options,), {"fork_method": self.fork_method}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fork_method = state["fork_method"]

    @abstractmethod
    def start(self, seed: int) -> Play:
        """Start a play. Equal seeds and actions give equal views, unless ``unforkable`` says otherwise."""

    def copy(self, play: Any) -> Play:
        """Return an independent copy of ``play``. Only games with the fork method :class:`Copies` need it."""
        raise NotImplementedError(f"{type(self).__name__}.copy")

    def system_prompt(self, actor: str) -> str:
        """Return the system prompt of ``actor``: the option ``prompt``, or a sentence about the format."""
        _, _, title = self.name.partition(":")
        return self.options.prompt or f"You play {title} as {actor}. Reply with one legal move in brackets."

    def read(self, text: str, view: PlayView) -> Any:
        """Return the action that a completion names. Raises :class:`InvalidActionError` if it names no legal one."""
        if not text.strip():
            raise InvalidActionError("no move in an empty answer")
        if self.parse is not None:
            with parsing():
                action = self.parse(text, view.legal)
        else:
            action = text.strip() if view.legal is None else read_move(text, view.legal)
        if action is None:
            raise InvalidActionError(f"no move in {text[:80]!r}")
        if view.legal is not None and action not in view.legal:
            raise InvalidActionError(f"illegal move {action!r}"[:200])
        return action

    def moves_in(self, prompt: str) -> list[str]:
        """Return the replies among which a random player draws, from a prompt of the acting actor."""
        return listed_moves(prompt)

    def random_reply(self, view: PlayView, rng: Random) -> str:
        """Return a random reply, for the random player and for the proof of a fork method."""
        moves = self.moves_in(with_moves(view.text, view.legal))
        if not moves:
            raise ValueError(f"task {self.name!r} lists no moves here: expected opponent = 'none', without trees")
        return rng.choice(moves)


@contextmanager
def closed_on_error(env: Any) -> Iterator[None]:
    """Close ``env`` if the block fails: its play is not there yet, so nothing else would."""
    try:
        yield
    except BaseException as error:
        try:
            env.close()
        except Exception as second:
            error.add_note(f"and then it could not be closed: {second!r}")
        raise


def named_function(name: str, option: str) -> Callable[..., Any] | None:
    """Import ``"module:function"``; ``None`` for an empty name. Raises ``ValueError`` for anything else."""
    if not name:
        return None
    function: Any = import_by_name({}, name, f"task_options.{option}")
    if not callable(function):
        raise ValueError(f"task_options.{option}={name!r}: expected a function, got {function!r}")
    return function


def require(module: str, extra: str) -> Any:
    """Import ``module``. Raises ``ImportError``, one sentence that names the ``extra``, if a package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = f"{module} needs {error.name}, which is not installed"
        raise ImportError(f"{missing}: pip install 'turnwise[{extra}]'") from error


def totals(actors: Sequence[str], rewards: dict[str, float]) -> tuple[tuple[str, float], ...]:
    """Return the rewards of ``actors`` as :attr:`PlayView.rewards`; an actor without any has 0."""
    return tuple((actor, float(rewards.get(actor, 0.0))) for actor in actors)
