"""Episodes that a verifiers environment plays with the arena's actors as its agents."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import verifiers.v1 as vf

from turnwise.arena import Episode, Rubric
from turnwise.arena.runtime.context import require_context
from turnwise.integrations.gateway.episode import reported_reward
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.verifiers.client import CONTEXT, Serving
from turnwise.state import to_python
from turnwise.types import EpisodeState
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.copies import own_copy


class VerifiersEpisode(Episode):
    """One verifiers episode: ``env.run_episode`` on the task at ``artifact["index"]``, with actors as agents.

    An actor's reward is ``trace.reward`` of its agent. If an agent runs several times, each call's own reward is that
    of its run, and the actor's is their mean. Rows of a failed run, of a retried one, and of an agent that ``setup``
    made untrainable don't train. The rubric's parts and metrics are the episode's metrics
    ``verifiers/<name>/<agent>``.

    Raises ``RuntimeError`` if ``env.complete`` refuses the finished episode, and ``TimeoutError`` after ``timeout``
    seconds.
    """

    def __init__(
        self,
        env: vf.Env,
        tasks: Sequence[vf.Task],
        actors: Sequence[str],
        *,
        settings: GatewaySettings | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.env, self.tasks, self.actors, self.timeout = env, tasks, list(actors), timeout
        self.settings = settings or GatewaySettings()
        self.rubric = Rubric([reported_reward])
        self._serving = Serving(env)

    async def rollout(self, arena: ArenaForHooks, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        context = require_context()
        state = context.state if state is None else state
        context.state = state
        session = GatewaySession(self.actors, arena, self.settings)
        task = own_copy(self.tasks[to_python(artifact)["index"]])
        try:
            async with asyncio.timeout(self.timeout):
                episode = await self._run(task, session)
        except TimeoutError:
            raise TimeoutError(f"the environment took longer than timeout={self.timeout:g} s") from None
        finally:
            await session.end("the episode has ended")
        if session.failure is not None:
            raise session.failure
        if not self.env.complete(episode):
            raise RuntimeError(f"{type(self.env).__name__}: {_reasons(episode)}")
        for name, value in _measured(episode).items():
            context.rollout.metrics[name] = value
        state.data["rewards"] = rewards_of(episode, state)
        state.done = True
        return state

    async def _run(self, task: vf.Task, session: GatewaySession) -> vf.Episode:
        """Play the task. Each trace that begins is answered by ``session``, until the episode ends."""
        begun: list[str] = []
        async with self._serving.open() as client:

            def on_trace(trace: vf.Trace) -> None:
                client.sessions[trace.id] = session, trace.agent.name
                begun.append(trace.id)

            try:
                return await self.env.run_episode(task, CONTEXT, on_trace=on_trace)
            finally:
                for trace in begun:
                    del client.sessions[trace]

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        return dict(to_python(state.data))


def rewards_of(episode: vf.Episode, state: EpisodeState) -> dict[str, float]:
    """Return the reward of each actor that has rows to train, and mark the rows of ``state`` that have none."""
    counted = {trace.id: trace for trace in episode.traces if trace.ok and trace.agent.trainable}
    runs: dict[str, dict[str, float]] = {}
    for step in state.trajectory:
        trace = counted.get(step.facts.trace or "")
        if trace is None:
            step.trainable = False
            step.facts.error = "its run of the agent failed, was repeated or is not to be trained"
        else:
            runs.setdefault(str(step.actor_id), {})[trace.id] = float(trace.reward)
    for step in state.trajectory:
        rewards = runs.get(str(step.actor_id), {})
        if step.trainable and step.facts.trace is not None and len(rewards) > 1:
            step.reward = rewards[step.facts.trace]
    return {actor: fmean(rewards.values()) for actor, rewards in runs.items()}


def _measured(episode: vf.Episode) -> dict[str, float]:
    """Return the unweighted parts of the rewards, and the metrics, as means over the runs of each agent."""
    measured: dict[str, list[float]] = {}
    for trace in episode.traces:
        parts: Mapping[str, Any] = {name: part.score for name, part in trace.rewards.items() if part is not None}
        for name, value in {**trace.metrics, **parts}.items():
            if value is not None:
                measured.setdefault(f"verifiers/{name}/{trace.agent.name}", []).append(float(value))
    for name, traces in episode.by_agent.items():
        measured[f"verifiers/runs/{name}"] = [float(len(traces))]
    return {name: fmean(values) for name, values in measured.items()}


def _reasons(episode: vf.Episode) -> str:
    """Return the errors of a failed episode: its own, else its agents'."""
    errors = [f"{error.type}: {error.message}" for error in episode.errors]
    errors += [
        f"agent {trace.agent.name!r}: {error.type}: {error.message}"
        for trace in episode.traces
        for error in trace.errors
    ]
    return "; ".join(dict.fromkeys(errors)) or "env.complete(episode) is false, and it has no error"
