"""A vLLM server as its client sees it: the client loads weights into it, reads its answers and checks every field."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from turnwise.inference.common.experts import experts_from_text
from turnwise.inference.common.http import Endpoint, EndpointError, reading
from turnwise.inference.server.launch import RPC
from turnwise.inference.weights.lora import AdapterFiles
from turnwise.inference.weights.weight_block import WeightHandle
from turnwise.types import ContextLengthError, FinishReason, ModelError, RoutedExperts
from turnwise.utils.threads import to_thread

T = TypeVar("T")

GENERATE = "/inference/v1/generate"

MAX_GENERATED = 2**28
"""The most bytes of an answer with tokens, whose scores and experts take many."""

START_LABEL = "default"
"""The label that vLLM stamps on tokens until a client sets another."""

TOO_LONG = ("maximum context length", "maximum model length", "context length is only")
"""Phrases in which vLLM reports that a prompt is too long."""


FLOOR = -9999.0
"""The server's value for a log-probability that is not a number, or that it doesn't have."""

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}

Adapters = dict[str, tuple[AdapterFiles, Mapping[str, Tensor]]]
"""Adapters to load into a server, by policy, with their new weights (none: the weights in their files)."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's description of its model. A server without turnwise's worker doesn't report the last three fields."""

    name: str
    context_length: int
    vocabulary: int
    dtype: str | None
    model: Mapping[str, Any]
    """Sizes that must agree with a policy's."""


