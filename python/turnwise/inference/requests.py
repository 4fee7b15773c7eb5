"""What every client that computes completions checks of a request, and takes from it."""

from __future__ import annotations

from turnwise.types import ContextLengthError, ModelRequest, Sampling, Tokenizer

LEAST_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this one up to it, so its log-probabilities would be of another one."""


def completion_limit(request: ModelRequest, vocabulary: int, context_length: int | None) -> int:
    """How many tokens the completion may have, its own limit and the room in the model's context considered.

    Raises ``ValueError`` for an empty prompt and for ids outside of ``[0, vocabulary)``, and ``ContextLengthError`` for
    a prompt that leaves no room for a token.
    """
    prompt = request.prompt_token_ids
    if not len(prompt):
        raise ValueError("prompt_token_ids is empty: expected at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise ValueError(f"prompt_token_ids has {min(prompt)}..{max(prompt)}: expected 0..{vocabulary - 1}")
    if context_length is None:
        return request.sampling.max_tokens
    room = context_length - len(prompt)
    if room < 1:
        raise ContextLengthError(
            f"prompt of {len(prompt)} tokens leaves no room in the {context_length}-token context "
            f"of policy {request.policy!r}"
        )
    return min(request.sampling.max_tokens, room)


def stop_token_ids(request: ModelRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokenizer's end of sequence and the request's own stop tokens, each once."""
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return tuple(dict.fromkeys((*end, *request.sampling.stop_token_ids)))


def check_sampling_by_vllm(sampling: Sampling) -> None:
    """Raise ``ValueError`` for what vLLM samples, but doesn't tell the log-probabilities of."""
    if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
        raise ValueError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k}: expected 1 and 0, as vLLM tells the "
            "log-probabilities that are left after such a cut"
        )
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"temperature={sampling.temperature}: vLLM takes 0 or at least {LEAST_TEMPERATURE}")
