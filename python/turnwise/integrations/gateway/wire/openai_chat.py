"""The dialect of OpenAI's Chat Completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import not_shown
from turnwise.chat.parts import never
from turnwise.integrations.gateway.wire.chats import Dialect
from turnwise.integrations.gateway.wire.request import (
    MAX_CHOICES,
    Choice,
    CompletedRequest,
    Earlier,
    Fields,
    ParsedRequest,
    WireError,
    function_tool,
    read_objects,
    structured_output,
    tool_choice,
    unsupported,
)

# Fields that change nothing about what is sampled.
IGNORED = (
    "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction",
)  # fmt: skip
HARMLESS: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "add_generation_prompt": (True, False),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "thinking": ({"type": "disabled"},),
    "reasoning_effort": ("none",),
}
WISHES = ("reasoning_effort", "reasoning", "verbosity", "thinking")
"""Fields that ask for effort or style. They are taken and counted, and change nothing."""
DIALECT = Dialect(
    "messages", lambda message, where, deferred: [message], never, notes=lambda message: not_shown([message])
)
FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}


def parse(body: Mapping[str, Any], earlier: Earlier) -> ParsedRequest:
    """Read a request's body. Raises :class:`WireError` and :class:`~turnwise.chat.messages.ChatError`."""
    fields = Fields(body, IGNORED)
    tools = [
        _tool(tool, f"tools[{index}]") for index, tool in enumerate(read_objects(fields.take("tools", []), "tools"))
    ]
    options = fields.take("stream_options", {})
    messages, left_out = earlier.plain(DIALECT, fields.take("messages"))
    limits = [fields.count("max_completion_tokens"), fields.count("max_tokens")]
    n, top_k = fields.count("n") or 1, fields.count("top_k", -1)
    if n > MAX_CHOICES:
        raise unsupported("n", f"{n} choices are more than the {MAX_CHOICES} that are supported")
    request = ParsedRequest(
        messages.tolist(),
        str(fields.take("model", "")),
        tools,
        choice=tool_choice(fields.take("tool_choice"), tools),
        output=structured_output(fields.take("response_format"), "response_format"),
        parallel_calls=fields.flag("parallel_tool_calls", True),
        n=n,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        min_p=fields.number("min_p", 0, 1),
        top_k=0 if top_k == -1 else top_k,  # -1 is vLLM's word for all tokens
        seed=fields.count("seed", -(2**63), 2**64),
        stop=fields.texts("stop"),
        logprobs=fields.flag("logprobs"),
        stream=fields.flag("stream"),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        turn=fields.turn(),
        continues_answer=fields.flag("continue_final_message", None),
    )
    request.not_applied = (*fields.finish(HARMLESS, WISHES), *left_out)
    return request


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise unsupported(where, f"a tool of type {tool.get('type')!r} isn't supported, expected 'function'")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"), where)


def answer(completed: CompletedRequest, request: ParsedRequest, format: ChatFormat) -> dict[str, Any]:
    """Return the body of the answer."""
    return {
        **_head(completed, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": _logprobs(choice, request, format),
                "finish_reason": FINISH[choice.finish],
            }
            for index, choice in enumerate(completed.choices)
        ],
        "usage": _usage(completed),
    }


def events(completed: CompletedRequest, request: ParsedRequest, format: ChatFormat) -> Iterator[bytes]:
    """Yield the answer as a stream of events: role, text, each call whole, finish, and the usage if asked for."""

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _event({**_head(completed, "chat.completion.chunk"), "choices": choices, **more})

    def delta(index: int, part: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        return chunk([{"index": index, "delta": part, "logprobs": logprobs, "finish_reason": finish}])

    for index, choice in enumerate(completed.choices):
        message = _message(choice)
        yield delta(index, {"role": "assistant", "content": None if message["content"] is None else ""})
        if "reasoning_content" in message:
            yield delta(index, {"reasoning_content": message["reasoning_content"]})
        # The log-probabilities of the whole answer come once, with its first part: text, a call, or else the finish.
        parts: list[dict[str, Any]] = [{"content": message["content"]}] if message["content"] else []
        parts += [
            {"tool_calls": [{"index": place, **call}]} for place, call in enumerate(message.get("tool_calls", ()))
        ]
        logprobs = _logprobs(choice, request, format)
        for part in [*parts, {}]:
            yield delta(index, part, None if part else FINISH[choice.finish], logprobs)
            logprobs = None
    if request.include_usage:
        yield chunk([], usage=_usage(completed))
    yield b"data: [DONE]\n\n"


def error(error: WireError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def _head(completed: CompletedRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{completed.id}", "object": kind, "created": completed.created, "model": completed.model}


def _usage(completed: CompletedRequest) -> dict[str, Any]:
    return {
        "prompt_tokens": completed.prompt_tokens,
        "completion_tokens": completed.completion_tokens,
        "total_tokens": completed.prompt_tokens + completed.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": completed.reused_tokens},
    }


def _message(choice: Choice) -> dict[str, Any]:
    message = {**choice.message(), "refusal": None}
    calls = message.get("tool_calls", [])
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [{**call, "function": _as_text(call["function"])} for call in calls]
    return message


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _logprobs(choice: Choice, request: ParsedRequest, format: ChatFormat) -> dict[str, Any] | None:
    return {"content": token_logprobs(choice, format), "refusal": None} if request.logprobs else None


def token_logprobs(choice: Choice, format: ChatFormat) -> list[dict[str, Any]]:
    """Return the log-probability of each sampled token, with the token's own bytes."""
    content = []
    for token, logprob in zip(choice.response.completion_token_ids, choice.response.logprobs, strict=True):
        data = format.token_bytes(token)
        text = data.decode(errors="replace")
        content.append({"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []})
    return content


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
