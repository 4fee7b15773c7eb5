"""Sizes of a Hugging Face causal LM, whatever its config calls them, and through the layers of adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_CONTEXT = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "n_ctx", "seq_length")


def context_length(config: Any) -> int | None:
    """Return the most tokens of a sequence by a model's ``config``, of its text part; ``None`` if it names no limit.

    Recurrent models (Mamba) and those whose positions are slopes (Bloom) have none.
    """
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in _CONTEXT)
    return next((int(size) for size in found if isinstance(size, int) and size > 0), None)


def shortest_context(configs: Iterable[Any]) -> int | None:
    """Return the smallest :func:`context_length`; ``None`` if no config names one."""
    return min(filter(None, map(context_length, configs)), default=None)


def vocabulary_size(model: Any) -> int:
    """Return the number of tokens that ``model`` embeds; its embedding may have an adapter."""
    return int(model.get_input_embeddings().weight.shape[0])
