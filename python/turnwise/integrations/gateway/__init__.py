"""A gateway: agents of any framework call models by a base URL, and their calls become token-exact training samples.

Read in this order: settings, wire, models, sessions, service, gateway, episode, process, replay, task, remote.
May import: types, utils, state, chat, arena, tasks, inference, inference.common, train.
"""

from turnwise.integrations.gateway.episode import AgentEpisode
from turnwise.integrations.gateway.gateway import Gateway
from turnwise.integrations.gateway.models import ChildModel, Model
from turnwise.integrations.gateway.process import Container, ProcessEpisode
from turnwise.integrations.gateway.replay import AgentReplayError, ReplayedEpisode
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.settings import GatewaySettings

__all__ = [
    "AgentEpisode",
    "AgentReplayError",
    "ChildModel",
    "Container",
    "Gateway",
    "GatewaySession",
    "GatewaySettings",
    "Model",
    "ProcessEpisode",
    "ReplayedEpisode",
]
