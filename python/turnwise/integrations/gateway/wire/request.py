"""One request of an agent and the answer to it, in any dialect; and the errors that answer a request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from turnwise.chat.messages import Tool, tool_names
from turnwise.integrations.gateway.wire.chats import Dialect, PlainChats, Sent
from turnwise.types import Message, Messages, ModelResponse, ParsedCompletion
from turnwise.types.prompts import Prefix


@dataclass(eq=False)
class WireError(Exception):
    """An answer that is an error. The SDKs send 409, 429 and 502 three times, and the other statuses once.

    Example: ``WireError(400, "unsupported", "logit_bias: isn't supported", param="logit_bias")``
    """

    status: int
    code: str
    message: str
    param: str | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    @property
    def type(self) -> str:
        """The error's class, by the names that both APIs use."""
        return {
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            502: "api_error",
        }.get(self.status, "invalid_request_error")


def unsupported(param: str, problem: str) -> WireError:
    """Return the error for a part of a request that the gateway can't serve."""
    return WireError(400, "unsupported", f"{param}: {problem}", param)


def invalid(param: str | None, problem: str) -> WireError:
    """Return the error for a request that is wrong."""
    return WireError(400, "invalid_request", problem if param is None else f"{param}: {problem}", param)


def unauthorized() -> WireError:
    """Return the same error for a wrong key and an unknown session, so that a client can't distinguish them."""
    return WireError(401, "invalid_api_key", "wrong API key, or no such session")


def session_over(reason: str) -> WireError:
    return WireError(410, "session_over", f"the session is over: {reason}")


MAX_CHOICES = 16
MAX_STOPS, LONGEST_STOP = 64, 1000
"""Stop strings of a request, and characters of one: samplers look for each after each token."""
LAST_TURN = 2**31 - 1


@dataclass(slots=True)
class Earlier:
    """The answers of an actor in a session, by ids that agents send back."""

    chats: dict[str, tuple[Sequence[Message], list[Tool]]] = field(default_factory=dict)
    """The chats that a request may continue by the id of their answer, with their tools."""
    answers: dict[str, Message] = field(default_factory=dict)
    """The answers by their ids, and by those of their calls."""
    items: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The parts of answers, in their dialect's form, by the ids under which a request may name them."""
    offered: dict[str, Tool] = field(default_factory=dict)
    """The tools of the requests by their names, under which a result may show one."""
    _read: dict[Dialect, PlainChats] = field(default_factory=dict)
    _asked_for: set[str] = field(default_factory=set)
    """All ids that were looked for, found or not."""

    def plain(
        self, dialect: Dialect, messages: Any, lead: int = 0, *, is_converted: bool = False
    ) -> tuple[Prefix[Message], tuple[str, ...]]:
        """Return a chat in plain messages, and what it says that no model is shown, see :meth:`PlainChats.read`."""
        if dialect not in self._read:
            self._read[dialect] = PlainChats(dialect, self.find_answer, self.offered)
        return self._read[dialect].read(messages, lead, is_converted=is_converted)

    def settled(self, dialect: Dialect, messages: Any) -> int:
        """Return how many first messages a chat has that was read before, and needn't be read again."""
        return self._read[dialect].settled(messages)[0] if dialect in self._read else 0

    def keep_answer(self, ids: Sequence[str], answer: Message) -> None:
        """Keep an answer by its ids."""
        self.answers |= dict.fromkeys(ids, answer)
        if not self._asked_for.isdisjoint(ids):  # a client had made up such an id, or the answer was sampled again
            for chats in self._read.values():
                chats.forget()

    def find_answer(self, part: Any) -> Message | None:
        """Return the answer that a call or an item of the Responses API belongs to, by its id; ``None`` if unknown."""
        of_item = str(part).partition("_")[2]
        names = (str(part), of_item, of_item.rpartition("_")[0])
        self._asked_for.update(names)
        return next((self.answers[name] for name in names if name in self.answers), None)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of the answer that an agent asks for: JSON by a schema, or any JSON object if ``schema`` is ``None``.

    Example: ``StructuredOutput({"type": "object", "properties": {"total": {"type": "integer"}}})``
    """

    schema: Mapping[str, Any] | None = None
    description: str = ""

    def instruction(self, has_tools: bool) -> str:
        """Return the text that shows the form to the model."""
        begin = "When you call no function, answer" if has_tools else "Answer"
        if self.schema is None:
            return f"{begin} with a JSON object alone, without any other text."
        lines = [f"{begin} with JSON alone, without any other text. It must match this JSON schema:"]
        lines += [self.description] if self.description else []
        return "\n".join([*lines, json.dumps(self.schema, ensure_ascii=False)])


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools whose calls are read (``None``: all), and whether the agent asks for a call of one of them.

    Example: ``ToolChoice(("add",), forced=True)``
    """

    names: tuple[str, ...] | None = None
    forced: bool = False

    def instruction(self, tools: Sequence[Tool]) -> str:
        """Return the text that asks the model for the call."""
        names = tool_names(tools) if self.names is None else self.names
        if len(names) == 1:
            return f"Call the function {names[0]} now."
        return f"Call one of these functions now: {', '.join(names)}."