class RemoteServer:
    """The server behind ``endpoint``. ``mark`` is part of every label that this client gives to weights.

    ``sent`` maps a label to the version of every policy. ``info`` is ``None`` until :meth:`connect` has succeeded.
    Rows of the head after the first ``tokens`` are no tokens, and are never sampled.
    """

    def __init__(self, endpoint: Endpoint, mark: str, in_flight: bool, tokens: float = math.inf) -> None:
        self.info: ServerInfo | None = None
        self.sent: dict[str, dict[str, int]] = {}
        self.where = f"POST {endpoint.url}{GENERATE}"
        self._endpoint, self._mark, self._tokens = endpoint, mark, tokens
        self._pause = {"mode": "keep" if in_flight else "wait", "clear_cache": "false"}
        self._count = 0
        self._numbers: dict[str, int] = {}

    # -- what the server is --------------------------------------------------------------------------------------------
    async def connect(self, takes_weights: bool) -> None:
        """Read the server's description into ``info``. Without ``takes_weights``, a plain vLLM server is enough."""
        listed = await self._endpoint.ask("GET", "/v1/models")
        where = f"GET {self._endpoint.url}/v1/models"
        with reading(f"{where} answered {str(listed)[:80]}", "data[0] with id and max_model_len, as vLLM has them"):
            served = listed["data"][0]
            name, context_length = str(served["id"]), int(served["max_model_len"])
        try:
            described = await self._describe()
        except EndpointError:
            if takes_weights:
                raise
            described = {"vocabulary": 2**31, "dtype": None, "model": {}}
        with reading(f"{self._endpoint.url}{RPC}", "a description of the model"):
            vocabulary, dtype, model = int(described["vocabulary"]), described["dtype"], dict(described["model"])
        self.info = ServerInfo(name, context_length, vocabulary, None if dtype is None else str(dtype), model)

    async def limit_head(self) -> None:
        """Let the server sample tokens alone, not the rows of its head after them; it forgets this in a restart."""
        if self.info is not None and self.info.model and self._tokens < self.info.vocabulary:
            await self._call_worker("turnwise_limit_head", self._tokens)

    def check_model(self, policy: str, config: Any, dtype: str) -> None:
        """Raise ``ValueError`` unless ``config`` (of a policy's model) has the sizes of the server's model.

        Warns if the server computes in another ``dtype``.
        """
        assert self.info is not None
        for key, theirs in self.info.model.items():
            ours = getattr(config, key, theirs)
            if ours != theirs:
                raise ValueError(
                    f"policy {policy!r} has {key}={ours!r}, the model at {self._endpoint.url} has {theirs!r}: start "
                    "the server with the policy's own model"
                )
        if self.info.dtype not in (None, dtype):
            warnings.warn(
                f"{self._endpoint.url} computes in {self.info.dtype}, policy {policy!r} in {dtype}: log-probabilities "
                "differ as these do",
                stacklevel=2,
            )

    async def has_our_weights(self) -> bool:
        """True if the server holds the last weights of this client, False if it lost them.

        Raises :class:`EndpointError` if another client has sent it weights.
        """
        answer = await self._endpoint.ask("GET", "/weight_info")
        label = str(answer.get("weight_version")) if isinstance(answer, dict) else None
        if label in self.sent:
            return True
        if label != START_LABEL and not str(label).startswith(self._mark):
            raise EndpointError(
                f"{self._endpoint.url} holds weights that another client sent (label {str(label)[:80]!r}): a server "
                "can take weights from one client at a time"
            )
        return False

    # -- weights -------------------------------------------------------------------------------------------------------
    async def put(self, handle: WeightHandle | None, adapters: Adapters, versions: Mapping[str, int]) -> None:
        """Replace the base by the weights of ``handle``, and load ``adapters``.

        The server computes nothing until everything is loaded. Until then its label is one that no answer may have. So
        no token counts as one of ``versions`` if a step fails, or if another client resumes the server.
        """
        self._count += 1
        label = f"{self._mark}-{self._count}"
        await self._post("/pause", query=self._pause)
        try:
            await self._post("/update_weight_version", {"new_version": f"{label}-incomplete"})
            await self.limit_head()
            if handle is not None:
                await self._call_worker("turnwise_reload", dict(handle))
            for adapter, weights in adapters.values():
                if weights:
                    await to_thread(adapter.write, weights)
                await self._put_adapter(adapter)
            cleared = await self._post("/reset_prefix_cache", query={"reset_running_requests": "true"})
            if cleared != {"success": True}:
                raise EndpointError(f"{self._endpoint.url} kept its prefix cache: {cleared!r}")
            self.sent[label] = dict(versions)
            await self._post("/update_weight_version", {"new_version": label})
        except BaseException:
            self.sent.pop(label, None)
            with suppress(EndpointError):  # report the first failure
                await self._post("/resume")
            raise
        await self._post("/resume")

    async def _put_adapter(self, adapter: AdapterFiles) -> None:
        """Load an adapter, or read it again if the server has it.

        The server numbers adapters in the order of loading. The worker reads a known adapter again by its number. The
        server's own endpoint for that would read it again for every token.
        """
        listed = await self._endpoint.ask("GET", "/v1/models")
        with reading(f"GET {self._endpoint.url}/v1/models", "the list of models"):
            served = adapter.name in {model["id"] for model in listed["data"]}
        if served and adapter.name in self._numbers:
            await self._call_worker("turnwise_adapter", self._numbers[adapter.name], adapter.name, str(adapter.folder))
            return
        if served:  # the server loaded it, but its answer was lost
            await self._post("/v1/unload_lora_adapter", {"lora_name": adapter.name}, reads=False)
        before = await self._adapter_numbers()
        asked = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        await self._post("/v1/load_lora_adapter", asked, reads=False)
        added = await self._adapter_numbers() - before
        if len(added) != 1:
            raise EndpointError(f"{self._endpoint.url} has {len(added)} new adapters: expected {adapter.name!r} alone")
        [self._numbers[adapter.name]] = added

    async def _adapter_numbers(self) -> set[int]:
        described = await self._describe()
        with reading(f"{self._endpoint.url}{RPC}", "the numbers of the adapters"):
            return set(map(int, described["adapters"]))

    async def _describe(self) -> dict[str, Any]:
        """The first worker's result of ``turnwise_describe``."""
        results = await self._call_worker("turnwise_describe")
        with reading(f"{self._endpoint.url}{RPC}", "a description of each worker's model"):
            return dict(results[0])

    async def _call_worker(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` of each worker, and return the results."""
        answer = await self._post(RPC, {"method": method, "args": list(arguments)})
        if not isinstance(answer, dict) or not answer.get("results"):
            raise EndpointError(f"{self._endpoint.url}{RPC} of {method} answered {str(answer)[:80]}: expected results")
        return _FieldReader(f"{self._endpoint.url}{RPC} of {method}").typed(answer["results"], list, "results")

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        reads: bool = True,
    ) -> Any:
        try:
            return await self._endpoint.ask("POST", path, body=body or {}, query=query, reads=reads)
        except EndpointError as error:
            raise _with_hint(error) from error


def sampling_error(error: EndpointError, model: str | None) -> ModelError:
    """Return the error to raise for a request that the server refused: ``ContextLengthError`` for a long prompt."""
    if error.status == 404 and "does not exist" in str(error) and model is not None:
        return EndpointError(f"{error}: the server lost its adapters", retryable=True)
    if error.status == 400 and any(words in str(error) for words in TOO_LONG):
        return ContextLengthError(str(error))
    return _with_hint(error)


def _with_hint(error: EndpointError) -> EndpointError:
    """Add a hint if the endpoint doesn't exist: the server was not started with ``turnwise serve``."""
    if error.status in (404, 405, 501):
        return EndpointError(
            f"{error}; start the server with `turnwise serve`, which opens what is needed", error.status
        )
    return error


# -- answers -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """One completion of ``C`` tokens. ``labels`` are runs of tokens and the label of the weights that sampled them."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    labels: list[tuple[int, str]]
    cached_tokens: int


class _FieldReader:
    """Reads fields of one answer. Errors name the server and the wrong field."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, field: str, value: Any, expected: str) -> EndpointError:
        return EndpointError(f"{self.where} answered {field}={str(value)[:80]}: expected {expected}")

    def typed(self, value: Any, kind: type[T], field: str) -> T:
        if not isinstance(value, kind):
            raise self.wrong(field, value, "an object" if kind is dict else "a list")
        return value

    def whole(self, value: Any, field: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(field, value, f"a whole number from {low} to {high}")
        return value


def read_completion(content: Any, where: str, limit: int, vocabulary: int) -> ServerCompletion:
    """Read the completion in ``content``, the decoded JSON of an answer of ``where``.

    Raises :class:`EndpointError` unless the completion has from 1 to ``limit`` tokens in ``[0, vocabulary)``, a finite
    log-probability and a label for each token, and ended with a stop token or at the limit.
    """
    reader = _FieldReader(where)
    answer = reader.typed(content, dict, "(the answer)")
    choices = reader.typed(answer.get("choices"), list, "choices")
    if len(choices) != 1:
        raise reader.wrong("choices", f"{len(choices)} of them", "one")
    choice = reader.typed(choices[0], dict, "choices[0]")
    token_ids = reader.typed(choice.get("token_ids"), list, "choices[0].token_ids")
    if not 1 <= len(token_ids) <= limit:
        raise reader.wrong("choices[0].token_ids", f"{len(token_ids)} tokens", f"1 to {limit}")
    for token in token_ids:
        reader.whole(token, "choices[0].token_ids", 0, vocabulary - 1)
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or reason not in FINISHED:
        raise reader.wrong("choices[0].finish_reason", reason, f"one of {sorted(FINISHED)}")
    # The server may leave out the count of cached tokens; it then counts as 0.
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    logprobs, labels = _logprobs(reader, choice, token_ids), _labels(reader, choice, len(token_ids))
    counted = cached if type(cached) is int and 0 <= cached < 2**31 else 0
    return ServerCompletion(token_ids, logprobs, FINISHED[reason], labels, counted)


def _logprobs(reader: _FieldReader, choice: dict[str, Any], token_ids: list[int]) -> list[float]:
    field = "choices[0].logprobs.content"
    content = reader.typed(
        reader.typed(choice.get("logprobs"), dict, "choices[0].logprobs").get("content"), list, field
    )
    if len(content) != len(token_ids):
        raise reader.wrong(field, f"{len(content)} log-probabilities", f"one for each of {len(token_ids)} tokens")
    for entry, token in zip(content, token_ids, strict=True):
        if reader.typed(entry, dict, field).get("token_id") != token:
            raise reader.wrong(f"{field}.token_id", entry.get("token_id"), f"{token}, as in choices[0].token_ids")
        value = entry.get("logprob")
        if type(value) not in (int, float) or not FLOOR < value <= 0:
            raise reader.wrong(f"{field}.logprob", value, f"a number from {FLOOR} (excluded) to 0")
    return [float(entry["logprob"]) for entry in content]


def read_scores(content: Any, where: str, token_ids: Sequence[int]) -> list[float]:
    """Read the log-probabilities of the last prompt tokens, which are ``token_ids``, from an answer of ``where``."""
    reader, field = _FieldReader(where), "prompt_logprobs"
    values = reader.typed(reader.typed(content, dict, "(the answer)").get(field), list, field)
    if len(values) <= len(token_ids):
        raise reader.wrong(field, f"{len(values)} log-probabilities", f"more than {len(token_ids)}")
    scores = []
    for entry, token in zip(values[-len(token_ids) :], token_ids, strict=True):
        scored = reader.typed(reader.typed(entry, dict, field).get(str(token)), dict, f"{field}.{token}")
        value: Any = scored.get("logprob")
        if type(value) not in (int, float) or not FLOOR < value <= 0:
            raise reader.wrong(f"{field}.{token}.logprob", value, f"a number from {FLOOR} (excluded) to 0")
        scores.append(float(value))
    return scores


def read_experts(content: Any, where: str, passed: int) -> RoutedExperts:
    """Read the experts of the ``passed`` tokens of prompt and completion, from an answer of ``where``."""
    reader, field = _FieldReader(where), "choices[0].routed_experts"
    text = reader.typed(content, dict, "(the answer)")["choices"][0].get("routed_experts")
    if text is None:
        raise EndpointError(
            f"{where} answered without routed_experts: start the server with "
            "--engine-arg enable_return_routed_experts=True, and with a mixture of experts"
        )
    try:
        experts = RoutedExperts(experts_from_text(text))
    except (ValueError, TypeError) as error:
        raise reader.wrong(field, text, f"an array of experts as vLLM writes it ({error})") from error
    if len(experts.ids) != passed:
        raise reader.wrong(field, f"the experts of {len(experts.ids)} tokens", f"those of {passed}: all but the last")
    return experts


def _labels(reader: _FieldReader, choice: dict[str, Any], count: int) -> list[tuple[int, str]]:
    """Read the spans of ``weight_versions``, which must follow one another from 0 to ``count``."""
    field = "choices[0].weight_versions"
    runs, end = [], 0
    for span in reader.typed(choice.get("weight_versions"), list, field):
        if reader.typed(span, dict, field).get("start") != end:
            raise reader.wrong(f"{field}.start", span.get("start"), str(end))
        stop = reader.whole(span.get("end"), f"{field}.end", end, count)
        runs.append((stop - end, str(span.get("version"))))
        end = stop
    if end != count:
        raise reader.wrong(field, f"spans of {end} tokens", f"{count} tokens")
    return runs
