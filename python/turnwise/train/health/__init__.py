"""What is watched over: in every run what spoils it without failing it, in self-play signals and the actions that an
unhealthy one asks for."""

from turnwise.train.health.actions import ACTIONS, Action, LowerRate, MixAnchors, RollBack
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
    "Invalid",
    "LowerRate",
    "MixAnchors",
    "RollBack",
    "SeatSkew",
    "Signal",
    "Sums",
    "Watch",
    "build_guard",
    "check_health",
]
