"""Common parts of games with moves on a grid: actors suggest routes, and the last actor's route is walked."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import Field, field_validator

from turnwise.arena import Episode, MultiTurnEpisode, RewardMix, RewardParts, Rubric, TreeSampler
from turnwise.tasks.base import Demonstration, Player, check_demonstrations
from turnwise.tasks.generated import texts_of
from turnwise.tasks.teams import TeamOptions, TeamTask, solved, valid_format
from turnwise.types import EpisodeState, Message, Messages

Role = Literal["tool", "planner", "solver"]
TEAM: tuple[Role, ...] = ("tool", "planner")
MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""The letter of each move, and how it changes row and column."""

_SUGGESTION, _CHECK, _BOARD = "Route: ", "Checked: ", "Board:\n"


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------
_SEPARATORS = re.compile(r"[\s,;|>\-\u2192\[\]()'\"`*.]+")
_LABEL = re.compile(r"[^A-Za-z0-9:]*+[A-Za-z][A-Za-z ]*+[*_]*+:")  # possessive: its time grows with the line alone
_WORDS = {"UP": "U", "DOWN": "D", "LEFT": "L", "RIGHT": "R"}
_LETTERS = re.compile(rf"[{''.join(MOVES)}]+")


def format_route(route: str) -> str:
    """Write the moves with blanks between them, so that each is a token: ``"RRD"`` becomes ``"R R D"``."""
    return " ".join(route)


def parse_route(text: str) -> str | None:
    """Parse the route from the last line of ``text`` that holds only moves; ``None`` without one.

    Moves are the capitals ``UDLR`` or the words up, down, left and right. Blanks, commas, arrows, brackets and a label
    before a colon are ignored.

    Example: ``parse_route("I go round the wall.\\nMoves: [up, up, RIGHT]") == parse_route("U U R") == "UUR"``
    """
    for line in reversed(text.splitlines()):
        label = _LABEL.match(line)
        parts = [part for part in _SEPARATORS.split(line[label.end() :] if label else line) if part]
        moves = [part if _LETTERS.fullmatch(part) else _WORDS.get(part.upper()) for part in parts]
        if moves and None not in moves:
            return "".join(move for move in moves if move is not None)
    return None


def describe_failure(outcome: Mapping[str, Any]) -> str:
    """Describe how far a failed route went, and the move that stopped it.

    Example: ``"3 moves, then R is blocked"``, ``"4 moves"`` or ``"no moves read"``
    """
    if not outcome["valid"]:
        return "no moves read"
    made = f"{outcome['moves']} move{'' if outcome['moves'] == 1 else 's'}"
    return f"{made}, then {outcome['blocked']} is blocked" if outcome["blocked"] else made


def failure_note(turn: int, walked: Mapping[str, Any], suggested: Mapping[str, Any] | None = None) -> str:
    """Note for the prompt after ``turn`` rounds: how the last walk failed, and the suggester's route.

    Example: ``"Round 2. Walked: 1 move, then R is blocked. Suggested: no moves read."``
    """
    suggestion = "" if suggested is None else f" Suggested: {describe_failure(suggested)}."
    return f"Round {turn + 1}. Walked: {describe_failure(walked)}.{suggestion}"


def check_note(outcome: Mapping[str, Any]) -> str:
    """Describe what a suggestion would do: ``"it works"``, or as :func:`describe_failure` does."""
    return "it works" if outcome["goal"] else describe_failure(outcome)


def board_message(board: str, route: str | None = None, note: str = "", check: str = "") -> Message:
    """Write the failure of the last round (``note``), the suggested ``route`` with its ``check``, and the board.

    The board comes last. Each of its cells is then a fixed number of tokens before the reply, in the prompts of all
    actors and rounds, so a tiny model learns to read it only once.
    """
    lines = [note] if note else []
    lines += [_SUGGESTION + format_route(route)] if route else []
    lines += [f"{_CHECK}{check}."] if route and check else []
    return {"role": "user", "content": "\n".join([*lines, _BOARD + board]) if lines else board}


