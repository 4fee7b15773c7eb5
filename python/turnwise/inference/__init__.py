"""Inference clients: token ids in, token ids and log-probabilities out.

``ScriptedClient`` plays a script (tests, docs); ``TransformersClient`` is the embedded default; ``VLLMClient`` runs
vLLM in this process, ``VLLMProcessClient`` in one of its own, ``VLLMServerClient`` asks a server of it at an
``Endpoint``; ``OpenAIClient`` is for judges and fixed opponents. ``RoutingClient`` puts several together. What they
need is imported when their names are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from turnwise.inference.routing import RoutingClient
from turnwise.inference.scripted import Reply, ScriptedClient
from turnwise.types import ContextLengthError, InferenceClient, ModelError, ModelRequest, ModelResponse

if TYPE_CHECKING:
    from turnwise.inference.endpoint import Endpoint
    from turnwise.inference.openai import OpenAIClient
    from turnwise.inference.transformers import TransformersClient
    from turnwise.inference.vllm import VLLMClient
    from turnwise.inference.vllm_process import VLLMProcessClient
    from turnwise.inference.vllm_server import VLLMServerClient

__all__ = [
    "ContextLengthError",
    "Endpoint",
    "InferenceClient",
    "ModelError",
    "ModelRequest",
    "ModelResponse",
    "OpenAIClient",
    "Reply",
    "RoutingClient",
    "ScriptedClient",
    "TransformersClient",
    "VLLMClient",
    "VLLMProcessClient",
    "VLLMServerClient",
]

_LAZY = {
    "Endpoint": "turnwise.inference.endpoint",
    "OpenAIClient": "turnwise.inference.openai",
    "TransformersClient": "turnwise.inference.transformers",
    "VLLMClient": "turnwise.inference.vllm",
    "VLLMProcessClient": "turnwise.inference.vllm_process",
    "VLLMServerClient": "turnwise.inference.vllm_server",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
