"""The nouns that the rooms of turnwise exchange, and the protocols through which they call each other.

Read in this order: play, facts, completions, model_calls, prompts, short_prompts, by_policy, columns, passes,
training, capabilities, protocols.
May import: utils.

Nothing here imports torch. Array shapes: ``B`` samples, ``N`` tokens of a packed stream, ``P`` prompt tokens,
``C`` completion tokens.
"""

from __future__ import annotations

from turnwise.types.by_policy import ByPolicy, Tokenizers
from turnwise.types.capabilities import (
    CheckedClient,
    ClientCapabilities,
    CreditCapabilities,
    MeasuredClient,
    PooledClient,
    RecoverableClient,
    RoutedClient,
    TaskCapabilities,
    TokenizedClient,
    capabilities_of,
)
from turnwise.types.columns import (
    AllowedTokens,
    Column,
    CompletionColumn,
    RowColumn,
    TokenColumn,
)
from turnwise.types.completions import OK, Message, ParsedCompletion, ToolCall
from turnwise.types.facts import INFO_KEYS, META_KEYS, RequestFacts, RolloutFacts, StepFacts
from turnwise.types.model_calls import (
    Chat,
    ContextLengthError,
    DeadEndError,
    FinishReason,
    Grammar,
    InferenceClient,
    Messages,
    ModelError,
    ModelRequest,
    ModelResponse,
    PolicyVersions,
    RoutedExperts,
    Sampling,
    ScoringClient,
    Tokenizer,
)
from turnwise.types.play import (
    CHILD,
    CHILD_ACTORS,
    PAID_LATER,
    PAID_OTHERS,
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
    ExplainedCredit,
    GroupedCredit,
    RewardFunction,
    Sample,
    TrainingBatch,
)

__all__ = [
    "CHILD",
    "CHILD_ACTORS",
    "INFO_KEYS",
    "META_KEYS",
    "OK",
    "PAID_LATER",
    "PAID_OTHERS",
    "Actor",
    "AllowedTokens",
    "Artifact",
    "ByPolicy",
    "Chat",
    "CheckedClient",
    "ClientCapabilities",
    "Column",
    "CompletionColumn",
    "ContextLengthError",
    "CreditAssigner",
    "CreditCapabilities",
    "DeadEndError",
    "EpisodeRequest",
    "EpisodeState",
    "ExplainedCredit",
    "FinishReason",
    "GenerateResult",
    "Grammar",
    "GroupedCredit",
    "InferenceClient",
    "MeasuredClient",
    "Message",
    "Messages",
    "ModelError",
    "ModelRequest",
    "ModelResponse",
    "ParsedCompletion",
    "PolicyVersions",
    "PooledClient",
    "RecoverableClient",
    "RequestFacts",
    "RewardFunction",
    "Rollout",
    "RolloutFacts",
    "RoutedClient",
    "RoutedExperts",
    "RowColumn",
    "Sample",
    "Sampling",
    "ScoringClient",
    "Step",
    "StepFacts",
    "TaskCapabilities",
    "TokenColumn",
    "TokenizedClient",
    "Tokenizer",
    "Tokenizers",
    "ToolCall",
    "TrainingBatch",
    "capabilities_of",
]
