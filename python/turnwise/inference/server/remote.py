"""A vLLM server as its client sees it: the client loads weights into it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from turnwise.inference.common.http import Endpoint, EndpointError, reading
from turnwise.inference.server.answers import FieldReader
from turnwise.inference.server.launch import RPC
from turnwise.inference.weights.lora import AdapterFiles
from turnwise.inference.weights.weight_block import WeightHandle
from turnwise.types import ContextLengthError, ModelError
from turnwise.utils.threads import to_thread

T = TypeVar("T")

GENERATE = "/inference/v1/generate"

MAX_GENERATED = 2**28
"""The most bytes of an answer with tokens, whose scores and experts take many."""

START_LABEL = "default"
"""The label that vLLM stamps on tokens until a client sets another."""

TOO_LONG = ("maximum context length", "maximum model length", "context length is only")
"""Phrases in which vLLM reports that a prompt is too long."""

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
        return FieldReader(f"{self._endpoint.url}{RPC} of {method}").typed(answer["results"], list, "results")

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
