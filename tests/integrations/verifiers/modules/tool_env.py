"""A taskset whose one agent has a tool, which a server process of verifiers runs."""

from __future__ import annotations

import verifiers.v1 as vf


class AddToolset(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class ToolTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float(any(message.content == "5" for message in trace.tool_messages))

    @vf.reward(weight=0.3)
    async def told(self, trace: vf.Trace) -> float:
        return float("5" in trace.last_reply)

    @classmethod
    def toolsets(cls, config):
        return [AddToolset(vf.ToolsetConfig())]


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            yield ToolTask(vf.TaskData(prompt=f"Question {number}: 2 + 3 = ?"), self.config.task)


def load_env():
    agent = {"harness": {"id": "plain_harness"}, "runtime": {"type": "subprocess"}}
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": "tool_env"}, "agent": agent}))


__all__ = ["ToolTaskset"]

if __name__ == "__main__":
    AddToolset.run()
