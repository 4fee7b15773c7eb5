"""Samples with a server of the Tinker API: Tinker's own service, or SkyRL.

The connection goes through the SDK of Tinker. The server keeps the weights; the client gets only their paths.
"""

from __future__ import annotations

import asyncio
import math
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from turnwise.chat.tokenizers import own_copy
from turnwise.inference.common.base import (
    GatedScoringClient,
    completion_limit,
    cut_at_stop,
    find_policy,
    scored_as_prompt,
    scored_response,
    stop_token_ids,
)
from turnwise.inference.common.http import LoopThread
from turnwise.inference.common.proxies import bypass_proxies, is_loopback
from turnwise.types import ModelError, ModelRequest, ModelResponse, Sampling, Tokenizer
from turnwise.utils.threads import to_thread

HOSTED = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""Address of the hosted service."""

MAX_ARCHIVE = 2**34
"""The most bytes of saved weights."""

POLL = 2.0
"""Seconds between two checks that the server is reachable."""

SAMPLER, BASE = "sampler_path", "base_model"
"""Names of the one "weight" that :meth:`TinkerClient.load_weights` takes: a path on the server, or a base model."""

SEEDS = 2**31 - 1
"""Seeds that servers take: SkyRL reads them as 32-bit integers."""


class TinkerServerError(ModelError):
    """The server refused a request, took too long, or can't be reached."""


def tinker_or_raise() -> Any:
    """Return the SDK. Raises ``ImportError`` if it is missing."""
    try:
        import tinker  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError("learner.type = 'tinker' needs the Tinker SDK: pip install 'turnwise[tinker]'") from error
    return tinker


class TinkerServer:
    """The server at ``url`` (``None``: the hosted service), which gets ``key`` with each request.

    ``timeout`` is the time in seconds that one answer may take, and ``patience`` the time that the server may be
    unreachable. The SDK itself would wait for a dead server for many minutes, or forever.

    Raises :class:`TinkerServerError` if the server can't be reached, and ``ImportError`` if the SDK is missing.

    Example: ``TinkerServer("http://127.0.0.1:8000", "tml-any").models()``
    """

    def __init__(self, url: str | None, key: str, *, timeout: float = 1800.0, patience: float = 60.0) -> None:
        self.url, self.timeout, self.patience = (url or HOSTED).rstrip("/"), timeout, patience
        self._tinker = tinker_or_raise()
        if is_loopback(urlsplit(self.url).hostname or ""):
            bypass_proxies(self.url)
        self._lock = threading.Lock()
        self._looked = self._seen = time.monotonic()
        if (problem := self._unreachable()) is not None:
            raise TinkerServerError(f"no Tinker server answers at {self.url}: {problem}")
        self._service = self.call(partial(self._tinker.ServiceClient, base_url=self.url, api_key=key))

    def models(self) -> list[str]:
        """Return the names of the base models that the server has."""
        return [str(model.model_name) for model in self.call(self._service.get_server_capabilities).supported_models]

    def adapter(self, base_model: str, rank: int, seed: int) -> Any:
        """Create an adapter for training, on all linear layers but the head, and return the SDK's client of it."""
        create = self._service.create_lora_training_client
        return self.call(partial(create, base_model=base_model, rank=rank, seed=seed, train_unembed=False))

    def sampler(self, *, path: str | None = None, base_model: str | None = None) -> Any:
        """Return the SDK's sampling client of saved weights (``tinker://...``), or of a base model."""
        create = self._service.create_sampling_client
        return self.call(partial(create, model_path=path, base_model=base_model))

    def download(self, path: str, folder: Path) -> None:
        """Download the saved weights ``path`` into ``folder``: an adapter in peft's format."""
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        archive = self.call(partial(self._service.create_rest_client().get_checkpoint_archive_url, run, checkpoint))
        url, left = str(self.wait(archive).url), MAX_ARCHIVE
        if urlsplit(url).scheme not in ("http", "https"):  # a file: of this machine, for example
            raise TinkerServerError(f"{self.url} gives {path} at {url[:80]!r}: expected an address of http or https")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with (
                urllib.request.urlopen(url, timeout=self.timeout) as answer,
                tarfile.open(fileobj=answer, mode="r|*") as files,
            ):
                for entry in files:
                    left -= abs(entry.size) + tarfile.BLOCKSIZE
                    if left < 0:
                        raise TinkerServerError(f"{self.url} gives {path} of more than {MAX_ARCHIVE} bytes")
                    files.extract(entry, folder, filter="data")
        except (OSError, ValueError, tarfile.TarError, EOFError, zlib.error) as error:
            raise TinkerServerError(f"{self.url} does not give {path}: {error}") from error

    # -- waiting -------------------------------------------------------------------------------------------------------
    def call(self, work: Callable[[], Any]) -> Any:
        """Return ``work()``, a call of the SDK that blocks."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()  # no exit waits for a call that never ends
        return self.wait(future)

    def wait(self, future: Any) -> Any:
        """Return the result of a future of the SDK. Raises :class:`TinkerServerError`."""
        pending, began = _plain(future), time.monotonic()
        while not wait([pending], timeout=POLL).done:
            self._still_there(began)
        return self._result(pending)

    async def answer(self, future: Any) -> Any:
        """Return the result as :meth:`wait` does, without blocking the event loop."""
        began = time.monotonic()
        pending = asyncio.wrap_future(_plain(future))
        try:
            while not (await asyncio.wait({pending}, timeout=POLL))[0]:
                await to_thread(self._still_there, began)
        except BaseException:
            pending.cancel()
            raise
        return self._result(pending)

    def _result(self, done: Any) -> Any:
        errors = (self._tinker.TinkerError, ValueError, TypeError, OSError)  # the SDK raises all of them
        try:
            return done.result()
        except errors as error:
            raise TinkerServerError(f"{self.url}: {type(error).__name__}: {error}") from error

    def _still_there(self, began: float) -> None:
        waited = time.monotonic() - began
        if waited > self.timeout:
            raise TinkerServerError(f"{self.url} gave no answer in {waited:.0f} s (learner.tinker.timeout)")
        with self._lock:
            if time.monotonic() - self._looked < POLL:
                return
            problem = self._unreachable()
            self._looked = time.monotonic()
            if problem is None:
                self._seen = self._looked
        if problem is not None and self._looked - self._seen > self.patience:
            raise TinkerServerError(
                f"{self.url} has been unreachable for {self._looked - self._seen:.0f} s (learner.tinker.patience): "
                f"{problem}"
            )

    def _unreachable(self) -> str | None:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=10):
                return None
        except urllib.error.HTTPError:
            return None  # it refuses this, but it is there
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", error))


def _plain(future: Any) -> Future[Any]:
    """Return the future of ``concurrent.futures`` behind a future of the SDK."""
    plain: Future[Any] = future if isinstance(future, Future) else future.future()
    return plain


def token_input(token_ids: Iterable[int]) -> Any:
    """Return token ids as the SDK's model input."""
    return tinker_or_raise().types.ModelInput.from_ints([int(token) for token in token_ids])


