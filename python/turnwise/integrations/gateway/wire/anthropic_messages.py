"""The dialect of Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import Tool, text_of
from turnwise.chat.parts import always
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
    shown_tool,
    structured_output,
    tool_choice,
    unsupported,
)
from turnwise.types import Messages
from turnwise.types.prompts import Prefix

IGNORED = ("service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id")
HARMLESS: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "context_management": ({}, [], {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "output_config": ({},),
}
WISHES = ("thinking",)
STOP = {"stop": "end_turn", "stop_string": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}


def parse(body: Mapping[str, Any], earlier: Earlier) -> ParsedRequest:
    """Read a request's body. Raises :class:`WireError` and :class:`~turnwise.chat.messages.ChatError`."""
    fields = Fields(body, IGNORED)
    given_tools = read_objects(fields.take("tools", []), "tools")
    described = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given_tools)]
    later = [bool(tool.get("defer_loading")) for tool in given_tools]
    tools = [tool for tool, waits in zip(described, later, strict=True) if not waits]
    earlier.offered.update((tool["function"]["name"], tool) for tool in described)
    system = text_of(fields.take("system"), "system")
    given = read_objects(fields.take("messages", []), "messages")
    thread, config = fields.take("thread", {}), fields.take("output_config", {})
    if not isinstance(thread, Mapping) or not isinstance(config, Mapping):
        raise invalid("thread" if isinstance(config, Mapping) else "output_config", "expected an object")
    lead: Messages = [{"role": "system", "content": system}] if system else []
    if (answer_id := thread.get("previous_message_id")) is None:
        messages, failed = earlier.plain(DIALECT, given, len(lead))
    else:
        new = [
            form
            for place, message in enumerate(given)
            for form in _messages(message, f"messages[{place}]", earlier.offered)
        ]
        before, kept = continued(earlier, answer_id, new, "thread.previous_message_id")
        begins = before[0]["role"] == "system"
        lead = lead or before[:begins]
        messages, _ = earlier.plain(DIALECT, Sent(before[begins:]), len(lead), is_converted=True)
        failed = tuple(note for message in given for note in _not_shown(message))
        tools = tools if "tools" in body else kept  # a thread keeps its tools
    whole = [*lead, *messages]
    choice, format = fields.take("tool_choice"), fields.take("output_format")
    format = config.get("format", format)
    deferred = [tool for tool, waits in zip(described, later, strict=True) if waits]
    if "tools" not in body:
        shown = [tool["function"]["name"] for tool in tools]
        deferred = [tool for name, tool in earlier.offered.items() if name not in shown]
    request = ParsedRequest(
        whole,
        str(fields.take("model", "")),
        tools,
        deferred,
        choice=tool_choice(choice, [*tools, *deferred]),
        output=structured_output(format, "output_config.format"),
        parallel_calls=not (isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use")),
        max_tokens=fields.count("max_tokens"),
        temperature=fields.number("temperature", 0, 1),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.count("top_k"),
        stop=fields.texts("stop_sequences"),
        stream=fields.flag("stream"),
        turn=fields.turn(),
        continues_answer=True,
        carried=Prefix.of_messages(whole) if thread else None,
    )
    effort = ["effort"] if config.get("effort") else []
    request.not_applied = (*fields.finish(HARMLESS, WISHES), *effort, *dict.fromkeys(failed))
    return request


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise unsupported(where, f"a tool of type {tool['type']!r} isn't supported, expected 'custom'")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)


def _messages(message: Mapping[str, Any], where: str, offered: Mapping[str, Tool]) -> Messages:
    """Return the messages that one message's blocks stand for: results of tools come before the user's text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", f"got {role!r}, expected 'user' or 'assistant'")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    results: Messages = []
    thoughts: list[str] = []
    plain: dict[str, Any] = {"role": role}
    for index, block in enumerate(read_objects(content, f"{where}.content")):
        at = f"{where}.content[{index}]"
        match block.get("type"):
            case "text":
                texts.append(text_of([block], at))
            case "tool_result" if role == "user":
                text = _result(block.get("content"), f"{at}.content", offered)
                results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
            case "tool_use" if role == "assistant":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                plain.setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
            case "thinking" if role == "assistant":
                thoughts.append(str(block.get("thinking", "")))
            case kind:
                raise unsupported(at, f"a block of type {kind!r} isn't supported here")
    plain["content"] = "".join(texts)
    if thoughts:
        plain["reasoning_content"] = "\n\n".join(thoughts)
    return [*results, plain] if texts or not results else results


def _result(content: Any, where: str, offered: Mapping[str, Tool]) -> str:
    """Return the text of a tool's result, which shows each tool that it names."""
    parts = [
        {"text": shown_tool(part.get("tool_name"), offered, f"{where}[{place}]")}
        if isinstance(part, Mapping) and part.get("type") == "tool_reference"
        else part
        for place, part in enumerate(content if isinstance(content, list) else ())
    ]
    return text_of(parts or content, where)


def _not_shown(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the mark that a tool failed, if a message has one: templates show its result alone."""
    blocks = () if isinstance(message["content"], str) else message["content"]
    return ("messages.is_error",) if any(block.get("is_error") for block in blocks) else ()


DIALECT = Dialect("messages", _messages, always, notes=_not_shown)


def answer(completed: CompletedRequest, request: ParsedRequest, format: ChatFormat) -> dict[str, Any]:
    """Return the body of the answer."""
    [choice] = completed.choices
    return {
        **_head(completed),
        "content": _blocks(completed),
        "stop_reason": STOP[choice.finish],
        "stop_sequence": choice.stop_string,
        "usage": {"input_tokens": completed.prompt_tokens, "output_tokens": completed.completion_tokens},
    }


def events(completed: CompletedRequest, request: ParsedRequest, format: ChatFormat) -> Iterator[bytes]:
    """Yield the answer as a stream of events: each block starts, comes whole, and stops."""
    [choice] = completed.choices
    usage = {"input_tokens": completed.prompt_tokens, "output_tokens": 0}
    start = {**_head(completed), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=start)
    for index, block in enumerate(_blocks(completed)):
        empty: dict[str, dict[str, Any]] = {
            "text": {"text": ""},
            "thinking": {"thinking": "", "signature": ""},
            "tool_use": {"input": {}},
        }
        yield _event("content_block_start", index=index, content_block={**block, **empty[block["type"]]})
        for delta in _deltas(block):
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    delta = {"stop_reason": STOP[choice.finish], "stop_sequence": choice.stop_string}
    yield _event("message_delta", delta=delta, usage={"output_tokens": completed.completion_tokens})
    yield _event("message_stop")


def _deltas(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    match block["type"]:
        case "text":
            return [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            return [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case _:
            return [{"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}]


def error(error: WireError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": error.type, "message": error.message}}


def _head(completed: CompletedRequest) -> dict[str, Any]:
    return {"id": f"msg_{completed.id}", "type": "message", "role": "assistant", "model": completed.model}


def _blocks(completed: CompletedRequest) -> list[dict[str, Any]]:
    [choice] = completed.choices
    message = choice.message()
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "turnwise"})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
