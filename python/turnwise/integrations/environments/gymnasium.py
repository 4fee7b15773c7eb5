"""Environments of Gymnasium: ``task = "gymnasium:FrozenLake-v1"``."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from pydantic import Field

from turnwise.integrations.environments.base.forks import Copies, Replays, copied
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
from turnwise.integrations.environments.base.texts import action_names, named_action, plain_text

PLAYER = "player"


class GymnasiumOptions(ForeignOptions):
    """Options of ``gymnasium:...``. Example: ``actions = ["left", "down", "right", "up"]`` for FrozenLake."""

    actions: tuple[str, ...] = Field(default=())
    """Names of the actions of a discrete space, in the order of their numbers; by default the numbers."""


class GymnasiumPlay(Play):
    """One play. ``terminated`` and ``truncated`` stay apart, as the environment reports them."""

    def __init__(self, game: GymnasiumGame, env: Any, said: tuple[Any, dict[str, Any]], total: float = 0.0) -> None:
        self.game, self.env, self.total = game, env, total
        self.observation, self.info = said
        self.ended = (False, False)

    def look(self) -> PlayView:
        text = self.game.text_of(self.observation)
        rewards = totals(self.game.actors, {PLAYER: self.total})
        if any(self.ended):
            return PlayView("", text, None, rewards, *self.ended)
        return PlayView(PLAYER, text, action_names(self.game.names, self.info.get("action_mask")), rewards)

    def act(self, action: Any) -> None:
        made = named_action(action, self.game.names, self.game.first)
        self.observation, reward, terminated, truncated, self.info = self.env.step(made)
        self.total += float(reward)
        self.ended = (bool(terminated), bool(truncated))

    def close(self) -> None:
        self.env.close()


class GymnasiumGame(ForeignGame):
    """An environment with one player. An illegal move ends the play and costs 1.

    Moves of a discrete space have names. Another space needs ``parse``, which then returns the action itself; a text
    space takes the completion. ``info["action_mask"]`` leaves out moves.
    """

    options: GymnasiumOptions
    fork_methods = (Copies(), Replays())

    def __init__(self, options: GymnasiumOptions) -> None:
        super().__init__(options)
        self.gymnasium = require("gymnasium", "gymnasium")
        self.name = f"gymnasium:{options.name}"
        self.actors = (PLAYER,)
        with closing(self.make()) as env:
            space, spaces = env.action_space, self.gymnasium.spaces
            limit = env.spec.max_episode_steps if env.spec is not None else None
        self.set_limits(limit or self.max_turns, self.invalid_cost)
        self.names: tuple[str, ...] | None = None
        self.first = 0
        if isinstance(space, spaces.Discrete):
            self.first = int(space.start)
            self.names = options.actions or tuple(str(self.first + index) for index in range(int(space.n)))
            if len(set(self.names)) != space.n or len(self.names) != space.n:
                raise ValueError(f"task_options.actions={list(self.names)!r}: expected {space.n} different names")
        elif self.parse is None and not isinstance(space, spaces.Text):
            raise ValueError(f"task={self.name!r}: its actions are {space}: expected task_options.parse to read one")

    def make(self) -> Any:
        try:
            return self.gymnasium.make(self.options.name, **self.options.arguments)
        except (self.gymnasium.error.Error, TypeError) as error:
            raise ValueError(f"task='gymnasium:{self.options.name}': {error}") from error

    def start(self, seed: int) -> GymnasiumPlay:
        env = self.make()
        with closed_on_error(env):
            return GymnasiumPlay(self, env, env.reset(seed=seed))

    def copy(self, play: GymnasiumPlay) -> GymnasiumPlay:
        env, said = copied((play.env, (play.observation, play.info)))
        return GymnasiumPlay(self, env, said, play.total)

    def text_of(self, observation: Any) -> str:
        return plain_text(observation) if self.render is None else self.render(observation)


class GymnasiumTask(ForeignTask):
    """A task that plays an environment of Gymnasium.

    Example: ``build_task("gymnasium:FrozenLake-v1", {"arguments": {"is_slippery": False}})``
    """

    options_type = GymnasiumOptions
    game_type = GymnasiumGame