def datum(token_ids: np.ndarray, inputs: Mapping[str, np.ndarray]) -> Any:
    """Return a row of ``T`` tokens as the SDK's training row: it predicts each token but the first.

    ``inputs`` are float arrays ``[T - 1]`` by the API's names, such as ``advantages``, aligned with the targets.
    """
    types = tinker_or_raise().types
    arrays = {name: np.asarray(values, dtype=np.float32) for name, values in inputs.items()}
    arrays["target_tokens"] = np.asarray(token_ids[1:], dtype=np.int64)
    tensors = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
    return types.Datum(model_input=token_input(token_ids[:-1]), loss_fn_inputs=tensors)


class TinkerClient(GatedScoringClient):
    """Completes prompts with weights that a server of the Tinker API holds.

    ``policies`` are their names. ``load_weights`` takes the name of weights instead of the weights:
    ``[("sampler_path", "tinker://...")]``, saved with ``save_weights_for_sampler``, or ``[("base_model", name)]``. All
    tokens of a response come from the weights at the time of its request, and carry their version.

    The server reports log-probabilities at temperature 1 and before top-p and top-k, so other settings are refused;
    temperature 0 is greedy. Seeds are taken modulo ``2**31 - 1``. ``vocabulary`` and ``context_length`` are the base
    model's.

    Example::

        client = TinkerClient(TinkerServer(url, key), tokenizer, ["solver"], vocabulary=512, context_length=2048)
        client.load_weights("solver", [("base_model", "Qwen/Qwen3-0.6B")], version=0)
        [response] = await client.generate([ModelRequest([1, 17, 9], policy="solver")])
    """

    def __init__(
        self,
        server: TinkerServer,
        tokenizer: Tokenizer,
        policies: Iterable[str],
        *,
        vocabulary: int,
        context_length: int | None,
        seed: int = 0,
    ) -> None:
        self.server, self.tokenizer, self._tokenizer = server, tokenizer, own_copy(tokenizer)
        self.vocabulary, self.context_length = vocabulary, context_length
        # The server's sampler, None before the first weights, and their version: one tuple, as threads share it.
        self._policies: dict[str, tuple[Any, int]] = dict.fromkeys(policies, (None, 0))
        self._seeds = np.random.default_rng(seed)
        super().__init__(LoopThread("turnwise-tinker"))
        self._stats: dict[str, float] = dict.fromkeys(STATS, 0)

    def _check(self, request: ModelRequest) -> None:
        find_policy(self._policies, request.policy)
        check_sampling(request.sampling)
        completion_limit(scored_as_prompt(request), self.vocabulary, self.context_length)

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Let ``policy`` sample with the server's weights that ``weights`` names. See the class."""
        find_policy(self._policies, policy)
        if self._closed:
            raise ModelError("the client is closed")
        named = list(weights)
        if len(named) != 1 or named[0][0] not in (SAMPLER, BASE):
            raise ValueError(f"weights={[name for name, _ in named]}: expected one of [{SAMPLER!r}], [{BASE!r}]")
        began, (kind, name) = time.perf_counter(), named[0]
        sampler = self.server.sampler(**{"path" if kind == SAMPLER else "base_model": name})
        self._policies[policy] = (sampler, version)
        self._stats["syncs"] += 1
        self._stats["sync_seconds"] += time.perf_counter() - began

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return find_policy(self._policies, policy)[1]

    async def close(self) -> None:
        """Fail all waiting and running requests. The server keeps its weights. May be called again."""
        self._closed = True
        await to_thread(self._thread.stop)

    def stats(self) -> dict[str, float]:
        """Totals since the client was created; see :data:`STATS`."""
        return {**self._stats, "seconds": self._busy_seconds()}

    # -- one request ---------------------------------------------------------------------------------------------------
    async def _one(self, request: ModelRequest) -> ModelResponse:
        sampling = request.sampling
        (sampler, version), stops = self._policies[request.policy], stop_token_ids(request, self._tokenizer)
        if sampler is None:
            raise ModelError(f"policy {request.policy!r} has no weights yet: call load_weights first")
        if request.scored_token_ids is not None:
            return await self._scored(request, sampler, version)
        limit = completion_limit(request, self.vocabulary, self.context_length)
        seed = int(self._seeds.integers(SEEDS)) if sampling.seed is None else sampling.seed % SEEDS
        parameters = tinker_or_raise().types.SamplingParams(
            temperature=sampling.temperature, max_tokens=limit, stop=list(stops), seed=seed
        )
        answer = await self.server.answer(sampler.sample(token_input(request.prompt_token_ids), 1, parameters))
        tokens, logprobs, reason = self._checked(answer, limit, stops)
        self._stats["requests"] += 1
        self._stats["prompt_tokens"] += len(request.prompt_token_ids)
        self._stats["generated_tokens"] += len(tokens)
        response = ModelResponse(
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            completion_token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            policy_versions=[(len(tokens), version)],
            prompt_token_ids=list(request.prompt_token_ids),
        )
        return cut_at_stop(response, sampling, self._tokenizer)

    async def _scored(self, request: ModelRequest, sampler: Any, version: int) -> ModelResponse:
        ids = list(request.scored_token_ids or ())
        answer = await self.server.answer(sampler.compute_logprobs(token_input([*request.prompt_token_ids, *ids])))
        logprobs = list(answer)[-len(ids) :]
        if len(logprobs) != len(ids) or not all(x is not None and math.isfinite(x) and x <= 0 for x in logprobs):
            raise self._wrong(f"log-probs {str(logprobs)[:80]}", f"{len(ids)} finite ones, none above 0")
        self._stats["requests"] += 1
        self._stats["prompt_tokens"] += len(request.prompt_token_ids) + len(ids)
        return scored_response(request, list(map(float, logprobs)), version, self._tokenizer)

    def _checked(self, answer: Any, limit: int, stops: Sequence[int]) -> tuple[list[int], list[float], Any]:
        """Return tokens, log-probs and finish reason of an answer. Raises :class:`TinkerServerError` for a bad one."""
        if len(answer.sequences) != 1:
            raise self._wrong(f"{len(answer.sequences)} sequences", "one")
        sequence = answer.sequences[0]
        tokens, logprobs = list(map(int, sequence.tokens)), sequence.logprobs
        if not 1 <= len(tokens) <= limit or not all(0 <= token < self.vocabulary for token in tokens):
            raise self._wrong(f"{len(tokens)} tokens {tokens[:8]}", f"1 to {limit} tokens in 0..{self.vocabulary - 1}")
        if logprobs is None or len(logprobs) != len(tokens) or not all(math.isfinite(x) and x <= 0 for x in logprobs):
            raise self._wrong(f"log-probs {str(logprobs)[:80]}", f"{len(tokens)} finite ones, none above 0")
        reason = str(getattr(sequence.stop_reason, "value", sequence.stop_reason))
        if reason not in ("stop", "length") or (reason == "stop") != (tokens[-1] in stops):
            expected = f"'stop' after a token of {tuple(stops)}, else 'length'"
            raise self._wrong(f"stop_reason {reason!r} after token {tokens[-1]}", expected)
        return tokens, list(map(float, logprobs)), reason

    def _wrong(self, got: str, expected: str) -> TinkerServerError:
        return TinkerServerError(f"{self.server.url} answered {got}: expected {expected}")


def check_sampling(sampling: Sampling) -> None:
    """Raise ``ValueError`` for sampling whose log-probabilities a Tinker server doesn't report."""
    if sampling.temperature not in (0.0, 1.0):
        raise ValueError(
            f"temperature={sampling.temperature}: expected 1, or 0 (greedy), as a Tinker server reports "
            "log-probabilities and trains at temperature 1"
        )
    if sampling.cut:
        raise ValueError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k}, min_p={sampling.min_p}: expected 1, 0 and 0, as a Tinker "
            "server trains without such a cut"
        )


STATS = {
    "requests": "answered",
    "prompt_tokens": "in them",
    "generated_tokens": "in the answers",
    "seconds": "in which a request ran",
    "syncs": "changes of weights",
    "sync_seconds": "that they took",
}
"""The totals of :meth:`TinkerClient.stats`."""
