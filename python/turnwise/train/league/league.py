"""A league: while the live policies train against themselves, some of their games are against past policies.

Each league question is played once per seat, with the live policies in that seat and a member of the pool in the
others. So neither the deal nor the first move favours one side. The member's tokens never train: its steps are marked
as not trainable, and its name differs from all policies of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turnwise.arena import Stage
from turnwise.train.callbacks import Callback, TrainerView
from turnwise.train.config.schema import LeagueConfig
from turnwise.train.league.payoffs import GameResult, Payoffs, bradley_terry, game_of
from turnwise.train.league.pool import LIVE, OpponentSlots, Pool, Snapshot, slot_name
from turnwise.train.learner.learner import Learner
from turnwise.types import EpisodeRequest, GenerateResult
from turnwise.types.facts import Match
from turnwise.utils.threads import to_thread


class League(Callback):
    """Seats past policies in an arena's batches, keeps their pool, and records the results of their games.

    ``policy_of`` maps the actors that play against each other (``seats``) to their policies. ``slots`` are the client's
    places for past policies: ``config.opponents_per_step`` for each of ``groups`` batches that may run at once. The
    opponents of a batch depend only on ``seed``, the batch's number, the pool and the payoff matrix.
    """

    name = "league"

    def __init__(
        self,
        config: LeagueConfig,
        matchmaker: Matchmaker,
        policy_of: Mapping[str, str],
        slots: OpponentSlots,
        folder: Path,
        *,
        groups: int = 1,
        seed: int = 0,
    ) -> None:
        self.config, self.matchmaker, self.slots = config, matchmaker, slots
        self.policy_of, self.seats = dict(policy_of), tuple(policy_of)
        self.pool, self.payoffs = Pool(folder, config.size), Payoffs()
        self.groups, self.seed = groups, seed
        self.seating = Seats(self)
        self.stages = [self.seating]

    # -- the pool ------------------------------------------------------------------------------------------------------
    async def on_start(self, trainer: TrainerView) -> None:
        """Make the starting weights the first member."""
        if not self.pool.members:
            self.snapshot(trainer.progress.step, trainer.learner)

    async def after_step(self, trainer: TrainerView, results: Sequence[GenerateResult]) -> dict[str, float]:
        metrics = self.record(results)
        if trainer.progress.step % self.config.every == 0:
            self.snapshot(trainer.progress.step, trainer.learner)
        return metrics

    def snapshot(self, step: int, learner: Learner) -> None:
        """Add the present policies to the pool, with their games since the newest member, unless nothing trained."""
        versions = {name: learner.policies[name].version for name in self.slots.policies}
        newest = self.pool.members[-1] if self.pool.members else None
        if newest and newest.versions == versions:
            return
        for member in self.pool.add(step, learner, versions):
            self.payoffs.forget(member.name)
        self.payoffs.rename(LIVE, self.pool.members[-1].name)

    # -- opponents -----------------------------------------------------------------------------------------------------
    def p_win(self) -> np.ndarray:
        """Estimate the live policies' share ``[M]`` against each member.

        It counts the results of the live policies since the newest snapshot, those of that snapshot, and one draw.
        """
        newest = self.pool.members[-1].name
        records = [
            self.payoffs.between(LIVE, m.name).plus(self.payoffs.between(newest, m.name)) for m in self.pool.members
        ]
        return np.array([(record.share + 0.5) / (record.matches + 1) for record in records])

    def draw(self, batch: int, count: int) -> list[Snapshot]:
        """Draw the opponents of ``count`` questions of batch ``batch``, at most ``config.opponents_per_step`` of them.

        Each question's opponent has the matchmaker's probabilities. Questions share draws, so they are not independent.
        """
        rng = np.random.default_rng([self.seed, batch])
        size = min(count, self.config.opponents_per_step)
        drawn = rng.choice(len(self.pool.members), size=size, p=chances(self.matchmaker, self.p_win()))
        return [self.pool.members[drawn[index % size]] for index in range(count)]

    async def seat(self, batch: int, requests: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
        """Return ``requests`` with the last of their games replaced by games against past policies.

        Each league question is played once per seat, and replaces as many questions as there are seats.
        """
        questions = [list(games) for _, games in groupby(requests, key=lambda request: request.group_id)]
        count = int(self.config.share * len(questions) / len(self.seats) + 0.5)
        if not count or not self.pool.members:
            return list(requests)
        # Put the drawn opponents into the slots of this batch's group.
        opponents = self.draw(batch, count)
        first = batch % self.groups * self.config.opponents_per_step
        slot_of = {step: first + index for index, step in enumerate(sorted({member.step for member in opponents}))}
        for member in opponents:
            if self.groups > 1:  # in a thread, because the client waits for the batches that run
                await to_thread(self.slots.load, slot_of[member.step], member, self.pool)
            else:
                self.slots.load(slot_of[member.step], member, self.pool)
        # Replace the last questions: each chosen one is played from every seat.
        kept = len(questions) - len(self.seats) * count
        chosen = questions[kept : kept + count]
        paired = [
            self.against(request, member, slot_of[member.step], seat, f"{batch}/{index}/{copy}")
            for index, (games, member) in enumerate(zip(chosen, opponents, strict=True))
            for copy, request in enumerate(games)
            for seat in self.seats
        ]
        return [request for games in questions[:kept] for request in games] + paired

    def against(self, request: EpisodeRequest, member: Snapshot, slot: int, seat: str, match: str) -> EpisodeRequest:
        """Return ``request`` with the live policies only in ``seat``."""
        others = {other: slot_name(self.policy_of[other], slot) for other in self.seats if other != seat}
        mark: Match = {"member": member.step, "seat": seat, "match": match}
        return replace(request, policies={**request.policies, **others}, facts=replace(request.facts, league=mark))

    # -- results -------------------------------------------------------------------------------------------------------
    def record(self, results: Sequence[GenerateResult]) -> dict[str, float]:
        """Record the league's matches among ``results``, and return metrics. Failed games, and games against members
        that have left the pool, don't count."""
        # Group the games by match, and record each match.
        names = {member.step: member.name for member in self.pool.members}
        matches: dict[tuple[int, str], list[GameResult]] = {}
        for result in results:
            mark = result.rollout.facts.league
            if mark is not None and result.rollout.error is None and mark["member"] in names:
                game = game_of(result.rollout, [mark["seat"]], self.seats)
                matches.setdefault((mark["member"], mark["match"]), []).append(game)
        for (step, _), games in matches.items():
            self.payoffs.add(LIVE, names[step], games)
        played = [game for games in matches.values() for game in games]
        metrics = {"league/games": len(played), "league/members": len(names), "league/share": self.config.share}
        if played:
            metrics["league/score"] = float(np.mean([game.share for game in played]))
            metrics["league/payoff"] = float(np.mean([game.payoff for game in played]))
            metrics |= self._rated()
        return metrics

    def _rated(self) -> dict[str, float]:
        """Return the live policies' rating in Elo, relative to the mean of all, and relative to the oldest member."""
        players = [*(member.name for member in self.pool.members), LIVE]
        ratings = bradley_terry(*self.payoffs.matrices(players))
        return {
            "league/rating": float(ratings.elo[-1]),
            "league/rating_low": float(ratings.low[-1]),
            "league/rating_high": float(ratings.high[-1]),
            "league/rating_gain": float(ratings.elo[-1] - ratings.elo[0]),
        }

    # -- state ---------------------------------------------------------------------------------------------------------
    def files(self) -> dict[str, Path]:
        return self.pool.files()

    def state_dict(self) -> dict[str, Any]:
        return {**self.pool.state_dict(), **self.payoffs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        self.pool.load_state_dict(state, folder)
        self.payoffs.load_state_dict(state)


class Seats(Stage):
    """The league's part in an arena: numbers the batches, and is rewound with the arena if a batch is drawn again."""

    name = "opponent_assignment"

    def __init__(self, league: League) -> None:
        self.league, self.batches = league, 0

    async def draw(self, arena: Any, requests: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
        if arena.filters.dynamic_sampling_rounds:
            raise ValueError("filters.dynamic_sampling_rounds: expected 0 with a league, as each draw seats others")
        batch, self.batches = self.batches, self.batches + 1
        return await self.league.seat(batch, requests)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = state["batches"]


# -- Matchmakers -------------------------------------------------------------------------------------------------------
class Matchmaker(Protocol):
    """Maps the learner's estimated shares ``[M]`` of its games against each member to the members' weights ``[M]``."""

    def weights(self, p_win: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class UniformMatchmaker:
    """Fictitious self-play: every member is equally likely."""

    def weights(self, p_win: np.ndarray) -> np.ndarray:
        return np.ones(len(p_win))


@dataclass(frozen=True, slots=True)
class LatestMatchmaker:
    """The newest ``k`` members, all equally likely."""

    k: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k={self.k!r}: expected at least 1")

    def weights(self, p_win: np.ndarray) -> np.ndarray:
        return (np.arange(len(p_win)) >= len(p_win) - self.k).astype(np.float64)


@dataclass(frozen=True, slots=True)
class PrioritizedMatchmaker:
    """Prioritized fictitious self-play: ``(1 - p_win) ** power``, so the hardest opponents are the most frequent
    (Vinyals et al., "Grandmaster level in StarCraft II using multi-agent reinforcement learning", Nature 575, 2019,
    Methods)."""

    power: float = 2.0

    def __post_init__(self) -> None:
        if not self.power >= 0:
            raise ValueError(f"power={self.power!r}: expected a number >= 0")

    def weights(self, p_win: np.ndarray) -> np.ndarray:
        return np.clip(1 - p_win, 0, 1) ** self.power


MATCHMAKERS: dict[str, type[Matchmaker]] = {
    "uniform": UniformMatchmaker,
    "latest": LatestMatchmaker,
    "prioritized": PrioritizedMatchmaker,
}
"""Matchmakers by the values of ``league.matchmaker``."""


def chances(maker: Matchmaker, p_win: np.ndarray) -> np.ndarray:
    """Return the probability ``[M]`` of each member to be drawn. Raises ``ValueError`` for invalid weights."""
    weights = np.asarray(maker.weights(p_win), dtype=np.float64)
    if weights.shape != p_win.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"{type(maker).__name__}.weights gave {weights!r}: expected {len(p_win)} finite numbers >= 0")
    if not weights.any():
        weights = np.ones(len(p_win))
    return weights / weights.sum()
