"""Past policies as opponents: snapshots, matchmaking, results, ratings.

Read in this order: league, pool, matchmaking, payoffs, ratings, build.
May import: types, utils, inference.weights, train, train.config, train.checkpoint, train.eval, train.learner,
train.model.
"""

from turnwise.train.league.build import build_league, check_league, past_models, plays_past
from turnwise.train.league.league import League
from turnwise.train.league.matchmaking import MATCHMAKERS, Latest, Matchmaker, Prioritized, Uniform
from turnwise.train.league.payoffs import Game, Payoffs, Record, game_of
from turnwise.train.league.pool import Member, OpponentSlots, Pool
from turnwise.train.league.ratings import Ratings, bradley_terry

__all__ = [
    "MATCHMAKERS",
    "Game",
    "Latest",
    "League",
    "Matchmaker",
    "Member",
    "OpponentSlots",
    "Payoffs",
    "Pool",
    "Prioritized",
    "Ratings",
    "Record",
    "Uniform",
    "bradley_terry",
    "build_league",
    "check_league",
    "game_of",
    "past_models",
    "plays_past",
]
