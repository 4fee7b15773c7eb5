"""Parts that clients share: their lifetime, the gate that holds requests back, and the checks of a request."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from turnwise.chat import ChatRenderer
from turnwise.chat.thoughts import CALL_MARKS, find_thoughts
from turnwise.chat.tokenizers import ends_of
from turnwise.inference.common.http import LoopThread
from turnwise.types import (
    ClientCapabilities,
    ContextLengthError,
    EngineReport,
    ModelError,
    ModelRequest,
    ModelResponse,
    ReportingClient,
    RoutedExperts,
    Sampling,
    Tokenizer,
)
from turnwise.types.prompts import prompt_tokens

T = TypeVar("T")

LEAST_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this one to it, and then reports log-probabilities at this temperature."""

CLOSED_BEFORE = "the client was closed before this request was done"


class ClientBase(ABC):
    """Base of all clients. A client ends with ``close()`` or with its ``async with`` block."""

    @property
    def capabilities(self) -> ClientCapabilities:
        """The client's capabilities beyond its protocol."""
        return ClientCapabilities()

    def stats(self) -> dict[str, float]:
        """Return totals since the start by name; empty for a client that counts nothing."""
        return {}

    def peaks(self) -> dict[str, float]:
        """Return the largest values since the last call by name; empty for a client that measures none."""
        return {}

    async def load(self) -> dict[str, EngineReport | None]:
        """Return the report of each engine that answers now, by its name; ``None`` for one that makes no reports."""
        return {type(self).__name__: None}

    @abstractmethod
    async def close(self) -> None:
        """Fail all waiting and running requests, and free the client's resources. May be called again."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class GatedClient(ClientBase):
    """Base of clients that answer in the loop of ``thread``, and hold new requests back while they are paused."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._closed = False
        self._running = 0
        self._seconds = self._since = 0.0  # in which a request ran, and when that was last summed up
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    def _check(self, request: ModelRequest) -> None:
        """Raise an error for a request that can't be sent. Runs before any is sent."""

    async def _prepare(self) -> None:
        """Make the server ready for requests. Runs in the thread's loop."""

    @abstractmethod
    async def _one(self, request: ModelRequest) -> ModelResponse:
        """Return the response to ``request``. Runs in the thread's loop."""

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return one response per request, in order. Raises ``ModelError`` if the client is closed.

        Raises ``ValueError`` for a request that can't be sent, and ``ContextLengthError`` for a prompt that leaves no
        room for a token. Raises ``ModelError`` also if the server can't be reached, refuses, takes too long or sends an
        invalid answer.
        """
        for request in requests:
            self._check(request)
        if self._closed:
            raise ModelError("the client is closed")
        if self._thread.runs_here():  # in a pool that shares the thread
            return await self._through_gate(requests)
        return await self._result(self._thread.submit(self._through_gate(requests)))

    def share_thread(self, name: str) -> LoopThread:
        """Return the client's thread for another user, ``name``, who stops it separately."""
        return self._thread.share(name)

    async def pause(self) -> None:
        """Hold back new requests, and return once none runs. Requests wait until :meth:`resume`."""
        self._thread.call(self._open.clear)
        await asyncio.wrap_future(self._thread.submit(self._idle.wait()))

    async def resume(self) -> None:
        """Let waiting requests run."""
        self._thread.call(self._open.set)

    async def _result(self, work: Future[T]) -> T:
        """Return the result of ``work``, which is cancelled with its caller.

        Raises ``ModelError`` if it was cancelled because the client is closed.
        """
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise ModelError(CLOSED_BEFORE) from None
            raise

    def _blocking_result(self, work: Future[T]) -> T:
        """Return the result of ``work``. Raises ``ModelError`` if it was cancelled because the client is closed."""
        try:
            return work.result()
        except CancelledError:
            raise ModelError(CLOSED_BEFORE) from None

    async def _through_gate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        await self._open.wait()
        self._count(len(requests))
        try:
            await self._prepare()
            if len(requests) == 1:
                return [await self._one(requests[0])]  # the usual case needs no further task
            return await gather_all([asyncio.ensure_future(self._one(request)) for request in requests])
        finally:
            self._count(-len(requests))

    def _count(self, change: int) -> None:
        """Add ``change`` to the number of running requests."""
        self._seconds, self._since = self._busy_seconds(), time.perf_counter()
        self._running += change
        (self._idle.clear if self._running else self._idle.set)()

    def _busy_seconds(self) -> float:
        """Seconds in which a request ran, up to now."""
        return self._seconds + (time.perf_counter() - self._since if self._running else 0.0)


