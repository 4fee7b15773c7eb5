"""Past policies as opponents: a pool of snapshots, how they are chosen, who beat whom, and ratings from that."""

from turnwise.train.league.build import build_league, check_league, past_models, plays_past
from turnwise.train.league.league import League
from turnwise.train.league.matchmaking import MATCHMAKERS, Latest, Matchmaker, Prioritised, Uniform
from turnwise.train.league.payoffs import Game, Payoffs, Record, game_of
from turnwise.train.league.pool import Member, Pool, Slots
from turnwise.train.league.ratings import Ratings, bradley_terry

__all__ = [
    "MATCHMAKERS",
    "Game",
    "Latest",
    "League",
    "Matchmaker",
    "Member",
    "Payoffs",
    "Pool",
    "Prioritised",
    "Ratings",
    "Record",
    "Slots",
    "Uniform",
    "bradley_terry",
    "build_league",
    "check_league",
    "game_of",
    "past_models",
    "plays_past",
]
