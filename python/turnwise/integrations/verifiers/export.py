"""A turnwise task as a verifiers v1 environment, which prime-rl and ``vf-eval`` load by the name of a module."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import create_model

from turnwise.arena import Arena
from turnwise.integrations.verifiers.players import DirectHarness, Players
from turnwise.state import to_python
from turnwise.tasks import Task, build_task
from turnwise.tasks.base import held_out
from turnwise.types import EpisodeRequest, GenerateResult

REPEATS = 50
"""Draws in a row without a new question, after which the taskset ends."""


class EpisodeData(vf.TaskData):
    """A request of a turnwise task, as it is sent between processes."""

    episode_type: str
    artifact: Any


class EpisodeTask(vf.Task[EpisodeData]):
    """One question of a turnwise task. Its environment gives the rewards."""


class EpisodesConfig(vf.TasksetConfig):
    """Questions to load, under ``[env.taskset]``."""

    split: Literal["train", "validation", "eval"] = "train"
    size: int = 1000
    """Most questions to load; held-out splits have at most 200 by default."""


def export_task(
    task: str | Task, options: Mapping[str, Any] | None = None
) -> tuple[type[vf.Taskset], type[vf.Env], type[vf.Harness]]:
    """Return the taskset, the environment and the harness of ``task``: a name with its options, or a task.

    Each actor is an agent of the environment. A call that continues the actor's earlier chat is a turn of the same
    trace, any other call begins a new one. The reward of a trace is the actor's reward in its episode, and its metrics
    are the episode's. Write a module like this one; its name is the taskset's id::

        from turnwise.integrations.verifiers import export_task

        Taskset, Env, Harness = export_task("split_clues")
        __all__ = ["Taskset", "Env", "Harness"]

    Raises ``ValueError`` for a task whose actors have tools, or whose rewards compare attempts.
    """
    made: Task = build_task(task, options) if isinstance(task, str) else task
    if tooled := [actor.id for actor in made.actors if actor.tools]:
        raise ValueError(f"task={made.name!r}: actor {tooled[0]!r} has tools, which can't be exported yet")
    if grouped := [name for name, episode in made.episodes().items() if episode.rubric.is_grouped]:
        raise ValueError(
            f"task={made.name!r}: episode {grouped[0]!r} rewards attempts as a group, and v1 plays each alone"
        )
    agent = vf.AgentConfig(runtime=vf.SubprocessConfig())
    roles: dict[str, Any] = {actor.id: (vf.AgentConfig, agent) for actor in made.actors}
    config = create_model("ExportedEnvConfig", __base__=vf.EnvConfig, **roles)
    own = {"made": made, "started": itertools.count()}
    # verifiers reads the config's class from the bases as they are written.
    env = types.new_class("ExportedEnv", (PlaysEpisodes, vf.Env[config]), exec_body=lambda body: body.update(own))
    return type("ExportedTaskset", (EpisodeTaskset,), {"made": made}), env, DirectHarness


class EpisodeTaskset(vf.Taskset[EpisodeTask, EpisodesConfig]):
    """The questions of a split. Training questions are drawn step by step, and each is loaded once."""

    made: Task

    def load(self) -> Iterator[EpisodeTask]:
        requests = self._train() if self.config.split == "train" else self._held_out()
        for request in itertools.islice(requests, self.config.size):
            data = EpisodeData(episode_type=request.episode_type, artifact=to_python(request.artifact))
            if json.loads(json.dumps(data.artifact)) != data.artifact:
                raise TypeError(f"task={self.made.name!r}: artifact={data.artifact!r}: expected what JSON can hold")
            yield EpisodeTask(data, self.config.task)

    def _train(self) -> Iterator[EpisodeRequest]:
        seen: set[str] = set()
        last = 0
        for step in itertools.count():
            for request in self.made.requests(step, 1, 1):
                key = json.dumps([request.episode_type, to_python(request.artifact)], sort_keys=True)
                if key not in seen:
                    seen.add(key)
                    last = step
                    yield request
            if step - last >= REPEATS:
                return

    def _held_out(self) -> Iterator[EpisodeRequest]:
        # A small split raises for more questions than it has.
        yield from held_out(self.made, self.config.split, None)


class PlaysEpisodes:
    """Mixin for verifiers' ``Env`` of an exported environment: the agents play one episode of turnwise."""

    made: Task
    started: Iterator[int]

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        actors = [replace(actor, policy=actor.id) for actor in self.made.actors]
        players = Players(agents, [actor.id for actor in actors])
        # Attempts at one question differ in what an episode draws.
        arena = Arena(players, seed=next(self.started), failure_threshold=1.0)
        for actor in actors:
            arena.add_actor(actor)
        for episode in self.made.episodes().values():
            arena.add_episode(episode)
        try:
            request = EpisodeRequest(task.data.episode_type, task.data.artifact)
            [result] = await arena.generate_rollouts([request])
        finally:
            await players.close()
        if result.rollout.error is not None:
            raise RuntimeError(result.rollout.error)
        _reward(result, players)


def _reward(result: GenerateResult, players: Players) -> None:
    """Give each trace the reward of its actor, and the metrics that are no other actor's. Unpaid traces don't train."""
    rollouts = {node.rollout.id: node.rollout for node in result.walk()}
    for (rollout_id, actor), talks in players.talks.items():
        rollout = rollouts[rollout_id]
        rewards = [step.reward for step in rollout.steps if step.actor_id == actor and step.reward is not None]
        reward = rollout.rewards.get(actor, fmean(rewards) if rewards else None)
        for talk in talks:
            trace = talk.interaction.trace
            if rollout.error is not None or reward is None:
                trace.agent.trainable = False
                continue
            trace.record_reward("turnwise", reward)
            for name, value in rollout.metrics.items():
                function, _, whose = name.rpartition("/")
                if whose == actor or whose not in players.actors:
                    trace.record_metric(function if whose == actor else name, value)
