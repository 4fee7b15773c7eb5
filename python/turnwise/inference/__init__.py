"""Inference clients: token ids in, token ids and log-probabilities out.

``ScriptedClient`` plays a script (tests, docs); ``TransformersClient`` is the embedded default and needs torch and
transformers, which are imported when its name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turnwise.inference.scripted import Reply, ScriptedClient
from turnwise.types import ContextLengthError, InferenceClient, ModelError, ModelRequest, ModelResponse

if TYPE_CHECKING:
    from turnwise.inference.transformers import TransformersClient

__all__ = [
    "ContextLengthError",
    "InferenceClient",
    "ModelError",
    "ModelRequest",
    "ModelResponse",
    "Reply",
    "ScriptedClient",
    "TransformersClient",
]


def __getattr__(name: str) -> Any:
    if name == "TransformersClient":
        from turnwise.inference.transformers import TransformersClient

        return TransformersClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
