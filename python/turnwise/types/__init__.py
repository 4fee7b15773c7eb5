"""The nouns that the rooms of turnwise exchange, and the protocols through which they call each other.

Read in this order: play, model_calls, training, protocols.
May import: utils.

Nothing here imports torch. Array shapes: ``B`` samples, ``N`` tokens of a packed stream, ``P`` prompt tokens,
``C`` completion tokens.
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
