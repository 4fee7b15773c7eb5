"""The routes of the engine's server: those of vLLM's that turnwise's clients use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from turnwise.inference.common.experts import experts_to_text
from turnwise.inference.common.listening import Listener
from turnwise.inference.server.launch import REMOTE, RPC, Admission
from turnwise.inference.transformers_server.engine import TransformersEngine, UnknownModelError
from turnwise.inference.weights.weight_block import TransferError
from turnwise.types import ContextLengthError, ModelError, ModelRequest, ModelResponse, Sampling
from turnwise.utils.threads import to_thread

MAX_BYTES = 2**26
"""The most bytes of a request: prompts of several million tokens."""

LONG = 2**16
"""Bytes of a request from which on it is read in a thread."""

MAX_VALUES = 1000
"""Lists and objects of a request, whose tokens are numbers."""

SAMPLING = {
    "temperature": (int, float), "max_tokens": (int,), "stop_token_ids": (list,), "ignore_eos": (bool,), "seed": (int,),
    "logprobs": (int,), "detokenize": (bool,), "prompt_logprobs": (int,), "top_p": (int, float), "top_k": (int,),
    "min_p": (int, float),
}  # fmt: skip
"""Sampling parameters that a request may have, and their types."""

FIXED = {"ignore_eos": True, "detokenize": False}
"""Parameters that must have one value, as the engine has no tokenizer. It reports the sampled token's logprob, and
names the kept tokens, whatever ``logprobs`` is."""


class Routes:
    """Answers requests with ``engine``. Changes of weights run one after the other, also if their client hangs up."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._changing = asyncio.Lock()
        self.listener: Listener | None = None
        """Keeps the connections of those with a key."""

    def app(self) -> web.Application:
        """Make the application. The key and the host names are in the environment; see :class:`Admission`."""
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[_admitting(Admission(), self._prove)])
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_post("/inference/v1/generate", self.generate)
        for path, change in {
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/update_weight_version": self.update_weight_version,
            "/v1/load_lora_adapter": self.load_lora_adapter,
            "/v1/unload_lora_adapter": self.unload_lora_adapter,
            RPC: self.collective_rpc,
        }.items():
            app.router.add_post(path, self._alone(change))
        return app

    def _prove(self, request: web.Request) -> None:
        if self.listener is not None and request.path != "/health":
            self.listener.prove(request.transport)

    def _alone(self, change: Callable[[web.Request, Any], Awaitable[Any]]) -> Any:
        async def run(request: web.Request, body: Any) -> Any:
            async with self._changing:
                return await change(request, body)

        async def handle(request: web.Request) -> web.Response:
            body = await _body(request)
            return web.json_response(await asyncio.shield(run(request, body)))

        return handle

    # -- what is served ------------------------------------------------------------------------------------------------
    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        base = {"id": self._engine.name, "object": "model", "owned_by": "turnwise", "parent": None}
        listed = [{**base, "max_model_len": self._engine.context_length}]
        listed += [{**base, "id": name, "parent": self._engine.name} for name in self._engine.adapters()]
        return web.json_response({"object": "list", "data": listed})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._engine.labels[-1]})

    # -- sampling ------------------------------------------------------------------------------------------------------
    async def generate(self, request: web.Request) -> web.Response:
        body = await _body(request)
        model = str(body.get("model") or self._engine.name)
        self._engine.check_served(model)
        sampling = _sampling(body.get("sampling_params"), self._engine.vocabulary)
        asked = ModelRequest(_ids(body, "token_ids"), sampling, policy=model)
        try:
            [response] = await self._engine.generate([asked])
            scores = await self._scores(asked) if "prompt_logprobs" in body["sampling_params"] else {}
        except ContextLengthError as error:
            raise ContextLengthError(
                f"This model's maximum context length is {self._engine.context_length} tokens. However, your prompt "
                f"contains {len(asked.prompt_token_ids)} input tokens, which leaves none for the output."
            ) from error
        return web.json_response(self._answer(response) | scores)

    async def _scores(self, asked: ModelRequest) -> dict[str, Any]:
        """Return the log-probabilities of the prompt's tokens after the first, as vLLM writes them."""
        first, *others = asked.prompt_token_ids
        [logprobs] = await self._engine.score([replace(asked, prompt_token_ids=[first])], [others])
        scores = [{str(token): {"logprob": value}} for token, value in zip(others, logprobs, strict=True)]
        return {"prompt_logprobs": [None, *scores]}

    def _answer(self, response: ModelResponse) -> dict[str, Any]:
        """``response`` as vLLM's token endpoint writes it."""
        ids, spans, start = response.completion_token_ids, [], 0
        for count, version in response.policy_versions:
            spans.append({"start": start, "end": start + count, "version": self._engine.labels[version]})
            start += count
        pairs = zip(ids, response.logprobs, strict=True)
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]},
            "finish_reason": response.finish_reason,
            "weight_versions": spans,
        }
        if response.routed_experts is not None:
            choice["routed_experts"] = experts_to_text(response.routed_experts.ids)
        if response.sampling_mask is not None:
            choice["sampling_mask"] = response.sampling_mask.lists()
        prompt = len(response.prompt_token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
        return {"choices": [choice], "usage": usage}

    # -- weights -------------------------------------------------------------------------------------------------------
    async def pause(self, request: web.Request, body: Any) -> Any:
        mode = request.query.get("mode", "wait")
        if mode not in ("keep", "wait"):
            raise ValueError(f"mode={mode!r}: expected keep or wait")
        await self._engine.hold_back(keep=mode == "keep")
        return {"status": "paused"}

    async def resume(self, request: web.Request, body: Any) -> Any:
        await self._engine.go_on()
        return {"status": "resumed"}

    async def reset_prefix_cache(self, request: web.Request, body: Any) -> Any:
        return {"success": True}  # keys and values last as long as their batch

    async def update_weight_version(self, request: web.Request, body: Any) -> Any:
        await to_thread(self._engine.set_label, _text(body, "new_version"))
        return {"success": True}

    async def load_lora_adapter(self, request: web.Request, body: Any) -> Any:
        name, path = _text(body, "lora_name"), Path(_text(body, "lora_path"))
        await to_thread(self._engine.load_adapter, name, path)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload_lora_adapter(self, request: web.Request, body: Any) -> Any:
        name = _text(body, "lora_name")
        await to_thread(self._engine.unload_adapter, name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def collective_rpc(self, request: web.Request, body: Any) -> Any:
        method, arguments = body.get("method"), body.get("args", [])
        if method not in REMOTE:
            raise PermissionError(f"method={str(method)[:80]!r}: only {', '.join(REMOTE)} can be called")
        if not isinstance(arguments, list):
            raise ValueError(f"args={arguments!r}: expected a list")
        return {"results": [await to_thread(self._called, method, *arguments)]}

    def _called(self, method: str, *arguments: Any) -> Any:
        if method == "turnwise_describe":
            return self._engine.describe()
        if method == "turnwise_reload":
            return self._engine.reload(*arguments)
        if method == "turnwise_limit_head":
            return self._engine.limit_head(*arguments)
        number, name, folder = arguments
        return self._engine.read_adapter_again(number, name, Path(folder))


# -- requests and errors -----------------------------------------------------------------------------------------------
STATUSES: dict[type[Exception], int] = {
    PermissionError: 403,
    OverflowError: 400,
    UnknownModelError: 404,
    ContextLengthError: 400,
    ValueError: 400,
    TypeError: 400,
    ModelError: 500,
    TransferError: 500,
    OSError: 500,
    ImportError: 500,
}
"""The status of each error. The first one that fits counts."""


def _admitting(admission: Admission, prove: Callable[[web.Request], None]) -> Any:
    @web.middleware
    async def admit(request: web.Request, handler: Any) -> web.StreamResponse:
        scope = {"method": request.method, "path": request.path, "headers": request.raw_headers}
        if (refusal := admission.refusal(scope)) is not None:
            return _error(*refusal)
        prove(request)
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            return _error(404, f"the transformers engine has no {request.method} {request.path}")
        except tuple(STATUSES) as error:
            status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
            return _error(status, str(error) or type(error).__name__)

    return admit


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _body(request: web.Request) -> Mapping[str, Any]:
    if not request.can_read_body:
        return {}
    text = await request.read()
    if text.count(b"[") + text.count(b"{") > MAX_VALUES:
        raise ValueError(f"the request has more than {MAX_VALUES} lists and objects")
    try:
        body = await to_thread(_parsed, text) if len(text) >= LONG else _parsed(text)
    except RecursionError:
        raise ValueError("the request is nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError("the request is no JSON object")
    return body


def _parsed(text: bytes) -> Any:
    return json.loads(text.decode())  # raises ValueError for what is no JSON


def _text(body: Mapping[str, Any], field: str) -> str:
    if not isinstance(body.get(field), str) or not body[field]:
        raise ValueError(f"{field}={body.get(field)!r}: expected a text")
    return body[field]


def _ids(body: Mapping[str, Any], field: str) -> list[int]:
    ids = body.get(field, [])
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{field}={str(ids)[:80]}: expected a list of token ids")
    return ids


def _sampling(given: Any, vocabulary: int) -> Sampling:
    """Read sampling parameters. Raises ``ValueError`` for one that the engine doesn't know, or can't serve."""
    if not isinstance(given, dict):
        raise ValueError(f"sampling_params={str(given)[:80]}: expected an object")
    for name, value in given.items():
        if name not in SAMPLING:
            raise ValueError(f"sampling_params.{name}: expected one of {', '.join(SAMPLING)}")
        if type(value) not in SAMPLING[name]:
            expected = " or ".join(kind.__name__ for kind in SAMPLING[name])
            raise ValueError(f"sampling_params.{name}={str(value)[:80]}: expected {expected}")
    for name, value in {**FIXED, "prompt_logprobs": 0}.items():
        if given.get(name, 0 if name == "prompt_logprobs" else None) != value:
            raise ValueError(f"sampling_params.{name}={given.get(name)!r}: expected {value!r}")
    stops = tuple(token for token in _ids(given, "stop_token_ids") if 0 <= token < vocabulary)  # others never come
    names = ("temperature", "max_tokens", "seed", "top_p", "top_k", "min_p")
    plain = {name: given[name] for name in names if name in given}
    if "temperature" in plain:
        plain["temperature"] = float(plain["temperature"])  # a larger one would fail the whole batch
    return Sampling(stop_token_ids=stops, **plain)
