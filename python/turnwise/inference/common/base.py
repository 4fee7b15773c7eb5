"""Parts that every client shares: its lifetime, and the checks of a request."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from types import TracebackType
from typing import Self, TypeVar

from turnwise.types import ContextLengthError, ModelRequest, Sampling, Tokenizer

T = TypeVar("T")

LEAST_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this one to it, and then reports log-probabilities at this temperature."""


class ClientBase(ABC):
    """Base of all clients. A client ends with ``close()`` or with its ``async with`` block."""

    @abstractmethod
    async def close(self) -> None:
        """Fail all waiting and running requests, and free the client's resources. May be called again."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def policy_of(policies: Mapping[str, T], name: str) -> T:
    """Return ``policies[name]``. Raises ``ValueError`` for a policy that the client doesn't serve."""
    if name not in policies:
        raise ValueError(f"policy={name!r}: expected one of {sorted(policies)}")
    return policies[name]


async def gather_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await all ``calls`` and return their results in order. Raises the first error once all calls have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # exceptions were raised above


# -- requests ----------------------------------------------------------------------------------------------------------
def completion_limit(request: ModelRequest, vocabulary: int, context_length: int | None) -> int:
    """The largest number of tokens in the completion: the request's limit, or the room left in the model's context.

    Raises ``ValueError`` for an empty prompt and for ids outside ``[0, vocabulary)``, and ``ContextLengthError`` for a
    prompt that leaves no room for a token.
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
    """Raise ``ValueError`` for sampling whose log-probabilities vLLM doesn't report."""
    if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
        raise ValueError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k}: expected 1 and 0, as vLLM reports "
            "log-probabilities after such a cut, not before"
        )
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"temperature={sampling.temperature}: expected 0, or at least vLLM's {LEAST_TEMPERATURE}")
