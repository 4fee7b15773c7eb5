"""A completion as it was understood: the thought, the answer and the calls in it; and what may answer the calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]
"""One chat message as the OpenAI API writes it: ``{"role": "user", "content": "2 + 2 = ?"}``."""

OK = "ok"
"""Status of a call that can run."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a completion. ``status`` is ``"ok"``, or the reason why it can't be read as a call of a known tool.

    Example: ``ToolCall("add", {"a": 2, "b": 2}, raw='{"name": "add", "arguments": {"a": 2, "b": 2}}')``
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    """The text that the model sampled, with its marks."""
    status: str = OK
    problem: str = ""
    """What is wrong, as a text for the model."""


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """The parts of a completion: the model's thought, its answer, and all calls that it attempted, in their order.

    A completion that ended inside its thought has no answer and no call, whatever the thought holds.

    Example: ``"<think>2 and 2</think>4"`` is ``ParsedCompletion("4", "2 and 2")``.
    """

    answer: str
    """The text outside of the thought, without good calls. The text of a call that is not ``"ok"`` is part of it."""
    thought: str = ""
    """The text between the marks of reasoning."""
    calls: tuple[ToolCall, ...] = ()
    in_thought: bool = False
    """True if the completion ended inside its thought."""
    finished: bool = True
    """True if the model ended the answer itself: no limit cut it, and it is not inside its thought."""
    written: str | None = None
    """The answer with all calls as they were written, if there are any; see :attr:`text`."""

    @property
    def text(self) -> str:
        """All text outside of the thought, calls included."""
        return self.answer if self.written is None else self.written

    @property
    def content(self) -> str:
        """Alias of ``answer``, as chat APIs name it."""
        return self.answer

    @property
    def reasoning(self) -> str:
        """Alias of ``thought``."""
        return self.thought

    @property
    def good_calls(self) -> list[ToolCall]:
        return [call for call in self.calls if call.status == OK]

    def message(self, ids: Sequence[str] = ()) -> Message:
        """Return the assistant's message. ``ids`` name the good calls."""
        message: Message = {"role": "assistant", "content": self.answer}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.good_calls:
            message["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for name, call in zip(ids, self.good_calls, strict=True)
            ]
        return message


class ToolSourceError(RuntimeError):
    """A source of tools can't start, or has ended. It fails the episode; an error of a single call is its result."""


class OpenTools(Protocol):
    """The tools of a source while it is open."""

    tools: Sequence[dict[str, Any]]
    """Schemas of the tools, as the OpenAI API writes them."""
    has_ended: bool
    """True once the source answers no more calls."""

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the answer of a tool. Raises ``ToolSourceError`` if the source has ended."""
        ...


@runtime_checkable
class ToolSource(Protocol):
    """A source of tools in ``Actor(tools=[...])``, such as :class:`turnwise.integrations.mcp.MCPServer`.

    Equal sources are one. One task enters and leaves what ``opened`` returns.
    """

    @property
    def name(self) -> str:
        """Name of the source in errors."""
        ...

    @property
    def shared(self) -> bool:
        """True if all episodes of a process share it; else each attempt at an episode opens its own."""
        ...

    def problem(self) -> str:
        """Return why the source can't be opened on this machine, as far as that shows without opening it."""
        ...

    def opened(self) -> AbstractAsyncContextManager[OpenTools]:
        """Return a context manager that opens the source. It raises ``ToolSourceError`` if that fails."""
        ...

    def schemas(self) -> list[dict[str, Any]]:
        """Open the source for a moment, and return the schemas of its tools."""
        ...
