"""One request of an agent and the answer to it, in any dialect; and the errors that answer a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.chat.formats import ParsedCompletion
from turnwise.chat.messages import Tool, tool_names
from turnwise.types import Message, Messages, ModelResponse


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


@dataclass(slots=True)
class Ask:
    """A request in the terms of turnwise. ``None`` means that the agent left it to the actor's settings."""

    messages: Messages
    model: str = ""
    tools: list[Tool] = field(default_factory=list)
    reads_calls: bool = True
    """False for ``tool_choice = "none"``: the tools are shown, and calls stay text."""
    parallel_calls: bool = True
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    turn: int | None = None


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
class Answered:
    """The answer to one :class:`Ask`: its choices, and the counts of its tokens."""

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
        if type(value) is not int or not low <= value <= high:
            raise invalid(name, f"got {str(value)[:40]!r}, expected a whole number from {low} to {high:g}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(name, f"got {str(value)[:40]!r}, expected true or false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts, such as stop strings."""
        value = self.take(name, ())
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
            raise invalid(name, f"got {str(value)[:40]!r}, expected a text or a list of texts")
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
        if found < 0:
            raise invalid("metadata.turn", f"got {str(turn)[:40]!r}, expected a whole number from 0")
        return found

    def finish(self, harmless: Mapping[str, Sequence[Any]]) -> None:
        """Raise for a field that was not taken, unless its value is one of its ``harmless`` ones."""
        for name, value in self._left.items():
            if value not in harmless.get(name, ()):
                raise unsupported(name, f"{str(value)[:80]!r} isn't supported")


def check_tool_choice(choice: Any, tools: Sequence[Tool]) -> bool:
    """Return False for ``"none"``. Raise for a choice that would force a call, which sampling can't promise."""
    name = None
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        function = choice.get("function")
        name = choice.get("name") or (function.get("name") if isinstance(function, Mapping) else None)
        choice = {"any": "required", "tool": name}.get(str(kind), name if name else kind)
    if name is not None and name not in tool_names(tools):
        raise unsupported("tool_choice", f"no tool {name!r}, expected one of {tool_names(tools)}")
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", f"{choice!r}: a call can't be forced, expected 'auto' or 'none'")
    return choice != "none"


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> Tool:
    """Return a tool in the form of the OpenAI API."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", f"got {str(name)[:40]!r}, expected the name of a function")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid(f"{where}.parameters", "expected a JSON schema")
    function: dict[str, Any] = {"name": name, "description": str(description or "")}
    function["parameters"] = dict(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def list_of(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return a list of objects. Raises for anything else."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, Mapping) for part in value):
        raise invalid(where, "expected a list of objects")
    return list(value)