@dataclass(slots=True)
class ParsedRequest:
    """A request in the terms of turnwise. ``None`` means that the agent left it to the actor's settings."""

    messages: Sequence[Message]
    model: str = ""
    tools: list[Tool] = field(default_factory=list)
    deferred: list[Tool] = field(default_factory=list)
    """Tools that no prompt begins with: results of the agent's own search show them. Calls of them are read."""
    choice: ToolChoice = ToolChoice()
    output: StructuredOutput | None = None
    parallel_calls: bool = True
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    turn: int | None = None
    continues_answer: bool | None = None
    """True if a chat that ends with the assistant's message is continued in that message, False if a new answer
    follows it. ``None``: only if no actor of the session sampled that message as a whole."""
    carried: Prefix[Message] | None = None
    """The messages that an answer's id stands for in a later request; ``None`` if the dialect has no such ids."""
    items: Callable[[CompletedRequest], Mapping[str, Mapping[str, Any]]] | None = None
    """Returns the parts of the answer by the ids under which a later request may name them; ``None`` in a dialect that
    has no such ids."""
    not_applied: tuple[str, ...] = ()
    """The fields that were taken and change nothing: wishes for effort or style, and names of speakers."""
    size: int = 0
    """Bytes of the request, and of those that it continues."""
    new_bytes: int = 0
    """Bytes of the request behind the messages that the actor has sent before."""

    @property
    def readable_tools(self) -> list[Tool]:
        """The tools whose calls are read; calls of others stay text."""
        names = None if self.choice.names is None else set(self.choice.names)
        tools = [*self.tools, *self.deferred]
        return tools if names is None else [tool for tool in tools if tool["function"]["name"] in names]

    def instructions(self) -> tuple[str, str]:
        """Return the texts that show the model the form of the chat's answers, and ask it for a call now."""
        form = "" if self.output is None else self.output.instruction(bool(self.readable_tools))
        return form, self.choice.instruction(self.tools) if self.choice.forced else ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled completion. ``content`` ends before a stop string; the tokens of ``response`` keep it."""

    response: ModelResponse
    parsed: ParsedCompletion
    content: str
    call_ids: tuple[str, ...]
    finish: str
    """``"stop"``, ``"length"``, ``"tool_calls"`` or ``"stop_string"``."""
    stop_string: str | None = None

    def message(self) -> Message:
        """Return the assistant's message as the agent gets it, and is expected to send it back."""
        return {**self.parsed.message(self.call_ids), "content": self.content}


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """The answer to one :class:`ParsedRequest`: its choices, and the counts of its tokens."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    prompt_tokens: int
    reused_tokens: int

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.response.completion_token_ids) for choice in self.choices)


# -- fields of a request -----------------------------------------------------------------------------------------------
class Fields:
    """Reads the fields of a request's body once each. :meth:`finish` refuses those that nothing read."""

    def __init__(self, body: Mapping[str, Any], ignored: Sequence[str] = ()) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        for name in ignored:
            self._left.pop(name, None)

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise invalid(name, f"got {str(value)[:40]!r}, expected a number from {low:g} to {high:g}")
        return float(value)

    def count(self, name: str, low: int = 1, high: float = math.inf) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        if type(value) is not int or not low <= value <= high:
            raise invalid(name, f"got {str(value)[:40]!r}, expected a whole number from {low} to {high:g}")
        return value

    @overload
    def flag(self, name: str, default: bool = False) -> bool: ...
    @overload
    def flag(self, name: str, default: None) -> bool | None: ...
    def flag(self, name: str, default: bool | None = False) -> bool | None:
        value = self.take(name, default)
        if value is not default and not isinstance(value, bool):
            raise invalid(name, f"got {str(value)[:40]!r}, expected true or false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts, such as stop strings."""
        value = self.take(name, ())
        texts = (value,) * bool(value) if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
            raise invalid(name, f"got {str(value)[:40]!r}, expected a text or a list of texts")
        if len(texts) > MAX_STOPS or any(len(text) > LONGEST_STOP for text in texts):
            raise unsupported(name, f"more than {MAX_STOPS} texts, or one of more than {LONGEST_STOP} characters")
        return tuple(texts)

    def turn(self) -> int | None:
        """``metadata["turn"]``, which replaces the number of the actor's call."""
        metadata = self.take("metadata", {})
        turn = metadata.get("turn") if isinstance(metadata, Mapping) else None
        if turn is None:
            return None
        try:
            found = int(turn)
        except (TypeError, ValueError, OverflowError):
            found = -1
        if not 0 <= found <= LAST_TURN:
            raise invalid("metadata.turn", f"got {str(turn)[:40]!r}, expected a whole number from 0 to {LAST_TURN}")
        return found

    def finish(self, harmless: Mapping[str, Sequence[Any]], wishes: Sequence[str] = ()) -> tuple[str, ...]:
        """Return those of ``wishes`` that are left. Raise for other fields unless the value is a ``harmless`` one."""
        left = {name: value for name, value in self._left.items() if value not in harmless.get(name, ())}
        for name, value in left.items():
            if name not in wishes:
                raise unsupported(name, f"{str(value)[:80]!r} isn't supported")
        return tuple(left)


def tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice that a request makes among its ``tools``, in the form of any dialect."""
    names: tuple[str, ...] | None = None
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "allowed_tools":
            [allowed] = read_objects([choice.get("allowed_tools", choice)], "tool_choice.allowed_tools")
            named = [_name_in(tool) for tool in read_objects(allowed.get("tools", ()), "tool_choice.tools")]
            names, choice = tuple(map(str, named)), allowed.get("mode", "auto")
        elif (name := _name_in(choice)) is not None:
            names, choice = (str(name),), "required"
        else:
            choice = kind
    known = tool_names(tools)
    if unknown := sorted({*(names or ())} - {*known}):
        raise unsupported("tool_choice", f"no tool {unknown[0]!r}, expected one of {known}")
    if choice in (None, "auto"):
        return ToolChoice(names)
    if choice == "none":
        return ToolChoice(())
    if choice not in ("required", "any"):
        raise unsupported("tool_choice", f"got {str(choice)[:80]!r}, expected 'auto', 'none', 'required' or a tool")
    if not (known if names is None else names):
        raise invalid("tool_choice", f"got {choice!r} without tools, expected 'auto' or 'none'")
    return ToolChoice(names, forced=True)


def _name_in(choice: Mapping[str, Any]) -> Any:
    function = choice.get("function")
    return choice.get("name") or (function.get("name") if isinstance(function, Mapping) else None)


def structured_output(format: Any, where: str) -> StructuredOutput | None:
    """Return the form of the answer that a request asks for; ``None`` for plain text."""
    if format is None:
        return None
    kind = format.get("type") if isinstance(format, Mapping) else format
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput()
    if kind != "json_schema":
        raise unsupported(where, f"got {str(kind)[:80]!r}, expected 'text', 'json_object' or 'json_schema'")
    given = format.get("json_schema", format)
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise invalid(f"{where}.schema", "expected a JSON schema")
    return StructuredOutput(schema, str(given.get("description") or ""))


def continued(earlier: Earlier, answer_id: Any, messages: Messages, where: str) -> tuple[Messages, list[Tool]]:
    """Return ``messages`` behind the chat that the answer of this id ended, and that chat's tools.

    Without an id, return ``messages`` and no tools.
    """
    if answer_id is None:
        return messages, []
    key = str(answer_id).partition("_")[2]
    if key not in earlier.chats:
        text = f"{where}: no answer {str(answer_id)[:80]!r} in this session"
        raise WireError(400, "previous_response_not_found", text, where)
    before, tools = earlier.chats[key]
    return Sent([*before, *messages]), tools


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> Tool:
    """Return a tool in the form of the OpenAI API."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", f"got {str(name)[:40]!r}, expected the name of a function")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid(f"{where}.parameters", "expected a JSON schema")
    function: dict[str, Any] = {"name": name, "description": str(description or "")}
    function["parameters"] = dict(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def shown_tool(name: Any, offered: Mapping[str, Tool], where: str) -> str:
    """Return the text that shows the model a tool that a result names."""
    if (tool := offered.get(str(name))) is None:
        raise invalid(f"{where}.tool_name", f"got {str(name)[:80]!r}, expected a tool of the request: {[*offered]}")
    return f"{json.dumps(tool, ensure_ascii=False)}\n"


def read_objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return a list of objects. Raises for anything else."""
    if isinstance(value, Sent):
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, Mapping) for part in value):
        raise invalid(where, "expected a list of objects")
    return list(value)
