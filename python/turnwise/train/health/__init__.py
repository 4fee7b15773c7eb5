"""Checks the start of a run, and watches training: warnings in every run, self-play signals, and actions on them.

Read in this order: start, watch, guard, signals, actions, build.
May import: types, utils, train, train.config, train.checkpoint, train.eval, train.league, train.learner, train.model.
"""

from turnwise.train.health.actions import ACTIONS, Action, IncreaseLeagueShare, LowerLearningRate, RestoreCheckpoint
from turnwise.train.health.build import build_guard, check_health
from turnwise.train.health.guard import Guard
from turnwise.train.health.signals import SIGNALS, Distinct, Distinct2, Entropy, Invalid, SeatSkew, Signal, Sums
from turnwise.train.health.watch import Watch

__all__ = [
    "ACTIONS",
    "SIGNALS",
    "Action",
    "Distinct",
    "Distinct2",
    "Entropy",
    "Guard",
    "IncreaseLeagueShare",
    "Invalid",
    "LowerLearningRate",
    "RestoreCheckpoint",
    "SeatSkew",
    "Signal",
    "Sums",
    "Watch",
    "build_guard",
    "check_health",
]
