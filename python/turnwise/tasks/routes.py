"""Games of moves on a grid for a team, what they have in common: one suggests a route, the last one's is walked."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field, field_validator

from turnwise.arena import MultiTurnEpisode, TreeSampler
from turnwise.tasks.base import TeamOptions
from turnwise.types import EpisodeState, Message, Messages

Role = Literal["tool", "planner", "solver"]
TEAM: tuple[Role, ...] = ("tool", "planner")
MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""The letter of each move, and how it changes row and column."""

_SUGGESTION = "\nRoute: "


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------
_SEPARATORS = re.compile(r"[\s,;|>\-\u2192\[\]()'\"`*.]+")
_LABEL = re.compile(r"\s*[*_]*[A-Za-z][A-Za-z ]*[*_]*:")
_WORDS = {"UP": "U", "DOWN": "D", "LEFT": "L", "RIGHT": "R"}
_LETTERS = re.compile(rf"[{''.join(MOVES)}]+")


def format_route(route: str) -> str:
    """The moves with blanks between them: ``"RRD"`` is written ``"R R D"``, a token each."""
    return " ".join(route)


def parse_route(text: str) -> str | None:
    """The route on the last line of ``text`` that holds moves and nothing else, or ``None``.

    Moves are the capitals ``UDLR`` or the words up, down, left and right; blanks, commas, arrows, brackets and a label
    before a colon do not matter.

    Example: ``parse_route("I go round the wall.\\nMoves: [up, up, RIGHT]") == parse_route("U U R") == "UUR"``
    """
    for line in reversed(text.splitlines()):
        parts = [part for part in _SEPARATORS.split(_LABEL.sub("", line, count=1)) if part]
        moves = [_read_moves(part) for part in parts]
        if moves and None not in moves:
            return "".join(move for move in moves if move is not None)
    return None


def _read_moves(part: str) -> str | None:
    return part if _LETTERS.fullmatch(part) else _WORDS.get(part.upper())


def board_message(board: str, route: str | None = None) -> Message:
    """The board as it stands, and the suggested route where there is one. Nothing else of the episode is shown."""
    return {"role": "user", "content": board + (_SUGGESTION + format_route(route) if route else "")}


def read_board(messages: Messages) -> tuple[str, str | None]:
    """The board and the suggestion back from a prompt of :func:`board_message`."""
    board, _, route = messages[-1]["content"].partition(_SUGGESTION)
    return board, parse_route(route)


# ---------------------------------------------------------------------------------------------------------------------
# Play
# ---------------------------------------------------------------------------------------------------------------------
class Outcome(Protocol):
    """What an action came to: a named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


class StepResult(Protocol):
    """What a step of the environment gives back."""

    @property
    def outcome(self) -> Outcome: ...


class RouteEnv(Protocol):
    """The part of an environment that the players act on."""

    @property
    def solved(self) -> bool: ...

    def observe(self) -> str: ...

    def preview(self, route: str | None) -> Outcome: ...

    def step(self, route: str | None) -> StepResult: ...


class RouteEpisode(MultiTurnEpisode):
    """One board, played by ``actors`` in order for up to ``max_turns`` rounds, until it is solved (AT-GRPO).

    Each action is a route. The last actor's is walked; what the others reply is the suggestion that the next one sees,
    and AT-GRPO's tool agent, which there runs a program, here names its route itself. One that can't be read leaves
    suggestion and board as they were. A step earns ``reward_of`` what its route came to, a suggestion's what it would
    come to if it were walked.

    A game says how an artifact begins (``start``), where its environment is in ``state.data`` (``environment``), and
    what an outcome earns (``reward_of``), and brings its rubric.
    """

    def __init__(self, *, actors: Sequence[str] = TEAM, max_turns: int = 3, sampler: TreeSampler | None = None) -> None:
        super().__init__(sampler=sampler, max_turns=max_turns)
        self.actors = tuple(actors)

    @abstractmethod
    def start(self, artifact: Any) -> dict[str, Any]:
        """What ``state.data`` holds of the game before anybody acts."""

    @abstractmethod
    def environment(self, state: EpisodeState) -> RouteEnv:
        """The environment of ``state``: what it walks is written to ``state.data``."""

    @abstractmethod
    def reward_of(self, outcome: Mapping[str, Any]) -> float:
        """What an action of this outcome earns."""

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {**self.start(artifact), "route": None, "outcomes": {}}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        """The board and the suggestion alone; the arena puts the actor's system prompt in front."""
        return [board_message(self.environment(state).observe(), state.data["route"])]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        data, actor = state.data, state.current_actor
        env, route = self.environment(state), parse_route(state.last_completion_text)
        if actor == self.actors[-1]:
            outcome, data["route"] = env.step(route).outcome, None
        else:
            outcome, data["route"] = env.preview(route), route or data["route"]
        data["outcomes"].setdefault(actor, []).append(outcome._asdict())

    def step_reward(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        return self.reward_of(state.data["outcomes"][state.current_actor][-1])

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return self.environment(state).solved


def mean_of(outcomes: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of one field over an actor's outcomes."""
    return sum(outcome[name] for outcome in outcomes) / len(outcomes)


def solved(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 for every actor of the team where the board was solved, acted or not."""
    return extras["solved"]


def closeness(extras: dict[str, Any]) -> dict[str, float]:
    """How close to the end each actor's last action led: 1 at the end, 0 no closer than the start."""
    return extras["closeness"]


def valid_format(extras: dict[str, Any]) -> dict[str, float]:
    """The share of each actor's completions that held a route."""
    return extras["valid"]


def legal_moves(extras: dict[str, Any]) -> dict[str, float]:
    """The share of the moves of each actor's routes that could be walked, averaged over its completions."""
    return extras["legal"]


class RouteOptions(TeamOptions):
    """Options of every such game; ``actors = ["solver"]`` with ``max_turns = 1`` is the single agent.

    ``step_cost`` is taken for every move, ``shaping`` rewards being closer to the end, as the game says.
    """

    actors: tuple[Role, ...] = Field(default=TEAM, min_length=1)
    max_turns: int = Field(default=3, ge=1)
    max_tokens: int = Field(default=64, ge=1)
    shaping: float = Field(default=0.0, ge=0)
    step_cost: float = Field(default=0.01, ge=0)

    @field_validator("actors")
    @classmethod
    def _a_walker_last(cls, actors: tuple[Role, ...]) -> tuple[Role, ...]:
        if actors[-1] == "tool":
            raise ValueError("expected the planner or the solver last, whose routes are walked")
        return actors
