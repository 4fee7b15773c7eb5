"""Inference clients: token ids in, token ids and log-probabilities out.

Read in this order: scripted, common, openai, tinker, routing, weights, local, vllm, server, pool.
May import: types, utils, chat.

``ScriptedClient`` plays a script (tests, docs). ``TransformersClient`` is the embedded default. ``VLLMClient`` samples
with vLLM servers that it starts. ``VLLMServerClient`` calls a server of ``turnwise serve`` at an ``Endpoint``.
``TinkerClient`` samples with weights that a server of the Tinker API trains. ``OpenAIClient`` is for judges and fixed
opponents. ``RoutingClient`` gives each policy its own client. ``PoolClient`` distributes the requests of the
same policies over one or several clients, and repeats failed ones. Each client's dependencies are imported when its
name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.inference.routing import RoutingClient
from turnwise.inference.scripted import Reply, ScriptedClient
from turnwise.types import ContextLengthError, InferenceClient, ModelError, ModelRequest, ModelResponse
from turnwise.utils.registry import names_on_use

if TYPE_CHECKING:
    from turnwise.inference.common.http import Endpoint
    from turnwise.inference.local.client import TransformersClient
    from turnwise.inference.openai import OpenAIClient
    from turnwise.inference.pool.client import PoolClient
    from turnwise.inference.server.client import VLLMServerClient
    from turnwise.inference.server.own import VLLMClient
    from turnwise.inference.server.reader import VLLMServerReader
    from turnwise.inference.tinker import TinkerClient

__all__ = [
    "ContextLengthError",
    "Endpoint",
    "InferenceClient",
    "ModelError",
    "ModelRequest",
    "ModelResponse",
    "OpenAIClient",
    "PoolClient",
    "Reply",
    "RoutingClient",
    "ScriptedClient",
    "TinkerClient",
    "TransformersClient",
    "VLLMClient",
    "VLLMServerClient",
    "VLLMServerReader",
]

_HOMES = {
    "Endpoint": "turnwise.inference.common.http",
    "OpenAIClient": "turnwise.inference.openai",
    "PoolClient": "turnwise.inference.pool.client",
    "TinkerClient": "turnwise.inference.tinker",
    "TransformersClient": "turnwise.inference.local.client",
    "VLLMClient": "turnwise.inference.server.own",
    "VLLMServerClient": "turnwise.inference.server.client",
    "VLLMServerReader": "turnwise.inference.server.reader",
}

__getattr__ = names_on_use(__name__, _HOMES)
