"""One board that actors play in turns: some suggest routes, and the route of the last one is walked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from turnwise.arena import MultiTurnEpisode, RewardMix, RewardParts, Rubric, TreeSampler
from turnwise.arena.rewards.rubric import SHARE
from turnwise.tasks.routes.scoring import RouteEnv, RouteOutcome, RouteScoring
from turnwise.tasks.routes.text import board_message, check_note, failure_note, parse_route
from turnwise.tasks.teams import solved, valid_format
from turnwise.types import EpisodeState, Messages

Role = Literal["tool", "planner", "solver"]
TEAM: tuple[Role, ...] = ("tool", "planner")


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
        shares = dict.fromkeys((solved, closeness, legal_moves), SHARE)
        self.rubric = Rubric([goal, gained, *measured], weights, own=[gained], valid=[valid_format], ranges=shares)

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
