"""The dialect of OpenAI's Responses. A session keeps its answers, so ``previous_response_id`` continues one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import Tool, not_shown, plain_messages, text_of
from turnwise.chat.parts import as_items
from turnwise.integrations.gateway.wire import openai_chat
from turnwise.integrations.gateway.wire.chats import Dialect, Sent
from turnwise.integrations.gateway.wire.request import (
    CompletedRequest,
    Earlier,
    Fields,
    ParsedRequest,
    WireError,
    continued,
    function_tool,
    invalid,
    read_objects,
    structured_output,
    tool_choice,
    unsupported,
)
from turnwise.types import Messages

IGNORED = (*openai_chat.IGNORED, "stream_options", "max_tool_calls", "client_metadata")
HARMLESS: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "background": (False,),
    "top_logprobs": (0,),
    "reasoning": ({}, {"effort": "none"}),
    "context_management": ([],),
}
WISHES = ("reasoning", "truncation")
REFERENCE = "item_reference"
"""Type of an input item that names an earlier one by its id, as clients do that leave chats to be stored."""


def parse(body: Mapping[str, Any], earlier: Earlier) -> ParsedRequest:
    """Read a request's body. Raises :class:`WireError` and :class:`~turnwise.chat.messages.ChatError`."""
    fields = Fields(body, IGNORED)
    tools = [
        _tool(tool, f"tools[{index}]") for index, tool in enumerate(read_objects(fields.take("tools", []), "tools"))
    ]
    instructions, given = fields.take("instructions"), fields.take("input")
    sent = [{"role": "user", "content": given}] if isinstance(given, str) else read_objects(given, "input")
    items = _with_items(sent, earlier)
    if (answer_id := fields.take("previous_response_id")) is None:
        messages, names = earlier.plain(DIALECT, items)
    else:
        new = [form for place, item in enumerate(items) for form in _messages(item, f"input[{place}]")]
        whole, _ = continued(earlier, answer_id, new, "previous_response_id")
        messages, _ = earlier.plain(DIALECT, whole, is_converted=True)
        names = not_shown(items)
    answers = plain_messages([{"role": "system", "content": instructions}]) if instructions else []
    text, include = fields.take("text", {}), fields.take("include", [])
    if not isinstance(text, Mapping):
        raise invalid("text", f"got {str(text)[:80]!r}, expected an object")
    if not isinstance(include, list):
        raise invalid("include", f"got {str(include)[:80]!r}, expected a list")
    request = ParsedRequest(
        [*answers, *messages],
        str(fields.take("model", "")),
        tools,
        choice=tool_choice(fields.take("tool_choice"), tools),
        output=structured_output(text.get("format"), "text.format"),
        parallel_calls=fields.flag("parallel_tool_calls", True),
        max_tokens=fields.count("max_output_tokens"),
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        logprobs="message.output_text.logprobs" in include,
        stream=fields.flag("stream"),
        turn=fields.turn(),
        carried=messages,
        items=_items_by_id,
    )
    left = fields.finish(HARMLESS, WISHES)
    request.not_applied = (*left, *(["verbosity"] if text.get("verbosity") else []), *names)
    return request


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(where, f"a tool of type {tool.get('type')!r} isn't supported, expected 'function'")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), where)


def _with_items(items: Sequence[Mapping[str, Any]], earlier: Earlier) -> Sequence[Mapping[str, Any]]:
    """Return ``items`` with the parts of earlier answers that some of them name by their ids.

    Items that were read before stay as they are.
    """
    new = range(earlier.settled(DIALECT, items), len(items))
    named = [place for place in new if items[place].get("type") == REFERENCE or items[place].keys() == {"id"}]
    if not named:
        return items
    found = Sent(items) if isinstance(items, Sent) else list(items)
    for place in named:
        item = items[place]
        if (name := str(item.get("id"))) not in earlier.items:
            where = f"input[{place}].id"
            raise WireError(400, "item_not_found", f"{where}: no item {name[:80]!r} in this session", where)
        found[place] = earlier.items[name]
    return found


def _messages(item: Mapping[str, Any], at: str, offered: Mapping[str, Tool] = MappingProxyType({})) -> Messages:
    """Return the message that an input item stands for, with the item's id."""
    return [_message(item, at)]


