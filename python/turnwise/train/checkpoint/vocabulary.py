"""The tokens that the weights of a run were trained with: a digest in each checkpoint, which a resume compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from turnwise.settings.section import problem
from turnwise.train.checkpoint.files import read_state
from turnwise.train.checkpoint.listing import checkpoints_to_resume
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.types import ByPolicy, Tokenizers

VOCABULARY = "vocabulary"
"""Key of a checkpoint's state with the digests of the tokenizers' tokens, by policy; or one of all policies."""


def digest_of(tokenizer: Any) -> str | None:
    """Return a digest of the tokens of ``tokenizer`` and their ids; ``None`` if it can't list them."""
    tokens: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return blake2b(json.dumps(sorted(tokens.items())).encode(), digest_size=16).hexdigest() if tokens else None


def digests(tokenizers: Tokenizers) -> Any:
    """Return the digest of the tokens of each policy, or one of all; ``None`` for tokens that can't be listed."""
    return ByPolicy.of(tokenizers, "tokenizer").mapped(digest_of).plain


def check_vocabulary(config: TrainConfig, read_tokenizers: Callable[[], Tokenizers]) -> None:
    """Raise :class:`ConfigError` if ``config`` goes on from a checkpoint of other tokens than its tokenizers have.

    Its weights would not fit, or mean other tokens. ``read_tokenizers`` is only called if a checkpoint tells.
    """
    checkpoints = checkpoints_to_resume(config)
    saved = read_state(checkpoints[-1]).get(VOCABULARY) if checkpoints else None
    if saved is None:
        return
    before, now = (ByPolicy.of(each, "digest") for each in (saved, digests(read_tokenizers())))
    for name, policy in config.policies.items():
        if now[name] in (before[name], None):
            continue
        if policy.path == "tiny":
            key, value = ("tasks", list(config.tasks)) if config.tasks else ("task", config.task)
            why = "the tokens of the tiny model are those of the task's texts, and its weights were trained with others"
        else:
            key, value = f"policies.{name}.path", policy.path
            why = "its tokenizer has other tokens than the one that the checkpoint was trained with"
        raise ConfigError(problem(key, f"{why}. Choose another run_dir to start anew", value))