class GatedScoringClient(GatedClient):
    """Base of gated clients that score through ``generate``: their requests may have ``scored_token_ids``."""

    async def score(self, requests: Sequence[ModelRequest], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities of ``completions[i]`` after the prompt of ``requests[i]``; see ``ScoringClient``.

        Raises the errors of :meth:`generate`, and ``ValueError`` for an empty completion or a grammar.
        """
        asked = [
            replace(request, scored_token_ids=scored_ids(request, completion))
            for request, completion in zip(requests, completions, strict=True)
        ]
        responses = await self.generate(asked)
        for request, response in zip(asked, responses, strict=True):
            if response.completion_token_ids != request.scored_token_ids:
                raise ModelError(f"{type(self).__name__} sampled a completion that it was asked to score")
        return [response.logprobs for response in responses]


def find_policy(policies: Mapping[str, T], name: str) -> T:
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


async def loads_of(clients: Sequence[object]) -> dict[str, EngineReport | None]:
    """Join the reports of the engines of ``clients``; a client that can't ask its engine makes none."""
    asked = [client.load() for client in clients if isinstance(client, ReportingClient)]
    silent: dict[str, EngineReport | None] = {
        type(client).__name__: None for client in clients if not isinstance(client, ReportingClient)
    }
    return {name: report for one in [silent, *await gather_all(asked)] for name, report in one.items()}


# -- requests ----------------------------------------------------------------------------------------------------------
def scored_ids(request: ModelRequest, completion: Sequence[int]) -> list[int]:
    """Return ``completion`` as a list. Raises ``ValueError`` if it is empty, or if the request has a grammar."""
    if request.sampling.grammar is not None:
        raise ValueError("sampling.grammar: expected none, as scores are those over all tokens")
    if not len(completion):
        raise ValueError("completions: expected at least one token in each, to be scored")
    return list(map(int, completion))


def scored_as_prompt(request: ModelRequest) -> ModelRequest:
    """Return a request to score tokens as one for a single token after them; others as they are."""
    if request.scored_token_ids is None:
        return request
    ids = [*request.prompt_token_ids, *request.scored_token_ids]
    return replace(request, prompt_token_ids=ids, sampling=request.sampling.with_(max_tokens=1))


def scored_response(request: ModelRequest, logprobs: list[float], version: int, tokenizer: Tokenizer) -> ModelResponse:
    """Return the response to a request to score tokens: they are its completion, by weights of ``version``."""
    ids = list(request.scored_token_ids or ())
    return ModelResponse(
        text=tokenizer.decode(ids, skip_special_tokens=True),
        completion_token_ids=ids,
        logprobs=logprobs,
        finish_reason="stop",
        policy_versions=[(len(ids), version)],
        prompt_token_ids=prompt_tokens(request),
    )


def reject_scored(request: ModelRequest, client: object) -> None:
    """Raise ``ValueError`` for a request with tokens to score."""
    if request.scored_token_ids is not None:
        raise ValueError(f"scored_token_ids: {type(client).__name__} can't score tokens, expected none")


def completion_limit(request: ModelRequest, vocabulary: int, context_length: int | None) -> int:
    """The largest number of tokens in the completion: the request's limit, or the room left in the model's context.

    Raises ``ValueError`` for an empty prompt and for ids outside ``[0, vocabulary)``, and ``ContextLengthError`` for a
    prompt that leaves no room for a token.
    """
    prompt = prompt_tokens(request)
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
    """The tokenizer's end of sequence, the model's own ends and the request's stop tokens, each once."""
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return tuple(dict.fromkeys((*end, *ends_of(tokenizer), *request.sampling.stop_token_ids)))


def stop_check(sampling: Sampling, tokenizer: Any, prompt: Sequence[int]) -> Callable[[Sequence[int]], bool] | None:
    """Return a function that is true for completion ids whose end completes a stop string; ``None`` without any.

    Stop strings count in the answer alone, not in a thought or in a call. The function is asked after each token.
    """
    if not sampling.stop:
        return None
    format = ChatRenderer(tokenizer)
    begun, marks = format.opens_thought(prompt), format.thought_marks
    call_closing = tuple(mark for _, mark in CALL_MARKS)
    closing = (*call_closing, *(mark for _, mark in marks))
    # A token may hold a single byte, and the first ones of the window may lack the bytes before them.
    window, mark_window = (
        max(len(text.encode(errors="replace")) for text in texts) + 4 for texts in (sampling.stop, closing)
    )
    inside = said = False
    left, read = "", 0  # the text after the last whole thought among the tokens that were read

    def stopped(ids: Sequence[int]) -> bool:
        nonlocal begun, inside, left, read, said
        if inside:  # a thought may be long and hold many stop strings: wait for its end
            end = _decode(tokenizer, ids[-mark_window:])
            inside = not any(mark in end for mark in closing)
        if inside or not any(stop in _decode(tokenizer, ids[-window:]) for stop in sampling.stop):
            return False
        text = left + _decode(tokenizer, ids[read:])
        found = find_thoughts(text, begun=begun, ended=False, calls=CALL_MARKS, marks=marks)
        spoken = found.answer_without_calls(text)
        if any(stop in (spoken if said else spoken.lstrip()) for stop in sampling.stop):
            return True
        in_call = bool(found.calls) and found.calls[-1][1] == len(text) and not text.endswith(call_closing)
        inside = found.is_open or in_call
        whole = found.thoughts[:-1] if found.is_open else found.thoughts
        if whole and not in_call and not text.endswith("\ufffd"):
            begun, said, left, read = False, said or bool(spoken.strip()), text[whole[-1][1] :], len(ids)
        return False

    return stopped


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def cut_at_stop(response: ModelResponse, sampling: Sampling, tokenizer: Any) -> ModelResponse:
    """End ``response`` with the token that completes a stop string, for engines that sample ids without text.

    The tokens that were sampled after it are dropped. What is left is what an engine that stops there would sample.
    """
    stopped = stop_check(sampling, tokenizer, prompt_tokens(response))
    ids = response.completion_token_ids
    if stopped is None:
        return response
    seen: list[int] = []
    for token in ids:
        seen.append(token)
        if stopped(seen):
            break
    else:
        return response
    end = len(seen)
    runs, left = [], end
    for count, version in response.policy_versions:
        runs.append((min(count, left), version))
        left -= count
        if left <= 0:
            break
    experts, passed = response.routed_experts, len(prompt_tokens(response)) + end - 1
    return replace(
        response,
        text=tokenizer.decode(ids[:end], skip_special_tokens=True),
        completion_token_ids=ids[:end],
        logprobs=response.logprobs[:end],
        finish_reason="stop",
        policy_versions=runs,
        routed_experts=None if experts is None else RoutedExperts(experts.ids[:passed]),
        sampling_mask=None if response.sampling_mask is None else response.sampling_mask.first(end),
    )


def check_sampling_by_vllm(sampling: Sampling) -> None:
    """Raise ``ValueError`` for sampling that vLLM would change."""
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"temperature={sampling.temperature}: expected 0, or at least vLLM's {LEAST_TEMPERATURE}")