def _message(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    part: dict[str, Any] = {"role": "assistant", "content": "", "id": item.get("id")}
    match item.get("type", "message"):
        case "message":
            return {**part, "role": item.get("role"), "content": text_of(item.get("content"), f"{at}.content")}
        case "reasoning":
            texts = [
                text for name in ("content", "summary") for text in read_objects(item.get(name) or (), f"{at}.{name}")
            ]
            return {**part, "reasoning_content": "".join(str(text.get("text", "")) for text in texts)}
        case "function_call":
            function = {key: item.get(key) for key in ("name", "arguments")}
            return {**part, "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        case "function_call_output":
            text = text_of(item.get("output"), f"{at}.output")
            return {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text}
        case kind:
            raise unsupported(at, f"an item of type {kind!r} isn't supported")


DIALECT = Dialect("input", _messages, as_items, moves_results=True, notes=lambda item: not_shown([item]))


def answer(completed: CompletedRequest, request: ParsedRequest, format: ChatFormat) -> dict[str, Any]:
    """Return the body of the answer."""
    [choice] = completed.choices
    cut = choice.finish == "length"
    return {
        **_head(completed, request),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(completed, request, format),
        "usage": {
            "input_tokens": completed.prompt_tokens,
            "input_tokens_details": {"cached_tokens": completed.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": completed.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completed.prompt_tokens + completed.completion_tokens,
        },
    }


def events(completed: CompletedRequest, request: ParsedRequest, format: ChatFormat) -> Iterator[bytes]:
    """Yield the answer as a stream of events: each item is added, comes whole, and is done."""
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        data = {"type": kind, "sequence_number": number - 1, **fields}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

    begun = {**_head(completed, request), "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(_items(completed, request, format)):
        at = {"item_id": item["id"], "output_index": index}
        empty: dict[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
        begun_item = {**item, "status": "in_progress", **empty.get(item["type"], {})}
        yield event("response.output_item.added", output_index=index, item=begun_item)
        if item["type"] == "message":
            [part] = item["content"]
            text = {"logprobs": part["logprobs"], **at}
            yield event("response.content_part.added", content_index=0, part={**part, "text": "", "logprobs": []}, **at)
            yield event("response.output_text.delta", content_index=0, delta=part["text"], **text)
            yield event("response.output_text.done", content_index=0, text=part["text"], **text)
            yield event("response.content_part.done", content_index=0, part=part, **at)
        elif item["type"] == "function_call":
            written = item["arguments"]
            yield event("response.function_call_arguments.delta", delta=written, **at)
            yield event("response.function_call_arguments.done", arguments=written, name=item["name"], **at)
        yield event("response.output_item.done", output_index=index, item=item)
    whole = answer(completed, request, format)
    yield event(f"response.{whole['status']}", response=whole)


error = openai_chat.error


def _head(completed: CompletedRequest, request: ParsedRequest) -> dict[str, Any]:
    return {
        "id": f"resp_{completed.id}",
        "object": "response",
        "created_at": completed.created,
        "model": completed.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": request.parallel_calls,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tool_choice": "required" if request.choice.forced else "none" if request.choice.names == () else "auto",
        "tools": [],
    }


def _items(completed: CompletedRequest, request: ParsedRequest, format: ChatFormat) -> list[dict[str, Any]]:
    [choice] = completed.choices
    logprobs = openai_chat.token_logprobs(choice, format) if request.logprobs else []
    return list(_items_by_id(completed, logprobs).values())


def _items_by_id(completed: CompletedRequest, logprobs: Sequence[Any] = ()) -> dict[str, dict[str, Any]]:
    """Return the items of the answer by their ids; its text has the ``logprobs``."""
    [choice] = completed.choices
    message = choice.message()
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "id": f"rs_{completed.id}", "summary": [], "content": [text]})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": list(logprobs)}
        items.append(
            {
                "type": "message",
                "id": f"msg_{completed.id}",
                "role": "assistant",
                "status": "incomplete" if choice.finish == "length" else "completed",
                "content": [part],
            }
        )
    for index, call in enumerate(calls):
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{completed.id}_{index}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": json.dumps(function["arguments"], ensure_ascii=False),
                "status": "completed",
            }
        )
    return {item["id"]: item for item in items}
