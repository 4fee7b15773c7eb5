"""The client of a vLLM server: tokens and log-probabilities travel over HTTP, weights by a separate transfer."""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from turnwise.chat.grammar import check_end
from turnwise.chat.tokenizers import own_copy
from turnwise.inference.common.base import (
    GatedScoringClient,
    check_sampling_by_vllm,
    completion_limit,
    cut_at_stop,
    find_policy,
    scored_as_prompt,
    scored_response,
    stop_token_ids,
)
from turnwise.inference.common.hf_model import count_tokens
from turnwise.inference.common.http import Endpoint, EndpointError, reading
from turnwise.inference.server.answers import (
    ServerCompletion,
    kept_logprobs,
    read_completion,
    read_experts,
    read_scores,
)
from turnwise.inference.server.launch import LOAD
from turnwise.inference.server.load import METRICS, read_report
from turnwise.inference.server.policies import describe_policies
from turnwise.inference.server.remote import GENERATE, MAX_GENERATED, Adapters, RemoteServer, sampling_error
from turnwise.inference.weights.load import check_weights, collect_weights
from turnwise.inference.weights.sync import transfer_to
from turnwise.inference.weights.weight_block import WeightHandle, WeightTransfer
from turnwise.types import (
    ByPolicy,
    ClientCapabilities,
    EngineReport,
    ModelError,
    ModelRequest,
    ModelResponse,
    PolicyVersions,
    RoutedExperts,
    Tokenizers,
)
from turnwise.types.prompts import prompt_tokens
from turnwise.utils.threads import to_thread


