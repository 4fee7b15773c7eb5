"""Chat messages of any client in one form, and keys by which equal messages are found again."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from turnwise.types import Message, Messages

ROLES = ("system", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
SPEAKERS = (*SYSTEM_ROLES, "user", "assistant")
"""Roles of messages whose ``name`` says who speaks; in a tool's result it is the tool."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that hold text, in the APIs that the gateway serves."""

Tool = dict[str, Any]
"""A function that a model may call, as the OpenAI API writes it:
``{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}``."""


class ChatError(ValueError):
    """A chat that can't be rendered. ``param`` names the part that is at fault, such as ``"messages[2].content"``."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


def plain_messages(messages: Any, join: Callable[[Messages, list[Any]], Messages] | None = None) -> Messages:
    """Return ``messages`` in the form that chat templates take. Raises :class:`ChatError` for a chat they can't hold.

    Content becomes one string. The role ``developer`` becomes ``system``. A tool call's arguments become an object,
    unless they are no JSON object. Results of tools take the order of their calls. An old ``function_call`` becomes a
    tool call, and a ``refusal`` content. Fields that no template reads are left out, see :func:`not_shown`. ``join``
    gets the messages with their ids, and joins those that are parts of one answer.

    Example: ``[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]`` gives
    ``[{"role": "system", "content": "Be brief."}]``.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatError("messages", f"got {str(messages)[:80]!r}, expected a list of at least one message")
    plain = [plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if join is not None:
        plain = join(plain, [message.get("id") for message in messages])
    return results_in_order(plain)


def plain_message(message: Any, where: str) -> Message:
    """Return one message as :func:`plain_messages` does. Errors name the place ``where`` it stands."""
    if not isinstance(message, Mapping):
        raise ChatError(where, f"got {str(message)[:80]!r}, expected an object with a role")
    role = {"developer": "system", "function": "tool"}.get(str(message.get("role")), message.get("role"))
    if role not in ROLES:
        raise ChatError(f"{where}.role", f"got {role!r}, expected one of {ROLES}")
    if message.get("content") is None and role in ("system", "user"):
        raise ChatError(f"{where}.content", f"got None, expected the text of the {role}")
    plain: Message = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    if role == "assistant":
        if message.get("audio"):
            raise ChatError(f"{where}.audio", f"got {str(message['audio'])[:80]!r}, expected text")
        refusal = text_of(message.get("refusal"), f"{where}.refusal")
        plain["content"] = "\n\n".join(text for text in (plain["content"], refusal) if text)
        if message.get("function_call") and not message.get("tool_calls"):
            plain["tool_calls"] = [_plain_call({"function": message["function_call"]}, f"{where}.function_call")]
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], Sequence) or isinstance(message["tool_calls"], str):
                raise ChatError(f"{where}.tool_calls", f"got {str(message['tool_calls'])[:80]!r}, expected a list")
            plain["tool_calls"] = [
                _plain_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message["tool_calls"])
            ]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            plain["reasoning_content"] = reasoning
    elif role == "tool":
        plain |= {key: str(message[key]) for key in ("tool_call_id", "name") if message.get(key)}
    return plain