def read_board(messages: Messages) -> tuple[str, str | None]:
    """Parse the board and the suggestion from a prompt of :func:`board_message`."""
    notes, _, board = messages[-1]["content"].rpartition(_BOARD)
    routes = [line for line in notes.splitlines() if line.startswith(_SUGGESTION)]
    return board, parse_route(routes[-1]) if routes else None


# ---------------------------------------------------------------------------------------------------------------------
# Play
# ---------------------------------------------------------------------------------------------------------------------
class RouteOutcome(NamedTuple):
    """Outcome of one action.

    ``valid``: a route could be read. ``legal``: the share of its moves that were made before one was blocked or the
    board was solved; 1 if nothing was read. ``closeness``: the potential of the resulting state, 1 for a solved board,
    falling to 0 with the true distance from it. ``gained``: the increase of closeness. ``goal``: the value of the
    solution, 0 without one. ``moves``: the number of moves made. ``blocked``: the blocked move, if one ended the route.
    """

    valid: bool
    legal: float
    closeness: float
    gained: float
    goal: float
    moves: int
    blocked: str = ""


def outcome_of(route: str | None, made: int, *, before: float, after: float, goal: float) -> RouteOutcome:
    """Compute the outcome of ``route``, of which ``made`` moves were made, from the closeness before and after."""
    named = len(route or "")
    return RouteOutcome(
        valid=named > 0,
        legal=made / named if named else 1.0,
        closeness=after,
        gained=after - before,
        goal=goal,
        moves=made,
        blocked=route[made] if route and made < named and not goal else "",
    )


@dataclass(frozen=True, slots=True)
class RouteScoring:
    """Parts of an action's reward: the solution's value for the team, ``shaping * gained`` for the actor.

    ``gained`` is potential-based shaping ``phi(s') - phi(s)`` over the true distance (Ng, Harada and Russell 1999,
    without discount). Its sum over a walk depends only on start and end, so a detour neither costs nor pays, and an
    action that leaves the distance unchanged earns 0. Moves have no price. In a group where no board is solved, a small
    price alone would decide, and dividing by the group's deviation would make it as large as success. ``gained`` is
    above -1, so by default a readable route never earns less than an unreadable one.
    ``mix`` weighs the parts in an environment's own rewards, where no arena does. Raises ``ValueError`` for a negative
    ``shaping``.

    Example: ``RouteScoring(shaping=0.5)`` pays 1.125 for a solution of value 1 that gains 0.25 of closeness.
    """

    shaping: float = 1.0
    mix: RewardMix = RewardMix(invalid_cost=1.0)  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.shaping >= 0:
            raise ValueError(f"shaping={self.shaping!r}: expected a number >= 0")

    def parts(self, outcome: RouteOutcome) -> RewardParts:
        return RewardParts(outcome.goal, self.shaping * outcome.gained, outcome.valid)

    def reward(self, outcome: RouteOutcome) -> float:
        return self.mix.of(self.parts(outcome))


class StepResult(NamedTuple):
    """Result of a step: the board after it, its reward, whether the board is solved, and its outcome."""

    observation: str
    reward: float
    done: bool
    outcome: RouteOutcome


class RouteEnv(Protocol):
    """The part of an environment that the players act on."""

    @property
    def solved(self) -> bool: ...

    @property
    def closeness(self) -> float: ...

    def observe(self) -> str: ...

    def preview(self, route: str | None) -> RouteOutcome: ...

    def step(self, route: str | None) -> StepResult: ...


