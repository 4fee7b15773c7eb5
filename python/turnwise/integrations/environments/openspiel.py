"""Games of OpenSpiel in text: ``task = "openspiel:leduc_poker"``, or with parameters ``"goofspiel(num_cards=4)"``."""

from __future__ import annotations

import copy
from functools import cached_property
from random import Random
from typing import Any

from turnwise.integrations.environments.base.forks import Copies, Replays
from turnwise.integrations.environments.base.options import ForeignOptions
from turnwise.integrations.environments.base.play import Game, Play, View, require, totals
from turnwise.integrations.environments.base.task import ForeignTask, actor_ids
from turnwise.integrations.environments.base.texts import distinct
from turnwise.integrations.environments.openspiel_exact import ExactGame, unsolved_reason
from turnwise.tasks.two_player import Decision, Exploitability


class OpenSpielPlay(Play):
    """One play. Its own generator draws the outcomes of chance, so equal seeds have equal cards."""

    def __init__(self, game: OpenSpielGame, state: Any, rng: Random) -> None:
        self.game, self.state, self.rng = game, state, rng
        self._let_chance_act()

    def look(self) -> View:
        state, game = self.state, self.game
        rewards = totals(game.actors, dict(zip(game.actors, state.returns(), strict=True)))
        if state.is_terminal():
            return View("", "", None, rewards, terminated=True)
        seat = state.current_player()
        return View(game.actors[seat], game.text_of(state, seat), tuple(game.moves_of(state)), rewards)

    def act(self, action: Any) -> None:
        # OpenSpiel accepts some illegal moves in silence, so only names of legal ones are looked up.
        self.state.apply_action(self.game.moves_of(self.state)[action])
        self._let_chance_act()

    def _let_chance_act(self) -> None:
        while self.state.is_chance_node():
            outcomes, chances = zip(*self.state.chance_outcomes(), strict=True)
            self.state.apply_action(self.rng.choices(outcomes, chances)[0])


class OpenSpielGame(Game):
    """A game of OpenSpiel. A game with simultaneous moves is played in turns, each hidden from the others.

    An illegal move costs 1.5 times the worst payoff, so that no legal move is worse.
    """

    is_blocking = False
    ways = (Copies(), Replays())

    def __init__(self, options: ForeignOptions) -> None:
        super().__init__(options)
        self.spiel = require("pyspiel", "openspiel")
        self.core, self.is_simultaneous = _load(self.spiel, options)
        kind = self.core.get_type()
        self.name = f"openspiel:{options.name}"
        self.actors = actor_ids(self.core.num_players())
        self.is_competitive = kind.utility != self.spiel.GameType.Utility.IDENTICAL and len(self.actors) > 1
        worst = max(abs(self.core.min_utility()), 1.0)
        self.set_limits(max(self.core.max_game_length(), 1), 1.5 * worst)
        if kind.chance_mode == self.spiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
            self.unforkable = "its chance is sampled inside OpenSpiel, so no seed repeats a play"
            self.way = None

    def start(self, seed: int) -> OpenSpielPlay:
        return OpenSpielPlay(self, self.core.new_initial_state(), Random(seed))

    def copy(self, play: OpenSpielPlay) -> OpenSpielPlay:
        return OpenSpielPlay(self, play.state.clone(), copy.copy(play.rng))

    def text_of(self, state: Any, seat: int) -> str:
        """Return what ``seat`` knows: the board of a game of perfect information, else its information state."""
        kind = self.core.get_type()
        is_open = kind.information == self.spiel.GameType.Information.PERFECT_INFORMATION
        shows_board = kind.provides_observation_string and (is_open or not kind.provides_information_state_string)
        text = state.observation_string(seat) if shows_board else state.information_state_string(seat)
        return text if self.render is None else self.render(text)

    def moves_of(self, state: Any) -> dict[str, int]:
        """Return the legal moves of the actor to act, and OpenSpiel's number of each."""
        numbers = state.legal_actions()
        names = distinct([state.action_to_string(state.current_player(), number) for number in numbers])
        return dict(zip(names, numbers, strict=True))


def _load(spiel: Any, options: ForeignOptions) -> tuple[Any, bool]:
    """Return the game, and True if its moves were simultaneous. Raises ``ValueError`` for a game without a text."""
    try:
        core = spiel.load_game(options.name, options.arguments) if options.arguments else spiel.load_game(options.name)
    except spiel.SpielError as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"task='openspiel:{options.name}': expected a game of OpenSpiel. It says: {reason}") from error
    kind, dynamics = core.get_type(), spiel.GameType.Dynamics
    if kind.dynamics == dynamics.MEAN_FIELD:
        raise ValueError(f"task='openspiel:{options.name}': expected a game for players, got a mean-field game")
    if not (kind.provides_information_state_string or kind.provides_observation_string):
        raise ValueError(f"task='openspiel:{options.name}': OpenSpiel has no text for what a player of it sees")
    is_simultaneous = kind.dynamics == dynamics.SIMULTANEOUS
    return (spiel.convert_to_turn_based(core) if is_simultaneous else core), is_simultaneous


class OpenSpielTask(ForeignTask):
    """A task that plays a game of OpenSpiel. Small zero-sum games for two have an exact exploitability.

    Example: ``build_task("openspiel:leduc_poker").solve(policy).exploitability``
    """

    prefix = "openspiel"
    game_type = OpenSpielGame

    @property
    def unsolved(self) -> str:
        """Reason why the game has no exact exploitability here; empty if it has one."""
        return unsolved_reason(self.game)

    @property
    def rules(self) -> ExactGame:
        return self.exact

    @cached_property
    def exact(self) -> ExactGame:
        """The game's decisions and solver. Raises ``ValueError`` if there are none."""
        return ExactGame(self.game)

    def decisions(self) -> list[Decision]:
        """Return the query to a model at each decision, in the order of a policy's rows."""
        return self.exact.decisions

    def solve(self, policy: Any) -> Exploitability:
        """Measure a policy table ``[I, A]`` or ``[I, A + 1]`` by OpenSpiel's best responses."""
        return self.exact.solve(policy)