def with_system(messages: Messages, system_prompt: str) -> Messages:
    """Return a chat with an actor's system prompt, unless the chat begins with a system message of its own."""
    if not system_prompt or messages[0]["role"] in SYSTEM_ROLES:
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def not_shown(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the fields that say something of ``messages`` and that :func:`plain_messages` leaves out.

    Example: ``[{"role": "user", "name": "ann", "content": "Hi"}]`` gives ``("messages.name",)``.
    """
    named = any(message.get("name") for message in messages if message.get("role") in SPEAKERS)
    return ("messages.name",) if named else ()


def with_answer(messages: Sequence[Message], answer: Message) -> Messages:
    """Return a chat with its sampled answer. If the chat ends with a begun answer, the sampled one completes it."""
    if not (messages and messages[-1]["role"] == "assistant"):
        return [*messages, answer]
    return [*messages[:-1], {**messages[-1], **answer, "content": messages[-1]["content"] + answer["content"]}]


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content, which is a string, ``None`` or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ChatError(where, f"got {str(content)[:80]!r}, expected text")
    texts = []
    for index, part in enumerate(content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind == "refusal" and isinstance(part, Mapping):
            text, kind = part.get("refusal"), "text"
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise ChatError(f"{where}[{index}]", f"got a part of type {kind!r}, expected text")
        texts.append(text)
    return "".join(texts)


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(where, f"got {str(call)[:80]!r}, expected a call of a function with a name")
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments_of(function)}}
    return {"id": str(call["id"]), **plain} if call.get("id") else plain


def arguments_of(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object, or as text if they are no JSON object."""
    given = function.get("arguments")
    if not isinstance(given, str):
        return dict(given) if isinstance(given, Mapping) else {}
    try:
        parsed = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given


def well_formed_texts(value: Any) -> Any:
    """Return a JSON value with U+FFFD for lone surrogates in its texts, which no tokenizer can encode."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {well_formed_texts(key): well_formed_texts(part) for key, part in value.items()}
    return [well_formed_texts(part) for part in value] if isinstance(value, list) else value


def characters(messages: Messages) -> int:
    """Return the length of the texts and calls of plain messages."""
    texts = sum(len(message["content"]) + len(message.get("reasoning_content") or "") for message in messages)
    return texts + sum(len(json.dumps(message["tool_calls"])) for message in messages if "tool_calls" in message)


def tool_names(tools: Sequence[Tool]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


# -- order -------------------------------------------------------------------------------------------------------------
def results_in_order(messages: Messages, first: int = 0) -> Messages:
    """Return ``messages`` with the results of each answer's calls in the order of these calls, by ``tool_call_id``.

    Templates render results without their ids, so only the order shows which call a result belongs to. Calls and
    results without any id stay as they are. Raises :class:`ChatError` for an id that is missing, doubled or unknown,
    and for a call without a result in a chat that goes on. ``first`` messages stand before these.
    """
    for message in messages:
        if message["role"] == "tool" or "tool_calls" in message:
            break
    else:
        return messages
    ordered: Messages = []
    start = 0
    while start < len(messages):
        call_ids: list[str] = []
        if messages[start]["role"] != "tool":
            ordered.append(messages[start])
            call_ids = [str(call.get("id") or "") for call in messages[start].get("tool_calls") or ()]
            start += 1
        end = start
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = messages[start:end]
        has_ids = any(call_ids) or any(result.get("tool_call_id") for result in results)
        goes_on = start < len(messages)
        ordered += _matched(call_ids, results, first + start) if has_ids and goes_on else results
        start = end
    return ordered


def _matched(calls: Sequence[str], results: Messages, begin: int) -> Messages:
    """Return ``results``, which begin at ``messages[begin]``, in the order of the ids of ``calls``."""
    by_id: dict[str, Message] = {}
    known = set(calls)
    for index, result in enumerate(results, begin):
        name, where = str(result.get("tool_call_id") or ""), f"messages[{index}].tool_call_id"
        if name not in known or not name:
            expected = f"expected one of {list(calls)}" if calls else "no call of the answer before it has an id"
            raise ChatError(where, f"got {name!r}: {expected}")
        if name in by_id:
            raise ChatError(where, f"got {name!r} again: expected one result for each call")
        by_id[name] = result
    where = f"messages[{begin - 1}].tool_calls"
    if len(known) < len(calls):
        raise ChatError(where, f"got the ids {list(calls)}: expected an id of its own for each call")
    if missing := [name for name in calls if name not in by_id]:
        raise ChatError(where, f"no result for {missing}: expected a tool message for each call right after them")
    return [by_id[name] for name in calls]


def fold_systems(messages: Messages, *, first: bool, later: bool, begun: bool = False) -> Messages:
    """Return ``messages`` for a template that takes a ``first`` system message, or also ``later`` ones.

    Leading ones are joined into one, except in the rest of a ``begun`` chat. Those that the template doesn't take
    become the beginning of the next user message, each as ``"system: <text>"``. Before an answer and at the end, they
    become the end of the previous user message, or a new one.
    """
    roles = [message["role"] in SYSTEM_ROLES for message in messages]
    lead = 0 if begun else (*roles, False).index(False)
    folded: Messages = []
    waiting: list[str] = []
    if first and lead == 1:
        folded.append({**messages[0], "role": "system"})
    elif first and lead:
        texts = [text_of(message.get("content"), f"messages[{index}]") for index, message in enumerate(messages[:lead])]
        folded.append(_said("system", [text for text in texts if text], messages))
    for index, message in enumerate(messages):
        if roles[index] and index < lead and first:
            continue
        if roles[index] and later and index >= lead:
            folded.append({**message, "role": "system"})
        elif roles[index]:
            waiting.append(f"system: {text_of(message.get('content'), f'messages[{index}].content')}")
        elif waiting and message["role"] == "user":
            folded.append(_with_texts(message, before=waiting))
            waiting = []
        else:
            _end_with(folded, waiting)
            waiting = []
            folded.append(message)
    _end_with(folded, waiting)
    return folded


def join_neighbours(messages: Messages, refused: Callable[[str, str], bool]) -> Messages:
    """Return ``messages`` for a template that wants roles in turn: no role follows one behind which it is ``refused``.

    Messages of one role become one, of paragraphs. A user's message behind a tool's result becomes the end of that
    result, as ``"user: <text>"``. A chat that begins with an answer (role ``""`` before it) gets an empty user message.
    """
    joined: Messages = []
    for message in messages:
        role = message["role"]
        begins = all(other["role"] in SYSTEM_ROLES for other in joined)
        before = "" if begins else joined[-1]["role"]
        if not refused(before, role):
            joined.append(message)
        elif begins:
            joined += [_said("user", [], messages), message]
        else:
            joined[-1] = _joined(joined[-1], message)
    return joined


def _joined(first: Message, second: Message) -> Message:
    """Return two messages as one of the first one's role."""
    text = text_of(second.get("content"), "content")
    text = text if first["role"] == second["role"] else f"user: {text}"
    whole = _with_texts(first, after=[text]) if first.get("content") else {"content": text}
    return joined_parts([first, second], whole["content"])


def joined_parts(parts: Messages, content: Any) -> Message:
    """Return the first of ``parts`` with ``content``, and with the reasoning and the calls of all."""
    joined = {**parts[0], "content": content}
    reasoning = [message["reasoning_content"] for message in parts if message.get("reasoning_content")]
    calls = [call for message in parts for call in message.get("tool_calls") or ()]
    joined |= {"reasoning_content": "\n\n".join(reasoning)} if reasoning else {}
    return joined | ({"tool_calls": calls} if calls else {})


def _end_with(messages: Messages, texts: Sequence[str]) -> None:
    """Add ``texts`` to the last of ``messages`` if it is the user's, else as a user message."""
    if texts and messages and messages[-1]["role"] == "user":
        messages[-1] = _with_texts(messages[-1], after=texts)
    elif texts:
        messages.append(_said("user", texts, messages))


def _said(role: str, texts: Sequence[str], chat: Messages) -> Message:
    """Return a message of paragraphs, with the kind of content that ``chat`` has: a text or a list of parts."""
    text = "\n\n".join(texts)
    has_parts = any(isinstance(message.get("content"), list) for message in chat)
    return {"role": role, "content": [{"type": "text", "text": text}] if has_parts else text}


def _with_texts(message: Message, before: Sequence[str] = (), after: Sequence[str] = ()) -> Message:
    """Return ``message`` with further paragraphs ``before`` and ``after`` its text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": "\n\n".join([*before, content, *after])}
    first = [{"type": "text", "text": f"{text}\n\n"} for text in before]
    return {**message, "content": [*first, *content, *({"type": "text", "text": f"\n\n{text}"} for text in after)]}


# -- keys --------------------------------------------------------------------------------------------------------------
def message_key(message: Message) -> Hashable:
    """Return a key that is equal for equal plain messages, whatever their ids and the order of their fields.

    It leaves out reasoning, which many clients don't send back, and white space around the assistant's content, which
    many clients strip. Numbers in the arguments of calls are equal by value, such as 1 and 1.0.
    """
    role, content = message["role"], message["content"]
    if role != "assistant":
        return role, content
    calls = tuple(
        (call["function"]["name"], json.dumps(_plain_numbers(call["function"]["arguments"]), sort_keys=True))
        for call in message.get("tool_calls") or ()
    )
    return role, content.strip(), calls


def _plain_numbers(value: Any) -> Any:
    """Return a JSON value with whole numbers as ``int``, as other programs may write 1 for 1.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain_numbers(part) for key, part in value.items()}
    return [_plain_numbers(part) for part in value] if isinstance(value, list) else value
