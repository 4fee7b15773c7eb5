"""Tools of an actor that something outside of the process has, such as an MCP server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable


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
