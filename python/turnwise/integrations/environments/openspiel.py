"""Games of OpenSpiel in text: ``task = "openspiel:leduc_poker"``, or with parameters ``"goofspiel(num_cards=4)"``.

Small zero-sum games for two have an exact exploitability, by OpenSpiel's own best responses. A policy is ``[I, A]``
float64: ``I`` different prompts that decide, ``A`` numbers of actions. ``[I, A + 1]`` adds the probability of texts
that are no legal move. OpenSpiel's games have no such move, so the policy is measured on the condition that the move is
legal.
"""

from __future__ import annotations

import copy
import re
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from turnwise.integrations.environments.base.forks import Copies, Replays
from turnwise.integrations.environments.base.play import ForeignGame, ForeignOptions, Play, PlayView, require, totals
from turnwise.integrations.environments.base.task import ForeignTask, actor_ids
from turnwise.integrations.environments.base.texts import distinct, with_moves
from turnwise.tasks.two_player import Decision, Exploitability
from turnwise.tasks.two_player.tree import check_policy
from turnwise.types import Messages

MAX_STATES = 1_000_000
"""States of the largest game that is solved; tic-tac-toe has 549,946."""


def unsolved_reason(game: Any) -> str:
    """Return a sentence on why OpenSpiel can't solve ``game``, from its type alone; empty if it can."""
    kind, types = game.core.get_type(), game.spiel.GameType
    zero_sums = (types.Utility.ZERO_SUM, types.Utility.CONSTANT_SUM)
    if game.core.num_players() != 2 or kind.utility not in zero_sums:
        return "it is no zero-sum game for two"
    if game.is_simultaneous:
        return "its moves are simultaneous"
    if kind.chance_mode == types.ChanceMode.SAMPLED_STOCHASTIC:
        return "its chance is sampled, so its outcomes can't be enumerated"
    if not kind.provides_information_state_string:
        return "OpenSpiel has no information states of it"
    return ""


class BracketRules:
    """Reads moves as the rules of turnwise's own games do. It enumerates no game, so a check of the task is cheap."""

    def parse(self, text: str) -> str | None:
        """Return the last text in brackets."""
        texts = re.findall(r"\[([^\[\]]+)\]", text)
        return texts[-1] if texts else None


class ExactGame:
    """All decisions of a game, and its solver. States with equal prompts are one decision.

    Example: ``ExactGame(game).solve(uniform).exploitability`` is 2.3736111111 for Leduc poker.
    """

    def __init__(self, game: Any) -> None:
        if reason := unsolved_reason(game):
            raise ValueError(f"task {game.name!r} has no exact exploitability: {reason}")
        self.game = game
        self.decisions: list[Decision] = []
        self.row_of: dict[str, int] = {}
        """Row of the policy by information state."""
        self._rows: dict[tuple[str, str], int] = {}
        self._enumerate()
        self.legal = np.array([[name is not None for name in one.actions] for one in self.decisions])

    def uniform(self) -> np.ndarray:
        """Return ``[I, A]``: equal probabilities for all legal moves."""
        return self.legal / self.legal.sum(axis=1, keepdims=True)

    def solve(self, policy: Any) -> Exploitability:
        """Compute the value, both best responses and the exploitability of a policy table.

        Raises ``ValueError`` for a table of another shape, or with probability on an illegal move.
        """
        table = check_policy(policy, self.legal)[:, :-1]
        mass = table.sum(axis=1, keepdims=True)
        table = np.where(mass > 0, table / np.where(mass > 0, mass, 1.0), self.uniform())
        spiel, core = self.game.spiel, self.game.core
        chances = {
            state: [(int(action), float(table[row, action])) for action in np.flatnonzero(self.legal[row])]
            for state, row in self.row_of.items()
        }
        tabular, root = spiel.TabularPolicy(chances), core.new_initial_state()
        value = spiel.expected_returns(root, tabular, -1, True)[0]
        first, second = (spiel.TabularBestResponse(core, seat, tabular).value_from_state(root) for seat in (0, 1))
        # A constant-sum game counts as the zero-sum game with payoffs from its mean.
        middle = core.utility_sum() / 2
        return Exploitability(value - middle, (first - middle, second - middle))

    def _enumerate(self) -> None:
        """Visit every state once, and give each different prompt a row."""
        stack, visited = [self.game.core.new_initial_state()], 0
        while stack:
            state = stack.pop()
            visited += 1
            if visited > MAX_STATES:
                raise ValueError(
                    f"task {self.game.name!r} has no exact exploitability: it has more than {MAX_STATES:,} states"
                )
            if state.is_terminal():
                continue
            if not state.is_chance_node():
                information = state.information_state_string(state.current_player())
                if information not in self.row_of:
                    self.row_of[information] = self._row(state)
            stack += [state.child(action) for action in reversed(state.legal_actions())]

    def _row(self, state: Any) -> int:
        seat, moves = state.current_player(), self.game.moves_of(state)
        actor = self.game.actors[seat]
        prompt = with_moves(self.game.text_of(state, seat), tuple(moves))
        row = self._rows.setdefault((actor, prompt), len(self.decisions))
        if row == len(self.decisions):
            actions: list[str | None] = [None] * self.game.core.num_distinct_actions()
            for name, number in moves.items():
                actions[number] = name
            messages: Messages = [{"role": "user", "content": prompt}]
            self.decisions.append(Decision(actor, messages, tuple(actions)))
        return row


# ---------------------------------------------------------------------------------------------------------------------
# The game and its task
# ---------------------------------------------------------------------------------------------------------------------
class OpenSpielPlay(Play):
    """One play. Its own generator draws the outcomes of chance, so equal seeds have equal cards."""

    def __init__(self, game: OpenSpielGame, state: Any, rng: Random) -> None:
        self.game, self.state, self.rng = game, state, rng
        self._let_chance_act()

    def look(self) -> PlayView:
        state, game = self.state, self.game
        rewards = totals(game.actors, dict(zip(game.actors, state.returns(), strict=True)))
        if state.is_terminal():
            return PlayView("", "", None, rewards, terminated=True)
        seat = state.current_player()
        return PlayView(game.actors[seat], game.text_of(state, seat), tuple(game.moves_of(state)), rewards)

    def act(self, action: Any) -> None:
        # OpenSpiel accepts some illegal moves in silence, so only names of legal ones are looked up.
        self.state.apply_action(self.game.moves_of(self.state)[action])
        self._let_chance_act()

    def _let_chance_act(self) -> None:
        while self.state.is_chance_node():
            outcomes, chances = zip(*self.state.chance_outcomes(), strict=True)
            self.state.apply_action(self.rng.choices(outcomes, chances)[0])


class OpenSpielGame(ForeignGame):
    """A game of OpenSpiel. A game with simultaneous moves is played in turns, each hidden from the others.

    An illegal move costs 1.5 times the worst payoff, so that no legal move is worse.
    """

    is_blocking = False
    fork_methods = (Copies(), Replays())

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
            self.fork_method = None

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

    game_type = OpenSpielGame

    @property
    def unsolved(self) -> str:
        """Reason why the game has no exact exploitability here; empty if it has one."""
        return unsolved_reason(self.game)

    @property
    def rules(self) -> BracketRules:
        return BracketRules()

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
