"""Environments of PettingZoo, in turns (AEC) or parallel: ``task = "pettingzoo:tictactoe_v3"``."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from pydantic import Field

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
from turnwise.integrations.environments.base.texts import action_names, named_action, plain_text

FAMILIES = ("classic", "butterfly", "sisl", "atari")


class PettingZooOptions(ForeignOptions):
    """Options of ``pettingzoo:...``. Example: ``parallel = true`` for ``rps_v2``."""

    parallel: bool = False
    """Plays ``parallel_env`` instead of ``env``: each agent chooses without the others' choices, then all act."""
    cooperative: bool = False
    """The agents play together: no scores between them, and an illegal move costs them all."""
    actions: tuple[str, ...] = Field(default=())
    """Names of the actions of discrete spaces, in the order of their numbers; by default the numbers."""


class _ZooPlay(Play):
    """The common part of both kinds: sums of rewards, and the view of the agent to act."""

    def __init__(self, game: PettingZooGame, seed: int) -> None:
        self.game, self.env = game, game.make()
        self.paid = dict.fromkeys(game.actors, 0.0)
        self.terminated = self.truncated = False
        with closed_on_error(self.env):
            self.begin(seed)

    @abstractmethod
    def begin(self, seed: int) -> None:
        """Reset the environment."""

    def view_of(self, agent: str, observation: Any, info: Mapping[str, Any]) -> PlayView:
        rewards = totals(self.game.actors, self.paid)
        if not agent:
            return PlayView("", "", None, rewards, self.terminated, self.truncated)
        mask = info.get("action_mask")
        if isinstance(observation, Mapping) and "action_mask" in observation:
            mask, observation = observation["action_mask"], observation.get("observation")
        text = plain_text(observation) if self.game.render is None else self.game.render(observation)
        return PlayView(agent, text, action_names(self.game.names_of(agent), mask), rewards)

    def close(self) -> None:
        self.env.close()


class TurnPlay(_ZooPlay):
    """A play of the AEC kind.

    ``last()`` shows an agent's reward only on its next turn, which it may never have. So each view also counts what the
    environment keeps for then.
    """

    def begin(self, seed: int) -> None:
        self.shown_rewards = dict.fromkeys(self.game.actors, 0.0)
        self.env.reset(seed=seed)
        self._read()

    def look(self) -> PlayView:
        return self.view_of(*self.shown)

    def act(self, action: Any) -> None:
        agent = self.env.agent_selection
        self.shown_rewards[agent] += self.due  # the step sets it to 0
        self.env.step(named_action(action, self.game.names_of(agent), self.game.first_of(agent)))
        self._read()

    def _read(self) -> None:
        """Go on to the next living agent, and sum the rewards. Agents that are done take their last step, ``None``."""
        self.shown: tuple[str, Any, Mapping[str, Any]] = ("", None, {})
        self.due = 0.0
        while self.env.agents:
            observation, reward, terminated, truncated, info = self.env.last()
            agent = self.env.agent_selection
            self.terminated |= bool(terminated)
            self.truncated |= bool(truncated)
            if not (terminated or truncated):
                self.shown, self.due = (agent, observation, info), float(reward)
                break
            self.shown_rewards[agent] += float(reward)
            self.env.step(None)
        kept = getattr(self.env, "_cumulative_rewards", {})
        self.paid = {agent: shown + float(kept.get(agent, 0.0)) for agent, shown in self.shown_rewards.items()}


class ParallelPlay(_ZooPlay):
    """A play of the parallel kind: the agents choose one after another, and the last choice makes the step."""

    def begin(self, seed: int) -> None:
        self.observations, self.infos = self.env.reset(seed=seed)
        self.chosen: dict[str, Any] = {}

    def look(self) -> PlayView:
        agent = next((agent for agent in self.env.agents if agent not in self.chosen), "")
        return self.view_of(agent, self.observations.get(agent), self.infos.get(agent, {}))

    def act(self, action: Any) -> None:
        agent = next(agent for agent in self.env.agents if agent not in self.chosen)
        self.chosen[agent] = named_action(action, self.game.names_of(agent), self.game.first_of(agent))
        if len(self.chosen) < len(self.env.agents):
            return
        self.observations, rewards, terminated, truncated, self.infos = self.env.step(self.chosen)
        self.chosen = {}
        for agent, reward in rewards.items():
            self.paid[agent] += float(reward)
        self.terminated |= any(terminated.values())
        self.truncated |= any(truncated.values())


class PettingZooGame(ForeignGame):
    """An environment with several agents, each an actor.

    PettingZoo pays an illegal move -1 and the others 0. Here the mask is checked first: such a move never reaches the
    environment. It costs its actor 1.5, which the others share, so a zero-sum game stays zero-sum. A copy of most
    environments is a new game without the moves, so forks are replays.
    """

    options: PettingZooOptions
    invalid_cost = 1.5
    fork_methods = (Replays(),)

    def __init__(self, options: PettingZooOptions) -> None:
        super().__init__(options)
        require("pettingzoo", "pettingzoo")
        self.name = f"pettingzoo:{options.name}"
        self.maker = self._find(options)
        with closing(self.make()) as env:
            self.actors = tuple(str(agent) for agent in env.possible_agents)
            self.spaces = {agent: env.action_space(agent) for agent in self.actors}
        self.is_competitive = not options.cooperative and len(self.actors) > 1
        for agent, space in self.spaces.items():
            names = self.names_of(agent)
            if names is None and self.parse is None:
                raise ValueError(f"task={self.name!r}: its actions are {space}: expected task_options.parse")
            if names is not None and len(set(names)) != space.n:
                raise ValueError(f"task_options.actions={list(names)!r}: expected {space.n} different names")

    def _find(self, options: PettingZooOptions) -> Any:
        """Return the function that makes the environment. A name with a dot is a module of any package."""
        kind = "parallel_env" if options.parallel else "env"
        names = [options.name] if "." in options.name else [f"pettingzoo.{one}.{options.name}" for one in FAMILIES]
        name = next((name for name in names if _exists(name)), None)
        if name is None:
            raise ValueError(f"task={self.name!r}: expected a module of {', '.join(FAMILIES)}, as in 'tictactoe_v3'")
        module = require(name, "pettingzoo")
        if not hasattr(module, kind):
            raise ValueError(f"task_options.parallel={options.parallel!r}: {name} has no {kind}")
        return getattr(module, kind)

    def make(self) -> Any:
        try:
            return self.maker(**self.options.arguments)
        except TypeError as error:
            raise ValueError(f"task_options.arguments={self.options.arguments!r}: {error}") from error

    def names_of(self, agent: str) -> tuple[str, ...] | None:
        space = self.spaces[agent]
        if not hasattr(space, "n") or not hasattr(space, "start"):
            return None
        return self.options.actions or tuple(str(self.first_of(agent) + index) for index in range(int(space.n)))

    def first_of(self, agent: str) -> int:
        return int(self.spaces[agent].start)

    def start(self, seed: int) -> Play:
        return (ParallelPlay if self.options.parallel else TurnPlay)(self, seed)


def _exists(module: str) -> bool:
    """Return True if ``module`` can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class PettingZooTask(ForeignTask):
    """A task that plays an environment of PettingZoo.

    Example: ``build_task("pettingzoo:rps_v2", {"parallel": True, "actions": ["rock", "paper", "scissors"]})``
    """

    options_type = PettingZooOptions
    game_type = PettingZooGame
