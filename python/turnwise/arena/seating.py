"""Who sits where: the last word on the requests of a training batch, before they are played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from turnwise.types import EpisodeRequest


class Seating(Protocol):
    """May put other policies into the seats of a batch, by ``EpisodeRequest.policies``, as a league does.

    Its state is saved with the arena's, and goes back with it where a batch that was drawn has to be drawn again.
    """

    async def seat(self, requests: Sequence[EpisodeRequest]) -> Sequence[EpisodeRequest]:
        """The requests to play in place of ``requests``; called once per training batch, in order."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
