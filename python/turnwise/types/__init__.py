"""The nouns: what the rooms of turnwise hand to one another.

Stages meet only here. Nothing in this folder imports torch or another room of the package.

Legend for array shapes: ``B`` samples, ``N`` tokens of a packed stream, ``P`` prompt tokens, ``C`` completion tokens.
"""

from __future__ import annotations

from turnwise.types.model_calls import (
    ContextLengthError,
    FinishReason,
    InferenceClient,
    Message,
    Messages,
    ModelError,
    ModelRequest,
    ModelResponse,
    PolicyVersions,
    Sampling,
    ScoringClient,
    Tokenizer,
)
from turnwise.types.play import (
    Actor,
    Artifact,
    EpisodeRequest,
    EpisodeState,
    GenerateResult,
    Rollout,
    Step,
)
from turnwise.types.training import (
    CreditAssigner,
    RewardFunction,
    Sample,
    TrainingBatch,
)

__all__ = [
    "Actor",
    "Artifact",
    "ContextLengthError",
    "CreditAssigner",
    "EpisodeRequest",
    "EpisodeState",
    "FinishReason",
    "GenerateResult",
    "InferenceClient",
    "Message",
    "Messages",
    "ModelError",
    "ModelRequest",
    "ModelResponse",
    "PolicyVersions",
    "RewardFunction",
    "Rollout",
    "Sample",
    "Sampling",
    "ScoringClient",
    "Step",
    "Tokenizer",
    "TrainingBatch",
]
