"""The embedded client: runs Hugging Face models in this process, and batches many callers into few forward passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn

from turnwise.chat.grammar import check_grammar, dead_end
from turnwise.chat.tokenizers import keep_ends, own_copies
from turnwise.inference.common.base import (
    ClientBase,
    completion_limit,
    find_policy,
    gather_all,
    scored_ids,
    scored_response,
    stop_check,
    stop_token_ids,
)
from turnwise.inference.common.hf_model import count_tokens, limit_head, vocabulary_size
from turnwise.inference.local.batches import PendingRequest, policy_batches
from turnwise.inference.local.decode import Completion, SequenceSpec, Work, complete
from turnwise.inference.local.models import FairLock, ForwardLock, copy_models, load_models, sampling_mode
from turnwise.inference.local.scoring import ScoredSequence, completion_logprobs, length_batches
from turnwise.inference.weights.load import copy_weights
from turnwise.types import (
    ByPolicy,
    ClientCapabilities,
    DeadEndError,
    ModelError,
    ModelRequest,
    ModelResponse,
    RoutedExperts,
    Tokenizers,
)
from turnwise.types.prompts import prompt_tokens
from turnwise.utils.threads import to_thread

_QUIET_TICKS = 16
"""Rounds of the event loop without a new request after which a batch is complete. This uses no clock, so the same
program always makes the same batches."""


@dataclass(slots=True)
class BatchStats:
    """Totals since the client was made. ``prefilled_tokens`` counts each distinct prompt of a batch once,
    ``decoded_tokens`` each distinct prefix of its completions."""

    requests: int = 0
    batches: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    decoded_tokens: int = 0
    seconds: float = 0.0


class TransformersClient(ClientBase):
    """Completes prompts with Hugging Face causal language models in this process.

    Collects the requests of many coroutines until the event loop is idle, then runs them in one worker thread, policy
    by policy. Equal prompts are prefilled once. A request's tokens depend on its prompt, its sampling settings, its
    seed and the weights, not on the rest of the batch (up to float rounding). Log-probabilities are those of
    ``log_softmax(logits / temperature)``, over the tokens that top-p, top-k and min-p keep. If a model's cache fails a
    trial, the client warns, and recomputes the whole sequence for every token.

    - ``policies``: one model, which is then policy ``"default"``, or models by policy name. Adapters over one shared
      base use one copy of it.
    - ``tokenizer``: that of all policies, or each policy's by name.
    - ``max_batch_rows``, ``max_batch_tokens``: limits of a batch. The second counts prompt and new tokens with padding.
    - ``share``: uses the given modules, not copies. The caller must not train them while a batch runs;
      ``await pause()`` waits until none runs.
    - ``live``: names of policies whose copies use the memory of the given modules' parameters. The same holds for them
      as for shared modules.
    - ``in_flight``: loads new weights between two tokens of the running batch instead of after it. The key-value cache
      stays, and ``policy_versions`` of a response has the version of each token.
    - ``routed_experts``: returns the experts that mixtures of experts chose (:class:`RoutedExperts`), for a replay.
      Raises ``ValueError`` for a mixture whose choice can't be recorded.
    - ``seed``: source of the seeds for requests without one.

    Example::

        client = TransformersClient(model, tokenizer)
        [response] = await client.generate([ModelRequest([1, 17, 9], Sampling(max_tokens=8, seed=3))])
    """

    def __init__(
        self,
        policies: Mapping[str, nn.Module] | nn.Module,
        tokenizer: Tokenizers,
        *,
        max_batch_rows: int = 512,
        max_batch_tokens: int = 131072,
        share: bool = False,
        live: Collection[str] = (),
        in_flight: bool = False,
        routed_experts: bool = False,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("max_batch_rows", max_batch_rows), ("max_batch_tokens", max_batch_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value!r}: expected at least 1")
        models = {"default": policies} if isinstance(policies, nn.Module) else dict(policies)
        if not models:
            raise ValueError("policies is empty: expected at least one model")
        tokenizers = ByPolicy.of(tokenizer, "tokenizer")
        for name, model in models.items():
            keep_ends(tokenizers[name], getattr(model, "generation_config", None))
            limit_head(model, count_tokens(tokenizers[name]))
        self.tokenizer, self._tokenizers = tokenizers.plain, own_copies(tokenizers)
        self.max_batch_rows = max_batch_rows
        self.max_batch_tokens = max_batch_tokens
        self._shares_modules, self._shares_weights = share, share or bool(live)
        self._in_flight = in_flight
        self._policies = load_models(models if share else copy_models(models, live), share, device, routed_experts)
        self._seeds = np.random.default_rng(seed)
        self._stats = BatchStats()
        self._waiting: list[PendingRequest] = []
        self._drain: asyncio.Task[None] | None = None
        self._paused = False
        self._closed = False
        # Held while a batch is computed (in_flight: for one of its tokens) and while weights are copied.
        self._busy = FairLock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="turnwise-inference")

    # -- the client protocol ------------------------------------------------------------------------------------------
    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return one response per request, in order.

        Raises ``ValueError`` for an unknown policy, an empty prompt or a grammar that can't be used,
        ``ContextLengthError`` for a prompt that leaves no room for a token, ``DeadEndError`` if a grammar allows no
        further token, and ``ModelError`` if the forward pass fails or the client is closed.
        """
        if self._closed:
            raise ModelError("the client is closed")
        if any(request.scored_token_ids is not None for request in requests):
            return await self._generate_and_score(requests)
        for policy, grammar in {(request.policy, request.sampling.grammar) for request in requests}:
            if grammar is not None:
                await to_thread(check_grammar, self._tokenizers[policy], grammar)
        loop = asyncio.get_running_loop()
        jobs = [PendingRequest(request, self._row(request), loop.create_future()) for request in requests]
        self._waiting.extend(jobs)
        if not self._paused and self._draining() is None:
            self._drain = loop.create_task(self._run_waiting())
        try:
            return await gather_all(job.future for job in jobs)
        finally:
            for job in jobs:
                job.abandoned = not job.future.done() or job.future.cancelled()

    async def score(self, requests: Sequence[ModelRequest], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities of ``completions[i]`` after the prompt of ``requests[i]``; see ``ScoringClient``.

        Raises the errors of :meth:`generate`, also ``ValueError`` for an empty completion and ``ModelError`` while the
        client is paused.
        """
        if self._closed or self._paused:
            raise ModelError(f"the client is {'closed' if self._closed else 'paused'}")
        rows = [self._scored(*pair) for pair in zip(requests, completions, strict=True)]
        loop = asyncio.get_running_loop()
        scores: dict[int, list[float]] = {}
        # Score policy by policy, in batches of similar length; `batch` leads back to the order of the requests.
        for policy in sorted({request.policy for request in requests}):
            indices = [index for index, request in enumerate(requests) if request.policy == policy]
            for batch in length_batches(indices, rows, self.max_batch_rows, self.max_batch_tokens):
                batch_rows = [rows[index] for index in batch]
                computed = await loop.run_in_executor(self._worker, self._score, policy, batch_rows)
                scores |= zip(batch, computed, strict=True)
        return [scores[index] for index in range(len(rows))]

    async def _generate_and_score(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Sample the completions of some requests, and score those of the others."""
        scored = [request for request in requests if request.scored_token_ids is not None]
        sampled = [request for request in requests if request.scored_token_ids is None]
        completions = [list(request.scored_token_ids or ()) for request in scored]
        logprobs, responses = await asyncio.gather(self.score(scored, completions), self.generate(sampled))
        scores = iter(
            scored_response(request, values, self.version(request.policy), self._tokenizers[request.policy])
            for request, values in zip(scored, logprobs, strict=True)
        )
        samples = iter(responses)
        return [next(samples if request.scored_token_ids is None else scores) for request in requests]

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Copy ``weights`` (pairs of name and tensor) into ``policy``. Later tokens have the version ``version``.

        Waits for a running batch, or with ``in_flight`` only for its current token. The policy of an adapter takes the
        adapter's weights, with or without the whole shared base. All names and shapes are checked before anything is
        copied; see :func:`copy_weights`.
        """
        loaded = find_policy(self._policies, policy)
        with self._busy:
            copy_weights(loaded.model, weights, policy)
            loaded.version = version

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return find_policy(self._policies, policy).version

    async def pause(self) -> None:
        """Hold back new batches, and return once no batch runs. Requests wait until :meth:`resume`."""
        self._paused = True
        if (drain := self._draining()) is not None:
            await asyncio.wait([drain])

    async def resume(self) -> None:
        """Let waiting requests run."""
        self._paused = False
        if self._draining() is None:
            self._drain = asyncio.get_running_loop().create_task(self._run_waiting())

    async def close(self) -> None:
        """Fail waiting requests, end the running batch, and free the worker. May be called again."""
        self._closed = True
        for job in self._waiting:
            job.abandoned = True
            job.resolve(ModelError("the client was closed before this request ran"))
        self._waiting.clear()
        if (drain := self._draining()) is not None:
            drain.cancel()
            await asyncio.wait([drain])
        self._worker.shutdown(wait=True)

    @property
    def capabilities(self) -> ClientCapabilities:
        """The weights are shared if the client samples with the caller's own modules or their memory."""
        return ClientCapabilities(shares_weights=self._shares_weights, grammars=True)

    def stats(self) -> dict[str, float]:
        """Totals: ``requests, batches, prompt_tokens, prefilled_tokens, cached_tokens, generated_tokens``,
        ``decoded_tokens`` and ``seconds``.

        ``cached_tokens`` counts the prompt tokens that an equal prompt in the batch had already prefilled.
        """
        totals = asdict(self._stats)
        return {**totals, "cached_tokens": totals["prompt_tokens"] - totals["prefilled_tokens"]}

    # -- requests -----------------------------------------------------------------------------------------------------
    def _row(self, request: ModelRequest) -> SequenceSpec:
        loaded, sampling = find_policy(self._policies, request.policy), request.sampling
        limit = completion_limit(request, vocabulary_size(loaded.model), loaded.context_length)
        seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed
        tokenizer = self._tokenizers[request.policy]
        return SequenceSpec(
            tuple(prompt_tokens(request)),
            sampling,
            seed,
            limit,
            stop_token_ids(request, tokenizer),
            stop_check(sampling, tokenizer, prompt_tokens(request)),
        )

    def _scored(self, request: ModelRequest, completion: Sequence[int]) -> ScoredSequence:
        loaded = find_policy(self._policies, request.policy)
        whole = replace(request, prompt_token_ids=[*request.prompt_token_ids, *completion])
        room = None if loaded.context_length is None else loaded.context_length + 1  # no new token needs room
        completion_limit(whole, vocabulary_size(loaded.model), room)
        return ScoredSequence(
            tuple(prompt_tokens(request)), tuple(scored_ids(request, completion)), request.sampling.temperature
        )

    # -- collecting ---------------------------------------------------------------------------------------------------
    def _draining(self) -> asyncio.Task[None] | None:
        """The task that runs batches in this event loop, or ``None``."""
        drain = self._drain
        if drain is None or drain.done() or drain.get_loop() is not asyncio.get_running_loop():
            return None
        return drain

    async def _run_waiting(self) -> None:
        """Collect, run and answer requests until none waits."""
        loop = asyncio.get_running_loop()
        # Drop requests whose event loop has ended.
        self._waiting = [job for job in self._waiting if job.future.get_loop() is loop]
        running: list[PendingRequest] = []
        try:
            while self._waiting and not self._paused:
                await self._wait_until_idle()
                if self._paused:
                    return
                running, self._waiting = [job for job in self._waiting if not job.abandoned], []
                for policy, jobs in policy_batches(running, self.max_batch_rows, self.max_batch_tokens):
                    try:
                        responses = await loop.run_in_executor(self._worker, self._compute, policy, jobs)
                    except Exception as error:
                        message = f"policy {policy!r} failed on a batch of {len(jobs)}: {type(error).__name__}: {error}"
                        for job in jobs:  # an error for each caller: a shared one would collect all their tracebacks
                            failure = ModelError(message)
                            failure.__cause__ = error
                            job.resolve(failure)
                        continue
                    for job, response in zip(jobs, responses, strict=True):
                        job.resolve(response)
        except asyncio.CancelledError:
            # The event loop ends or the client closes. Fail every caller, and stop the worker early.
            for job in [*running, *self._waiting]:
                job.abandoned = True
                job.resolve(ModelError("the client was stopped before this request was done"))
            self._waiting.clear()
            raise

    async def _wait_until_idle(self) -> None:
        """Return after ``_QUIET_TICKS`` rounds of the event loop without a new request."""
        seen, ticks = len(self._waiting), 0
        while ticks < _QUIET_TICKS:
            await asyncio.sleep(0)
            ticks = ticks + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)

    # -- computing, in the worker thread ------------------------------------------------------------------------------
    def _compute(self, policy: str, jobs: list[PendingRequest]) -> list[ModelResponse | DeadEndError]:
        loaded = self._policies[policy]
        whole, each = (nullcontext(), ForwardLock(loaded, self._busy)) if self._in_flight else (self._busy, None)
        with whole, sampling_mode(loaded.model, self._shares_modules):
            began = time.perf_counter()
            completions, work = complete(
                loaded.model,
                [job.row for job in jobs],
                device=loaded.model.get_input_embeddings().weight.device,
                abandoned=lambda: [row for row, job in enumerate(jobs) if job.abandoned],
                forward_lock=each or nullcontext(loaded.version),
                cached=loaded.cached,
                tokenizer=self._tokenizers[policy],
                routers=loaded.routers,
            )
            responses = [self._response(*pair) for pair in zip(jobs, completions, strict=True)]
            self._count(jobs, completions, work, time.perf_counter() - began)
        return responses

    def _score(self, policy: str, rows: Sequence[ScoredSequence]) -> list[list[float]]:
        loaded = self._policies[policy]
        with self._busy, sampling_mode(loaded.model, self._shares_modules):
            device = loaded.model.get_input_embeddings().weight.device
            return completion_logprobs(loaded.model, rows, device, cached=loaded.cached)

    def _response(self, job: PendingRequest, completion: Completion) -> ModelResponse | DeadEndError:
        ids, tokenizer = completion.token_ids, self._tokenizers[job.request.policy]
        if completion.dead_end:
            return dead_end(tokenizer, ids)
        return ModelResponse(
            text=tokenizer.decode(ids, skip_special_tokens=True),
            completion_token_ids=ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            policy_versions=[(len(list(run)), version) for version, run in groupby(completion.versions)],
            prompt_token_ids=list(job.row.prompt),
            routed_experts=None if completion.experts is None else RoutedExperts(completion.experts),
            sampling_mask=completion.sampling_mask,
        )

    def _count(self, jobs: list[PendingRequest], completions: list[Completion], work: Work, seconds: float) -> None:
        self._stats.requests += len(jobs)
        self._stats.batches += 1
        self._stats.prompt_tokens += sum(len(job.row.prompt) for job in jobs)
        self._stats.prefilled_tokens += work.prefilled
        self._stats.decoded_tokens += work.decoded
        self._stats.generated_tokens += sum(len(completion.token_ids) for completion in completions)
        self._stats.seconds += seconds
