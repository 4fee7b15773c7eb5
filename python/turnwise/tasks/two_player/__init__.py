"""Games for two seats: rules, the episode that plays them, and what their tasks share."""

from __future__ import annotations

from .episode import TwoPlayerEpisode
from .rules import SEATS, PlayerFactory, Rules
from .task import TwoPlayerOptions, TwoPlayerTask

__all__ = ["SEATS", "PlayerFactory", "Rules", "TwoPlayerEpisode", "TwoPlayerOptions", "TwoPlayerTask"]
