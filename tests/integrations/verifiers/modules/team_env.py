"""An environment of two agents: a solver drafts and revises a sum, and a checker judges the draft."""

from __future__ import annotations

import verifiers.v1 as vf
from plain_harness import PlainHarness


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.7)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=-0.1)
    async def long(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 7

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(2, 8):
            for b in range(2, 8):
                data = SumData(prompt=f"{a} + {b} = ?", answer=str(a + b), system_prompt="Answer briefly.")
                yield SumTask(data, self.config.task)


class TeamConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    checker: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    drafts: int = 1
    frozen_checker: bool = False
    lenient: bool = False


class TeamEnv(vf.Env[TeamConfig]):
    async def setup(self, agents):
        agents.checker.trainable = not self.config.frozen_checker

    async def run(self, task, agents):
        for _ in range(self.config.drafts):
            async with agents.solver.interaction(task) as solver:
                draft = await solver.turn()
                question = f"{task.data.prompt} {draft.last_reply} Right?"
                await agents.checker.run(vf.Task(vf.TaskData(prompt=question)))
                await solver.turn("Think again.")

    async def finalize(self, task, episode):
        for trace in episode.by_agent["checker"]:
            right = episode.by_agent["solver"][0].rewards["right"].score
            trace.record_reward("agrees", float(("yes" in trace.last_reply) == bool(right)), 1 / 3)

    def complete(self, episode):
        return episode.ok or self.config.lenient


def load_env(**options):
    return vf.resolve_env_config({"taskset": {"id": "team_env"}, **options})


__all__ = ["PlainHarness", "SumTaskset", "TeamEnv"]
