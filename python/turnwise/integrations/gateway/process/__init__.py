"""Agents as commands: each episode is a process with its own folder, in a container if the config says so.

Read in this order: episode, program, folder, output, supervisor, container.
May import: types, utils, sandbox, chat, arena, inference.common, integrations.gateway.
"""

from turnwise.integrations.gateway.process.container import Container
from turnwise.integrations.gateway.process.episode import AgentProcessError, ProcessEpisode

__all__ = ["AgentProcessError", "Container", "ProcessEpisode"]
