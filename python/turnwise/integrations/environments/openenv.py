"""Environments of an OpenEnv server: ``task = "openenv:http://127.0.0.1:8000"``."""

from __future__ import annotations

import json
import weakref
from typing import Any

from pydantic import Field

from turnwise.arena import InvalidActionError
from turnwise.arena.rewards.invalid_action import parsing
from turnwise.integrations.environments.base.forks import Replays
from turnwise.integrations.environments.base.play import (
    ForeignGame,
    ForeignOptions,
    Play,
    PlayView,
    closed_on_error,
    require,
    totals,
)
from turnwise.integrations.environments.base.task import ForeignTask
from turnwise.integrations.environments.base.texts import plain_text

PLAYER = "player"

REFUSED = "(code: VALIDATION_ERROR)"
"""Part of the server's error for an action that doesn't fit the environment's schema."""


class OpenEnvOptions(ForeignOptions):
    """Options of ``openenv:URL``. An action is a dict, which one of three options makes of a completion.

    Example: ``OpenEnvOptions(name="http://127.0.0.1:8000", moves={"up": {"direction": 0}, "down": {"direction": 1}})``
    """

    moves: dict[str, dict[str, Any]] = Field(default={})
    """Actions by the names of the moves. The prompt lists the names."""
    field: str = ""
    """Field of the action that takes the completion's text, for an environment without a list of moves."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds until a call of the server counts as failed."""


class OpenEnvPlay(Play):
    """One session on the server. A fork is another session, so the server must allow several."""

    def __init__(self, game: OpenEnvGame, seed: int) -> None:
        self.game = game
        self.client = game.connect()
        weakref.finalize(self, self.client.disconnect)
        self.total = 0.0
        with closed_on_error(self):
            self.said = self.client.reset(seed=seed)

    def look(self) -> PlayView:
        shown, done = self.said.observation, bool(self.said.done)
        text = plain_text(shown) if self.game.render is None else self.game.render(shown)
        rewards = totals(self.game.actors, {PLAYER: self.total})
        if done:
            is_cut = bool(shown.get("truncated", False))
            return PlayView("", text, None, rewards, terminated=not is_cut, truncated=is_cut)
        return PlayView(PLAYER, text, tuple(self.game.options.moves) or None, rewards)

    def act(self, action: Any) -> None:
        try:
            self.said = self.client.step(self.game.options.moves.get(action) if isinstance(action, str) else action)
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            raise InvalidActionError(str(error)[:200]) from error
        self.total += float(self.said.reward or 0.0)

    def close(self) -> None:
        self.client.disconnect()


class OpenEnvGame(ForeignGame):
    """An environment behind a URL, with one player. An action that the server refuses ends the play and costs 1.

    Forks are replays, each in its own session. They are proved before a run with a tree: two replays must agree.
    """

    options: OpenEnvOptions
    fork_methods = (Replays(),)

    def __init__(self, options: OpenEnvOptions) -> None:
        super().__init__(options)
        self.client_type = require("openenv.core", "openenv").GenericEnvClient
        self.closed = require("websockets.exceptions", "openenv").ConnectionClosed
        self.name = f"openenv:{options.name}"
        self.actors = (PLAYER,)
        if options.moves and options.field:
            raise ValueError(f"task_options.field={options.field!r}: has no effect with task_options.moves")

    def connect(self) -> Any:
        """Open a session. Raises ``ConnectionError`` if no server answers, or it allows no further session."""
        client = self.client_type(self.options.name, message_timeout_s=self.options.timeout)
        try:
            return client.connect()
        except (ConnectionError, ValueError) as error:
            raise ConnectionError(f"task={self.name!r}: expected a running OpenEnv server: {error}") from error

    def start(self, seed: int) -> OpenEnvPlay:
        try:
            return OpenEnvPlay(self, seed)
        except (RuntimeError, self.closed) as error:
            # A full server names the reason and closes, and the close may come first.
            if isinstance(error, RuntimeError) and "CAPACITY_REACHED" not in str(error):
                raise
            wanted = "expected a server with max_concurrent_envs above the number of concurrent episodes and branches"
            raise ConnectionError(f"task={self.name!r}: {wanted}: {error}") from error

    def read(self, text: str, view: PlayView) -> Any:
        """Return the name of a move, or else the action as a dict."""
        if self.parse is not None or view.legal is not None:
            return super().read(text, view)
        if self.options.field:
            return {self.options.field: text}
        with parsing():
            action = json.loads(text)
        if not isinstance(action, dict):
            raise InvalidActionError(f"expected a JSON object, got {text[:80]!r}")
        return action


class OpenEnvTask(ForeignTask):
    """A task that plays an environment of an OpenEnv server.

    Example: ``build_task("openenv:http://127.0.0.1:8000", {"field": "message"})``
    """

    options_type = OpenEnvOptions
    game_type = OpenEnvGame
