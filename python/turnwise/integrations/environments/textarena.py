"""Games of TextArena: ``task = "textarena:KuhnPoker-v0"``."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from pydantic import Field

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
from turnwise.integrations.environments.base.task import ForeignTask, actor_ids
from turnwise.integrations.environments.base.texts import listed_moves

PLAYERS = (2, 1, 3, 4, 5, 6)
"""Numbers of players that are tried, in this order, if ``num_players`` is not set."""

_SPEAKERS = re.compile(r"\[(GAME|Player( \d+)?)\]")
_swap = threading.Lock()


class TextArenaOptions(ForeignOptions):
    """Options of ``textarena:...``. Example: ``moves = ["[1]", "[2]"]`` for a game that lists none."""

    num_players: int | None = Field(default=None, ge=1)
    """Number of players; by default the first of 2, 1, 3, 4, 5 and 6 that the game takes."""
    cooperative: bool = False
    """The players play together: no scores between them."""
    moves: tuple[str, ...] = ()
    """Replies of the random player; by default those in brackets in the last line of the prompt that has any."""


class OwnRandom:
    """The state of Python's and NumPy's global generators that belongs to one play.

    Games of TextArena draw from the global generators. Two plays at once would take each other's numbers.
    """

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed).getstate()
        self.numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Set the global generators to this state, and restore them afterwards."""
        with _swap:
            before, before_numpy = random.getstate(), np.random.get_state()
            random.setstate(self.python)
            np.random.set_state(self.numpy)
            try:
                yield
            finally:
                self.python, self.numpy = random.getstate(), np.random.get_state()
                random.setstate(before)
                np.random.set_state(before_numpy)


class TextArenaPlay(Play):
    """One play. Any text is a move; the game judges it, and usually allows one error."""

    def __init__(self, game: TextArenaGame, seed: int) -> None:
        self.game, self.random = game, OwnRandom(seed)
        self.is_done = False
        self.paid: dict[int, float] = {}
        with self.random.use():
            self.env = game.make()
            with closed_on_error(self.env):
                self.env.reset(num_players=len(game.actors), seed=seed)

    def look(self) -> PlayView:
        rewards = totals(self.game.actors, {self.game.actors[seat]: paid for seat, paid in self.paid.items()})
        if self.is_done:
            return PlayView("", "", None, rewards, terminated=True)
        with self.random.use():
            seat, shown = self.env.get_observation()
        text = shown if self.game.render is None else self.game.render(shown)
        return PlayView(self.game.actors[seat], str(text).strip(), None, rewards)

    def act(self, action: Any) -> None:
        state = self.env.state
        seat, errors = state.current_player_id, getattr(state, "error_count", 0)
        infos: dict[int, Any] = {}
        with self.random.use():
            with parsing():  # the game reads the completion here
                self.is_done, _ = self.env.step(action=action)
            if self.is_done:
                rewards, infos = self.env.close()
                self.paid = {int(player): float(reward) for player, reward in (rewards or {}).items()}
        was_fatal = bool(infos.get(seat, {}).get("invalid_move"))
        self.was_legal = not was_fatal and getattr(state, "error_count", 0) <= errors

    def close(self) -> None:
        if not self.is_done:  # else it is closed, for its rewards
            self.env.close()


class TextArenaGame(ForeignGame):
    """A game whose moves are texts. An illegal one follows the game's own rule.

    A text on which the game itself fails ends the play and costs 1. Forks are replays.
    """

    options: TextArenaOptions
    is_blocking = False  # it draws from the global random generators
    fork_methods = (Replays(),)

    def __init__(self, options: TextArenaOptions) -> None:
        super().__init__(options)
        self.arena = require("textarena", "textarena")
        self.name = f"textarena:{options.name}"
        self.actors = actor_ids(self._count_players())
        self.is_competitive = not options.cooperative and len(self.actors) > 1

    def make(self) -> Any:
        try:
            return self.arena.make(self.options.name, **self.options.arguments)
        except (ValueError, TypeError) as error:
            raise ValueError(f"task='textarena:{self.options.name}': {error}") from error

    def _count_players(self) -> int:
        wanted = self.options.num_players
        reason = ""
        for count in PLAYERS if wanted is None else (wanted,):
            with OwnRandom(0).use():
                env = self.make()
                try:
                    with closed_on_error(env):
                        env.reset(num_players=count, seed=0)
                    env.close()
                except (AssertionError, ValueError, KeyError, IndexError) as error:
                    reason = str(error)
                    continue
            return count
        raise ValueError(f"task_options.num_players={wanted!r}: {self.options.name} refuses it: {reason}")

    def start(self, seed: int) -> TextArenaPlay:
        return TextArenaPlay(self, seed)

    def moves_in(self, prompt: str) -> list[str]:
        return list(self.options.moves) or listed_moves(_SPEAKERS.sub("", prompt))


class TextArenaTask(ForeignTask):
    """A task that plays a game of TextArena.

    Example: ``build_task("textarena:KuhnPoker-v0", {"arguments": {"max_rounds": 1}})``
    """

    options_type = TextArenaOptions
    game_type = TextArenaGame