class RouteEpisode(MultiTurnEpisode):
    """One board, played by ``actors`` in order for up to ``max_turns`` rounds, until it is solved (AT-GRPO).

    Each action is a route. The last actor's route is walked. The reply of another actor is the suggestion that the next
    one sees. (AT-GRPO's tool agent runs a program; here it names its route itself.) An unreadable reply leaves
    suggestion and board unchanged. From the second round on, every prompt says how and where the last walk failed. An
    actor that suggests also reads the same about its own route: see :func:`failure_note`.

    A step has the parts of ``scoring`` for its route; a suggestion earns what it would earn if it were walked.
    ``rubric`` pays a whole episode by the same measure: the team's outcome for every actor, the gain in closeness from
    the start to its last action, and a cost for the share of its unreadable replies. The team's value is the closeness
    that the suggestion would reach, or that of the board without one: a planner gains by fixing a bad suggestion.

    A game implements ``start`` (its data for an artifact) and ``environment`` (its environment in ``state.data``).
    """

    default_scoring: ClassVar[RouteScoring] = RouteScoring()
    mix = RewardMix(invalid_cost=1.0)

    def __init__(
        self,
        *,
        actors: Sequence[str] = TEAM,
        max_turns: int = 3,
        scoring: RouteScoring | None = None,
        sampler: TreeSampler | None = None,
    ) -> None:
        super().__init__(sampler=sampler, max_turns=max_turns)
        self.actors = tuple(actors)
        self.scoring = scoring or self.default_scoring
        measured = (solved, closeness, valid_format, legal_moves, moves)
        weights = [1.0, self.scoring.shaping, *(0.0 for _ in measured)]
        self.rubric = Rubric([goal, gained, *measured], weights, own=[gained], valid=[valid_format])

    @abstractmethod
    def start(self, artifact: Any) -> dict[str, Any]:
        """Return the game's part of ``state.data`` before the first action."""

    @abstractmethod
    def environment(self, state: EpisodeState) -> RouteEnv:
        """The environment of ``state``. Its moves change ``state.data``."""

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {**self.start(artifact), "route": None, "goal": 0.0, "outcomes": {}}
        state.data["before"] = self.environment(state).closeness

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        """Build the user message: failure of the last round, checked suggestion, board. The arena adds the system
        prompt."""
        data, actor, walker = state.data, state.current_actor, self.actors[-1]
        note = ""
        if state.turn:
            suggested = None if actor == walker != "tool" else data["outcomes"][actor][-1]
            note = failure_note(state.turn, data["outcomes"][walker][-1], suggested)
        env, route = self.environment(state), data["route"]
        check = check_note(env.preview(route)._asdict()) if route else ""
        return [board_message(env.observe(), route, note, check)]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        data, actor = state.data, state.current_actor
        env, route = self.environment(state), parse_route(state.last_completion_text)
        if actor == self.actors[-1]:
            outcome, data["route"] = env.step(route).outcome, None
            data["goal"] = outcome.goal
        else:
            outcome, data["route"] = env.preview(route), route or data["route"]
        data["outcomes"].setdefault(actor, []).append(outcome._asdict())

    def reward_parts(self, state: EpisodeState, arena: Any, artifact: Any) -> RewardParts:
        return self.scoring.parts(RouteOutcome(**state.data["outcomes"][state.current_actor][-1]))

    def team_value(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        return self.environment(state).preview(state.data["route"]).closeness

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return self.environment(state).solved

    def team_answer(self, state: EpisodeState, arena: Any, artifact: Any) -> tuple[str, bool] | None:
        """The suggestion, right if walking it from here solves the board; after a walk, its route and result."""
        data, env, walker = state.data, self.environment(state), self.actors[-1]
        if state.current_actor == walker and len(data["outcomes"].get(walker, ())) > state.turn:
            return parse_route(state.last_completion_text) or "", env.solved
        return None if data["route"] is None else (data["route"], env.preview(data["route"]).goal > 0)

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``solved`` and ``goal`` of the team; ``closeness``, ``gained``, ``valid``, ``legal``, ``moves`` by actor.

        ``closeness`` is that of an actor's last action, and ``gained`` its increase from the start. ``valid`` is the
        share of its completions that could be read, ``legal`` the share of their moves that could be made, and
        ``moves`` the number of these. ``rounds`` is the number of rounds.
        """
        data, outcomes = state.data, state.data["outcomes"]
        last = {actor: acted[-1]["closeness"] for actor, acted in outcomes.items()}
        return {
            "solved": dict.fromkeys(self.actors, float(self.environment(state).solved)),
            "goal": dict.fromkeys(self.actors, data["goal"]),
            "closeness": last,
            "gained": {actor: close - data["before"] for actor, close in last.items()},
            "valid": {actor: mean_of(acted, "valid") for actor, acted in outcomes.items()},
            "legal": {actor: mean_of(acted, "legal") for actor, acted in outcomes.items()},
            "moves": {actor: sum(act["moves"] for act in acted) for actor, acted in outcomes.items()},
            "rounds": 1 + max((step.turn for step in state.trajectory), default=0),
        }


def mean_of(outcomes: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of one field over an actor's outcomes."""
    return sum(outcome[name] for outcome in outcomes) / len(outcomes)


def goal(extras: dict[str, Any]) -> dict[str, float]:
    """Value of the team's solution, 0 without one, for every actor of the team, even if it never acted."""
    return extras["goal"]


def closeness(extras: dict[str, Any]) -> dict[str, float]:
    """Closeness to the end after each actor's last action, by the true distance: 1 at the end, 0 farthest from it."""
    return extras["closeness"]


def gained(extras: dict[str, Any]) -> dict[str, float]:
    """Gain in closeness from the start to each actor's last action."""
    return extras["gained"]


def legal_moves(extras: dict[str, Any]) -> dict[str, float]:
    """The share of the moves of each actor's routes that could be made, averaged over its completions."""
    return extras["legal"]


def moves(extras: dict[str, Any]) -> dict[str, float]:
    """Number of moves of each actor's routes."""
    return extras["moves"]


class RouteOptions(TeamOptions):
    """Options of every game of routes; ``actors = ["solver"]`` with ``max_turns = 1`` is the single agent.

    ``shaping`` rewards an action for leading closer to the end by the true distance, see :class:`RouteScoring`.
    ``answers`` is the number of demonstrations of each prompt. The first demonstrations, a share ``clean`` of them,
    have quality 1: with ``warm_start.shuffle = false`` a model first learns to play, then the faults.
    """

    actors: tuple[Role, ...] = Field(default=TEAM, min_length=1)
    max_turns: int = Field(default=3, ge=1)
    max_tokens: int = Field(default=64, ge=1)
    shaping: float = Field(default=RouteScoring().shaping, ge=0)
    answers: int = Field(default=1, ge=1)
    clean: float = Field(default=0.0, ge=0, le=1)

    @field_validator("actors")
    @classmethod
    def _a_walker_last(cls, actors: tuple[Role, ...]) -> tuple[Role, ...]:
        if actors[-1] == "tool" and len(actors) > 1:
            raise ValueError("expected the planner or the solver last, whose routes are walked, or the tool alone")
        return actors

    @property
    def scoring(self) -> RouteScoring:
        return RouteScoring(self.shaping)


# ---------------------------------------------------------------------------------------------------------------------
# Prompts and demonstrations
# ---------------------------------------------------------------------------------------------------------------------
LATER = 0.25  # share of the demonstrations that follow a failed round, which their prompt describes
SUGGESTED = 0.5  # chance that the suggestion shown to a planner is the shortest route, whatever the quality
UNREAD = 0.1  # share of the replies before a demonstration that could not be read


class RouteGame(NamedTuple):
    """The functions with which a game shows its boards and demonstrates its routes; a board is a maze or a level.

    ``show(board, state)`` writes the board, by default in its first state, and ``parse`` reads that text.
    ``best(board)`` is the route of a player that knows all. ``preview(board, route)`` returns a route's outcome.
    ``suggest(board, quality, rng, blocked)`` makes a route. ``decide(board, suggestion, quality, rng, blocked)`` makes
    the planner's route. ``failed_round(board, rng)`` returns the board after a failed round, with the outcomes of its
    walk and of its suggestion.
    """

    name: str
    system_prompts: Mapping[str, str]
    show: Callable[[Any, Any], str]
    parse: Callable[[str], Any]
    best: Callable[[Any], str]
    preview: Callable[[Any, str], RouteOutcome]
    suggest: Callable[[Any, float, Random, str], str]
    decide: Callable[[Any, str, float, Random, str], str]
    failed_round: Callable[[Any, Random], tuple[Any, RouteOutcome, RouteOutcome]]


def route_messages(
    game: RouteGame,
    actor_id: str,
    board: Any,
    state: Any = None,
    route: str | None = None,
    note: str = "",
    check: str = "",
) -> Messages:
    """Build the whole prompt of one call: the actor's instruction, and the board in ``state``.

    ``note`` says how the last round failed (:func:`failure_note`), and ``check`` what the suggested ``route`` would do
    (:func:`check_note`).
    """
    system: Message = {"role": "system", "content": game.system_prompts[actor_id]}
    return [system, board_message(game.show(board, state), route, note, check)]


def read_messages(game: RouteGame, messages: Messages) -> tuple[Any, str | None]:
    """Parse the board, which starts in the state shown, and the suggestion from a prompt of :func:`route_messages`.

    Raises ``ValueError`` for a prompt without a board.
    """
    board, route = read_board(messages)
    return game.parse(board), route


def demonstrate_routes(
    game: RouteGame,
    boards: Sequence[Any],
    actors: Sequence[str],
    seed: int | str,
    quality: float = 0.4,
    rounds: int = 3,
    answers: int = 1,
    clean: float = 0.0,
) -> list[Demonstration]:
    """Make ``answers`` demonstrations per board. The actors take turns.

    ``quality`` in [0, 1] is the chance that a route is the shortest. The first demonstrations, a share ``clean`` of
    them, have quality 1. Some demonstrations belong to a later one of the ``rounds``; they don't repeat the move that
    the prompt calls blocked. The answers to one prompt follow one another, so that a trie computes the prompt once.

    If ``quality`` is below one half, a fault by habit is the likeliest answer. A model that has learnt the
    demonstrations well then fails most boards when greedy and solves some when sampled. Reinforcement learning starts
    from there.
    """
    check_demonstrations(actors, quality)
    rng = Random(f"{game.name}-demonstrations/{seed}")
    made: list[Demonstration] = []
    for index, drawn in enumerate(boards):
        actor = actors[index % len(actors)]
        board, note, blocked = drawn, "", ""
        right = 1.0 if index < clean * len(boards) else quality
        if rounds > 1 and rng.random() < LATER:
            board, walked, suggested = game.failed_round(drawn, rng)
            shown = None if actor == actors[-1] else suggested._asdict()
            note, blocked = failure_note(rng.randrange(1, rounds), walked._asdict(), shown), walked.blocked
        suggestion = None
        if actor == "planner" and rng.random() >= UNREAD:
            suggestion = game.suggest(board, SUGGESTED, rng, blocked)
        check = check_note(game.preview(board, suggestion)._asdict()) if suggestion else ""
        messages = route_messages(game, actor, board, route=suggestion, note=note, check=check)
        for _ in range(answers):
            if suggestion:
                answer = game.decide(board, suggestion, right, rng, blocked)
            else:
                answer = game.suggest(board, right, rng, blocked)
            made.append((actor, messages, format_route(answer)))
    return made


class RouteTask(TeamTask):
    """A game of routes; see :class:`turnwise.tasks.base.Task` for what each method promises.

    A game sets ``game`` and ``episode_class`` and implements :meth:`draw`, :meth:`boards` and :meth:`random_player`.
    """

    game: ClassVar[RouteGame]
    episode_class: ClassVar[type[RouteEpisode]]
    options: Any

    @abstractmethod
    def boards(self, n: int, seed: str) -> Sequence[Any]:
        """Draw ``n`` training boards for demonstrations."""

    def episode(self, tree: TreeSampler | None = None) -> Episode:
        return self.episode_class(**self.options.of_episode(), scoring=self.options.scoring, sampler=tree)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        options = self.options
        boards = self.boards(-(-n // options.answers), f"{seed}")
        return demonstrate_routes(
            self.game, boards, options.actors, seed, options.quality, options.max_turns, options.answers, options.clean
        )[:n]

    def texts(self) -> list[str]:
        """Every role's prompts and replies. They don't depend on the chosen actors, so one tokenizer serves all."""
        boards = self.boards(60, "texts")
        return texts_of(demonstrate_routes(self.game, boards, tuple(self.system_prompts), "texts"))

    def oracle(self) -> Player:
        def play(actor_id: str, messages: Messages) -> str:
            return format_route(self.game.best(read_messages(self.game, messages)[0]))

        return play
