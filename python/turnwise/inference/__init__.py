"""Inference clients: token ids in, token ids and log-probabilities out.

``ScriptedClient`` plays a script (tests, docs); ``TransformersClient`` is the embedded default; ``VLLMClient`` runs
vLLM in this process. What the last two need is imported when their names are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from turnwise.inference.scripted import Reply, ScriptedClient
from turnwise.types import ContextLengthError, InferenceClient, ModelError, ModelRequest, ModelResponse

if TYPE_CHECKING:
    from turnwise.inference.transformers import TransformersClient
    from turnwise.inference.vllm import VLLMClient

__all__ = [
    "ContextLengthError",
    "InferenceClient",
    "ModelError",
    "ModelRequest",
    "ModelResponse",
    "Reply",
    "ScriptedClient",
    "TransformersClient",
    "VLLMClient",
]

_LAZY = {"TransformersClient": "turnwise.inference.transformers", "VLLMClient": "turnwise.inference.vllm"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