class VLLMServerClient(GatedScoringClient):
    """Completes prompts with a vLLM server that ``turnwise serve`` started, on this host or another.

    - ``server``: its URL, or an :class:`~turnwise.inference.common.http.Endpoint` with key and timeout.
    - ``policies``: one policy, named ``"default"``, or policies by name. A policy is the Hugging Face model that the
      server serves, or an :class:`AdaptedModel` over it; the client sends its weights at the start and in
      :meth:`load_weights`. Or it is the name of a model that the server has (``None``: the server's own), sampled
      unchanged at version 0. One server has one base; a :class:`~turnwise.inference.routing.RoutingClient` joins
      several.
    - ``in_flight``: loads weights between two tokens, and ``policy_versions`` has the version of each token.
      Else weights wait until the server is idle. The server holds requests back while it loads weights.
    - ``folder``: a folder that the server sees under the same path, for adapters, which always travel as files.
    - ``transfer``: how weights travel. ``"auto"``: files in ``folder`` if that is given, else memory that a server
      at a loopback address reads, else ``"gloo"``. ``"gloo"`` over TCP and ``"nccl"`` between GPUs reach other hosts
      without a common folder. ``"ipc"`` reaches a server on the same GPU. Clients of one pool share one, by
      ``SharedTransfer(transfer_to(...)).lend()``.
    - ``grammars``: the server has the tokenizer, and llguidance constrains its tokens (vLLM's backend ``guidance``).
      A completion that its grammar led nowhere raises ``DeadEndError``, which needs llguidance here, too.
    - ``routed_experts``: responses have the experts that a mixture of experts chose. The server must return them
      (``--engine-arg enable_return_routed_experts=True``); an answer without them raises ``ModelError``.

    vLLM names the tokens that top-p and min-p keep only where top-k bounds their number, up to
    :data:`~turnwise.types.model_calls.MAX_TOP_K`; else a response has no ``sampling_mask``. An answer whose kept tokens
    are not whole raises ``ModelError``.

    The server stamps every token with a label of the weights that sampled it. If a label is not from this client, the
    server has restarted, and the client raises ``ModelError``: it never returns a token of other weights. It sends
    nothing twice. A :class:`~turnwise.inference.pool.client.PoolClient` of one or more of these clients repeats
    requests that may succeed later, and lets the clients :meth:`recover`.

    Raises ``ImportError`` if aiohttp is missing.

    Example::

        async with serving("Qwen/Qwen3-0.6B") as server:
            client = PoolClient({"one": VLLMServerClient(server.endpoint(), tokenizer, model)})
            [response] = await client.generate([ModelRequest([1, 17, 9], Sampling(max_tokens=8, seed=3))])
    """

    def __init__(
        self,
        server: str | Endpoint,
        tokenizer: Tokenizers,
        policies: Mapping[str, Any] | nn.Module | str | None = None,
        *,
        in_flight: bool = False,
        folder: str | Path | None = None,
        transfer: str | WeightTransfer = "auto",
        grammars: bool = False,
        routed_experts: bool = False,
        seed: int = 0,
    ) -> None:
        models = dict(policies) if isinstance(policies, Mapping) else {"default": policies}
        if not models:
            raise ValueError("policies is empty: expected at least one")
        tokenizers = ByPolicy.of(tokenizer, "tokenizer")
        self.tokenizer = tokenizers.common(models, "expected one base on a server, so one tokenizer")
        self._tokenizer = own_copy(self.tokenizer)
        self._grammars, self._routed_experts = grammars, routed_experts
        self._seeds = np.random.default_rng(seed)
        self._mark = secrets.token_hex(4)
        self._temporary = tempfile.TemporaryDirectory(prefix="turnwise-adapters-") if folder is None else None
        place = Path(folder or self._temporary.name).absolute()  # type: ignore[union-attr]  # one of them is there
        self._endpoint = server if isinstance(server, Endpoint) else Endpoint(server)
        named = isinstance(transfer, str)
        self._transfer: WeightTransfer = transfer_to([self._endpoint.url], transfer, folder) if named else transfer  # type: ignore[arg-type, assignment]
        self._policies, base = describe_policies(models, place, self._mark)
        self._server = RemoteServer(self._endpoint, self._mark, in_flight, count_tokens(self.tokenizer) or math.inf)
        self._sends = bool(base)
        self._handle = self._transfer.send(base) if base else None
        self._synced = False  # True once the server has received this client's weights
        self._unusable: str | None = None
        self._lock = asyncio.Lock()
        super().__init__(self._endpoint.thread)
        self._stats: dict[str, float] = dict.fromkeys(STATS, 0)

    # -- the client protocol -------------------------------------------------------------------------------------------
    @property
    def capabilities(self) -> ClientCapabilities:
        """Grammars work if the server was started for them."""
        return ClientCapabilities(grammars=self._grammars)

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Send ``weights`` (pairs of name and tensor, named as in the model's ``state_dict``) to the server.

        The policy of an adapter takes the adapter's weights, with or without the whole shared base. All names and
        shapes are checked before anything is sent. If an update fails, the client raises ``ModelError``, and samples
        nothing until a later call succeeds.
        """
        state = find_policy(self._policies, policy)
        if self._closed:
            raise ModelError("the client is closed")
        if not state.base_shapes:
            raise ValueError(f"policy={policy!r} is what the server has: give its model in `policies` to send weights")
        sources = collect_weights(weights, policy)
        with_base = state.adapter is None or any(name in state.base_shapes for name in sources)
        check_weights(sources, state.adapter_shapes | (state.base_shapes if with_base else {}), policy)
        self._blocking_result(self._thread.submit(self._load(policy, sources, version)))

    def version(self, policy: str) -> int:
        """The version of the weights that ``policy`` samples with."""
        return find_policy(self._policies, policy).version

    @property
    def ready(self) -> bool:
        """True once the client has connected to the server, and has sent it weights if it sends any."""
        return self._server.info is not None and (self._synced or not self._sends)

    async def check_health(self) -> None:
        """Raise ``ModelError`` if the server can't be reached, or reports that it is not healthy."""
        await self._result(self._thread.submit(self._endpoint.ask("GET", "/health", reads=False)))

    async def recover(self) -> None:
        """Send the server the last weights, unless it has them. Raises ``ModelError`` if others took the server over,
        or if an update failed: then new weights must come by :meth:`load_weights`."""
        await self._result(self._thread.submit(self._recover()))

    async def close(self) -> None:
        """Fail all waiting and running requests, and end the connections, not the server. May be called again."""
        self._closed = True
        await to_thread(self._endpoint.close)
        self._transfer.close()
        for state in self._policies.values():
            if state.adapter is not None:
                shutil.rmtree(state.adapter.folder, ignore_errors=True)
        if self._temporary is not None:
            self._temporary.cleanup()

    def stats(self) -> dict[str, float]:
        """Totals since the client was created; see :data:`STATS`."""
        return {**self._stats, "seconds": self._busy_seconds()}

    def peaks(self) -> dict[str, float]:
        """Return the server's peaks since the last call: ``running`` and ``waiting`` requests, ``kv_cache_use``.

        Empty if the server doesn't count or answer, or the client is closed.
        """
        try:
            said = self._blocking_result(self._thread.submit(self._endpoint.ask("GET", LOAD, timeout=LOAD_SECONDS)))
            with reading(f"GET {self._endpoint.url}{LOAD}", "numbers"):
                peaks = {name: float(said[name]) for name in (*PEAKS, "preemptions")}
        except ModelError:
            return {}
        self._stats["preemptions"] = max(peaks.pop("preemptions"), self._stats.get("preemptions", 0))
        return peaks

    async def load(self) -> dict[str, EngineReport | None]:
        """Return the report of the server's engine by its URL, from vLLM's metrics; empty if it doesn't answer now."""
        if self._thread.runs_here():  # in a pool that shares the thread
            return await self._report()
        return await self._result(self._thread.submit(self._report()))

    async def _report(self) -> dict[str, EngineReport | None]:
        try:
            text = await self._endpoint.ask("GET", METRICS, timeout=LOAD_SECONDS, decodes=False)
        except EndpointError as error:
            return {self._endpoint.url: None} if error.status == 404 else {}
        return {self._endpoint.url: read_report(text)}

    # -- requests, in the endpoint's thread ----------------------------------------------------------------------------
    def _check(self, request: ModelRequest) -> None:
        find_policy(self._policies, request.policy)
        check_sampling_by_vllm(request.sampling)
        if request.scored_token_ids is not None and request.sampling.temperature != 1:
            raise ValueError(
                f"temperature={request.sampling.temperature}: expected 1, as vLLM scores tokens at temperature 1"
            )
        info = self._server.info
        completion_limit(
            scored_as_prompt(request), info.vocabulary if info else 2**63, info.context_length if info else None
        )

    async def _prepare(self) -> None:
        if not self.ready:
            await self._recover()

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        """The body of the request in the form of the server's token endpoint."""
        info, sampling = self._server.info, request.sampling
        assert info is not None
        seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed
        request = scored_as_prompt(request)
        return {
            "model": self._policies[request.policy].served,
            "token_ids": list(map(int, prompt_tokens(request))),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": completion_limit(request, info.vocabulary, info.context_length),
                **({} if request.scored_token_ids is None else {"prompt_logprobs": 0}),
                "stop_token_ids": list(stop_token_ids(request, self._tokenizer)),
                "ignore_eos": True,  # stop_token_ids ends a completion, not the server's tokenizer
                "seed": seed & (2**63 - 1),  # torch's generators take 63 bits; vLLM reads -1 as no seed
                **sampling.cut,
                "logprobs": kept_logprobs(sampling),
                "detokenize": False,
                **({} if sampling.grammar is None else {"structured_outputs": {"grammar": sampling.grammar.text}}),
            },
        }

    async def _one(self, request: ModelRequest) -> ModelResponse:
        info, body = self._server.info, self._body(request)
        assert info is not None
        if self._unusable is not None:
            raise ModelError(self._unusable)
        try:
            content = await self._endpoint.ask("POST", GENERATE, body=body, most=MAX_GENERATED)
        except EndpointError as error:
            raise sampling_error(error, body["model"]) from error
        limit = body["sampling_params"]["max_tokens"]
        completion = read_completion(content, self._server.where, limit, info.vocabulary, request.sampling)
        if request.sampling.grammar is not None:  # in a dead end vLLM samples the end of the sequence
            await to_thread(check_end, self._tokenizer, request.sampling.grammar, completion.token_ids)
        versions = self._read_versions(request.policy, completion)
        if versions is None:
            await self._wait_for_update()
            versions = self._read_versions(request.policy, completion)
        if versions is None:
            raise EndpointError(f"{self._server.where} answered with weights that were not sent to it", retryable=True)
        if request.scored_token_ids is not None:
            self._stats["requests"] += 1
            self._stats["prompt_tokens"] += len(body["token_ids"])
            # The token that the server sampled after the scored ones doesn't count.
            scores = read_scores(content, self._server.where, request.scored_token_ids)
            return scored_response(request, scores, versions[-1][1], self._tokenizer)
        experts = None
        if self._routed_experts:
            passed = len(prompt_tokens(request)) + len(completion.token_ids) - 1
            experts = read_experts(content, self._server.where, passed)
        return self._response(request, completion, versions, experts)

    async def _wait_for_update(self) -> None:
        """Return once this client knows the server's weights, if another client sends them."""

    def _read_versions(self, policy: str, completion: ServerCompletion) -> PolicyVersions | None:
        """Convert labels to runs of ``policy``'s versions. ``None`` if a label is not from this client."""
        if not self._sends:
            return [(len(completion.token_ids), 0)]
        runs: PolicyVersions = []
        for count, label in completion.labels:
            versions = self._server.sent.get(label)
            if versions is None:
                return None
            if runs and runs[-1][1] == versions[policy]:
                count += runs.pop()[0]
            if count:
                runs.append((count, versions[policy]))
        return runs

    def _response(
        self,
        request: ModelRequest,
        completion: ServerCompletion,
        versions: PolicyVersions,
        experts: RoutedExperts | None,
    ) -> ModelResponse:
        self._stats["requests"] += 1
        self._stats["prompt_tokens"] += len(prompt_tokens(request))
        self._stats["cached_tokens"] += completion.cached_tokens
        self._stats["generated_tokens"] += len(completion.token_ids)
        response = ModelResponse(
            text=self._tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            completion_token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            policy_versions=versions,
            prompt_token_ids=prompt_tokens(request),
            routed_experts=experts,
            sampling_mask=completion.sampling_mask,
        )
        return cut_at_stop(response, request.sampling, self._tokenizer)

    # -- weights, in the endpoint's thread -----------------------------------------------------------------------------
    async def _recover(self) -> None:
        async with self._lock:
            await self._connect()
            if self._unusable is not None:
                raise ModelError(self._unusable)
            await self._server.limit_head()
            if self._sends and not (self._synced and await self._server.has_our_weights()):
                await self._sync(self._handle, self._adapters(), {})

    async def _connect(self) -> None:
        if self._server.info is None:
            await self._server.connect(self._sends)
            for name, state in self._policies.items():
                if state.base_shapes:
                    self._server.check_model(name, state.config, state.dtype)

    async def _load(self, policy: str, sources: dict[str, Tensor], version: int) -> None:
        state = self._policies[policy]
        base = {name: tensor for name, tensor in sources.items() if name in state.base_shapes}
        adapter_weights = {name: tensor for name, tensor in sources.items() if name in state.adapter_shapes}
        async with self._lock:
            await self._connect()
            if base:
                self._handle = await to_thread(self._transfer.send, base)
            has_weights = self._synced and self._unusable is None and await self._server.has_our_weights()
            adapters = {} if has_weights else self._adapters()
            if state.adapter is not None:
                adapters[policy] = (state.adapter, adapter_weights)
            await self._sync(self._handle if base or not has_weights else None, adapters, {policy: version})
            state.version = version

    def _adapters(self) -> Adapters:
        """All adapters, with the weights that their files already hold."""
        return {name: (state.adapter, {}) for name, state in self._policies.items() if state.adapter is not None}

    async def _sync(self, handle: WeightHandle | None, adapters: Adapters, new: Mapping[str, int]) -> None:
        """Load ``handle`` and ``adapters`` into the server, with the versions ``new`` from then on.

        After a failure the state of the server is unknown. Unless ``new`` weights failed, they can be sent again.
        """
        began = time.perf_counter()
        versions = {**{name: state.version for name, state in self._policies.items()}, **new}
        try:
            await self._server.put(handle, adapters, versions)
        except EndpointError as error:
            self._synced = False
            message = f"weights did not arrive whole at {self._endpoint.url} ({error})"
            self._unusable = f"new {message}; send them again" if new else None
            raise EndpointError(self._unusable or message, retryable=error.retryable) from error
        self._synced, self._unusable = True, None
        self._stats["syncs"] += 1
        self._stats["sync_seconds"] += time.perf_counter() - began


STATS = {
    "requests": "answered",
    "prompt_tokens": "in them",
    "cached_tokens": "prompt tokens whose keys and values the server's prefix cache held",
    "generated_tokens": "in the answers",
    "seconds": "in which a request ran",
    "syncs": "updates of weights",
    "sync_seconds": "that updates took",
}
"""The totals of :meth:`VLLMServerClient.stats`. ``preemptions`` is one too, as last read by ``peaks``: how often a
request lost its keys and values, to a full cache or to new weights in flight, and recomputed them."""

PEAKS = ("running", "waiting", "kv_cache_use")
"""Peaks that a server reports: see :class:`~turnwise.inference.server.launch.EngineLoad`."""

LOAD_SECONDS = 5.0
"""The most seconds in which a server must report its engine's load."""
