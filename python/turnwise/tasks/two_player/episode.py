"""One game for two seats as an episode: the model plays both of them, or one against a scripted player."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.arena import MultiTurnEpisode, Rubric
from turnwise.arena.rewards.rubric import SHARE
from turnwise.tasks.two_player.rules import SEATS, PlayerFactory, Rules
from turnwise.types import EpisodeState, Messages

MODEL = "model"
"""Name in metrics of the seat that the model plays against a scripted player, for either seat."""


class TwoPlayerEpisode(MultiTurnEpisode):
    """Seats act as the rules say, until the game is over or an action is invalid.

    The artifact is the game's question. If it contains ``{"model": "player1", "opponent": "random"}``, the model plays
    only that seat, and one of ``players`` plays the other, with random numbers from the episode's seed. Each prompt
    holds only what its seat knows. No seat sees the other's completions, so their thoughts stay private.

    Rewards are the game's payoffs, one per seat that the model played. Other metrics are ``score/<seat>`` from 0 to 1
    (also ``score/model`` against a scripted player), and the shares ``readable/<seat>`` and ``legal/<seat>`` of its
    actions.

    Example: ``TwoPlayerEpisode(KuhnRules(), players)`` with ``EpisodeRequest("kuhn_poker", {"cards": "KQ"})``
    """

    actors = SEATS

    def __init__(self, rules: Rules, players: Mapping[str, PlayerFactory], max_turns: int = 100) -> None:
        super().__init__(max_turns=max_turns)
        self.rules = rules
        self.players = dict(players)
        self.episode_type = rules.name
        shares = [score, readable, legal]
        self.rubric = Rubric([payoff, *shares], [1.0, 0.0, 0.0, 0.0], ranges=dict.fromkeys(shares, SHARE))

    def unserved_rewards(self) -> dict[str, str]:
        reason = "is a game that ends on an invalid action and pays both seats by its rules: expected task_options."
        return super().unserved_rewards() | {"invalid_cost": f"{reason}invalid_cost"}

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        self._check(artifact)
        model = [artifact["model"]] if "model" in artifact else list(SEATS)
        state.data = {"game": self.rules.start(artifact), "model": model, "invalid": None, "verdicts": {}}
        self._let_opponent_act(state, artifact)
        seat = self._to_move(state)
        state.done = seat is None
        if seat is not None:
            state.current_actor = SEATS[seat]

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        return self.rules.messages(state.data["game"], SEATS.index(state.current_actor))

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        verdict = self._answer(state, SEATS.index(state.current_actor), state.last_completion_text)
        state.data["verdicts"].setdefault(state.current_actor, []).append(verdict)
        self._let_opponent_act(state, artifact)

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return self._to_move(state) is None

    def next_actor(self, state: EpisodeState, arena: Any, artifact: Any) -> str:
        seat = self._to_move(state)
        assert seat is not None, "is_done is asked first"
        return SEATS[seat]

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``payoffs``, ``scores`` and ``verdicts`` by the model's seats, the ``invalid`` seat if any, and the game."""
        data, payoffs = state.data, self.payoffs(state.data)
        seats = [SEATS.index(seat) for seat in data["model"]]
        scores = {SEATS[seat]: self.rules.score(payoffs, seat) for seat in seats}
        if len(seats) == 1:
            scores[MODEL] = scores[SEATS[seats[0]]]
        return {
            "payoffs": {SEATS[seat]: payoffs[seat] for seat in seats},
            "scores": scores,
            "verdicts": {seat: list(verdicts) for seat, verdicts in data["verdicts"].items()},
            "invalid": None if data["invalid"] is None else SEATS[data["invalid"]],
            **self.rules.describe(data["game"]),
        }

    def payoffs(self, data: Mapping[str, Any]) -> tuple[float, float]:
        """Return each seat's payoff, from an episode's ``state.data``."""
        if data["invalid"] is not None:
            return self.rules.invalid_payoffs(data["invalid"])
        return self.rules.payoffs(data["game"])

    def _to_move(self, state: EpisodeState) -> int | None:
        return None if state.data["invalid"] is not None else self.rules.to_move(state.data["game"])

    def _answer(self, state: EpisodeState, seat: int, text: str) -> str:
        verdict = self.rules.play(state.data["game"], text)
        if verdict != "legal":
            state.data["invalid"] = seat
        return verdict

    def _let_opponent_act(self, state: EpisodeState, artifact: Mapping[str, Any]) -> None:
        if "model" not in artifact:
            return
        player = self.players[artifact["opponent"]](self.rng)
        while (seat := self._to_move(state)) is not None and SEATS[seat] != artifact["model"]:
            self._answer(state, seat, player(SEATS[seat], self.rules.messages(state.data["game"], seat)))

    def _check(self, artifact: Any) -> None:
        if not isinstance(artifact, Mapping):
            raise TypeError(f"artifact={artifact!r}: expected the game's question, a dict")
        if ("model" in artifact) != ("opponent" in artifact):
            raise ValueError(f"artifact={artifact!r}: expected both 'model' and 'opponent', or neither")
        if "model" in artifact and artifact["model"] not in SEATS:
            raise ValueError(f"artifact['model']={artifact['model']!r}: expected one of {SEATS}")
        if "opponent" in artifact and artifact["opponent"] not in self.players:
            raise ValueError(f"artifact['opponent']={artifact['opponent']!r}: expected one of {sorted(self.players)}")


def payoff(extras: dict[str, Any]) -> dict[str, float]:
    """Payoff of each of the model's seats."""
    return extras["payoffs"]


def score(extras: dict[str, Any]) -> dict[str, float]:
    """Score of each of the model's seats, from 0 to 1, and ``model`` if it played only one; see ``Rules.score``."""
    return extras["scores"]


def readable(extras: dict[str, Any]) -> dict[str, float]:
    """The share of each seat's completions that named an action."""
    return _share(extras, ("legal", "illegal"))


def legal(extras: dict[str, Any]) -> dict[str, float]:
    """The share of each seat's completions that named a legal action."""
    return _share(extras, ("legal",))


def _share(extras: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, float]:
    return {
        seat: sum(verdict in wanted for verdict in verdicts) / len(verdicts)
        for seat, verdicts in extras["verdicts"].items()
    }
