"""Servers of the Model Context Protocol (MCP), whose tools an actor calls. Needs the package ``mcp``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from turnwise.arena.runtime.watch import count, warn_once
from turnwise.chat.tools import inlined
from turnwise.integrations.gateway.process import supervisor
from turnwise.integrations.gateway.process.episode import end_orphans
from turnwise.integrations.gateway.process.output import Tail, pipe
from turnwise.types import ToolSourceError
from turnwise.utils.threads import DaemonThreads, run_to_end

FOLDER = "{folder}"
"""In a command: a folder of its own, which is removed with the server."""
MARK = "TURNWISE_MCP_SERVER"
"""Variable by which the processes of a server are found."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
"""Names of tools that every chat template and every API takes."""
GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL, for a server that doesn't end with its standard input."""
SHOWN_LINES = 20
"""Last lines of a server's standard error in an error."""


class MCPToolError(RuntimeError):
    """A server answered a call with an error, which the model reads."""


@dataclass(frozen=True, eq=False)
class MCPServer:
    """A server of the Model Context Protocol in ``Actor(tools=[...])``; the actor may call its tools.

    It is a ``command`` (stdio), or has a ``url`` (streamable HTTP). Equal servers of several actors are one.

    Example: ``MCPServer(["mcp-server-sqlite", "--db-path", "{folder}/state.db"])``
    """

    command: Sequence[str] = ()
    """Program and arguments. ``{folder}`` becomes a new folder, which is removed with the server."""
    url: str = ""
    """Address of a server that runs already, such as ``"http://127.0.0.1:8000/mcp"``."""
    shared: bool = False
    """One server, or session, for all episodes of a process. By default each attempt at an episode has its own."""
    name: str = ""
    """Name in errors and in the recording; by default of the command's first words, or the host."""
    prefix: str = ""
    """Text before the name of each tool, for servers whose tools have equal names."""
    only: Sequence[str] | None = None
    """Names, as the server has them, of the tools that the actor gets; by default all."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the command. It has PATH, HOME and the like, and no others of this process."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of each request to ``url``, such as a key."""
    cwd: str | None = None
    """Working folder of the command; by default that of this process."""
    start_timeout: float = 60.0
    """Seconds until the server must have listed its tools."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"MCPServer(command={self.command!r}, url={self.url!r}): expected one of them")
        if isinstance(self.command, str) or not all(isinstance(word, str) and word for word in self.command):
            raise ValueError(f"MCPServer.command={self.command!r}: expected a list of texts, such as ['my-server']")
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"MCPServer.url={self.url!r}: expected the http:// or https:// URL of a server")
        if isinstance(self.only, str):
            raise ValueError(f"MCPServer.only={self.only!r}: expected a list of names of tools")
        if not self.start_timeout > 0:
            raise ValueError(f"MCPServer.start_timeout={self.start_timeout!r}: expected seconds > 0")
        if self.prefix and not NAME.fullmatch(self.prefix):
            raise ValueError(f"MCPServer.prefix={self.prefix!r}: expected letters, digits, '_' and '-'")
        if not self.name:
            words = [Path(word).name for word in self.command if word[0] != "-"][:2]
            object.__setattr__(self, "name", " ".join(words) or urlsplit(self.url).netloc)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MCPServer) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> str:
        return repr([getattr(self, each.name) for each in fields(self)])

    # -- what turnwise asks (:class:`turnwise.types.ToolSource`) -------------------------------------------------------
    def problem(self) -> str:
        """Return why the server can't be opened here: no package ``mcp``, or no such command; else an empty text."""
        if importlib.util.find_spec("mcp") is None:
            return f"MCP server {self.name!r} needs the package mcp: pip install 'turnwise[mcp]'"
        path = None if not self.command else shutil.which(self.command[0], path=self._environment()["PATH"])
        if self.command and path is None and not Path(self.cwd or ".", self.command[0]).is_file():
            return f"MCP server {self.name!r}: there is no program {self.command[0]!r} on PATH"
        return ""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[OpenServer]:
        """Start the server or a session with it for the block. Raises ``ToolSourceError`` if it can't, or ends."""
        if problem := self.problem():
            raise ToolSourceError(problem)
        import anyio
        from mcp import ClientSession

        errors, started = Tail(), False
        try:
            async with self._streams(errors) as (reader, writer, *_), ClientSession(reader, writer) as session:
                with anyio.fail_after(self.start_timeout):
                    await session.initialize()
                    listed = await _list_tools(session)
                server = OpenServer(self, session, errors, listed)
                started = True
                yield server
        except ToolSourceError:
            raise
        except Exception as error:
            what = "ended" if started else f"did not start{_cause(error, self.start_timeout)}"
            raise ToolSourceError(f"MCP server {self.name!r} {what}{_shown(errors)}") from error

    def schemas(self) -> list[dict[str, Any]]:
        """Start the server for a moment, and return the schemas of its tools, as the OpenAI API writes them."""

        async def ask() -> list[dict[str, Any]]:
            async with self.opened() as server:
                return list(server.tools)

        return DaemonThreads("mcp").submit(lambda: run_to_end(ask())).result()

    # -- transports ----------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _streams(self, errors: Tail) -> AsyncIterator[Sequence[Any]]:
        """Yield the streams of the transport. ``errors`` gets the standard error of a command."""
        if self.url:
            from mcp.client import streamable_http as http

            async with (
                http.create_mcp_http_client(headers=dict(self.headers)) as client,
                http.streamable_http_client(self.url, http_client=client) as streams,
            ):
                yield streams
            return
        from mcp import StdioServerParameters, stdio_client

        async with contextlib.AsyncExitStack() as stack:
            words = list(self.command)
            if any(FOLDER in word for word in words):
                folder = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="turnwise-mcp-", ignore_cleanup_errors=True)
                )
                words = [word.replace(FOLDER, folder) for word in words]
            # The supervisor ends what the server started, too, and ends with this process. If the event loop is
            # cancelled, the library kills the supervisor first.
            run = ["-I", "-S", supervisor.__file__, json.dumps({"grace": GRACE}), *words]
            environment = {**self._environment(), MARK: uuid4().hex}
            asked = StdioServerParameters(command=sys.executable, args=run, env=environment, cwd=self.cwd)

            async def end(kind: Any, *_: Any) -> None:
                if kind is not None:
                    await end_orphans(f"{MARK}={environment[MARK]}")

            stack.push_async_exit(end)
            with os.fdopen(await stack.enter_async_context(pipe(errors)), "w") as written:
                stack.push_async_callback(errors.ends)
                streams = await stack.enter_async_context(stdio_client(asked, written))
            yield streams

    def _environment(self) -> dict[str, str]:
        """Return the variables of the command. The programs of this Python's environment are found first."""
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
        return {"PATH": path, "LANG": os.environ.get("LANG", "C.UTF-8"), **self.env}


class OpenServer:
    """A session with a server (:class:`turnwise.types.completions.OpenTools`)."""

    def __init__(self, server: MCPServer, session: Any, errors: Tail, listed: Sequence[Mapping[str, Any]]) -> None:
        self.server, self.session, self.errors, self.has_ended = server, session, errors, False
        known = [tool["name"] for tool in listed]
        if missing := [name for name in server.only or () if name not in known]:
            raise ToolSourceError(f"MCP server {server.name!r} has no tool {missing[0]!r} of only: it has {known}")
        self.names: dict[str, str] = {}
        self.tools: list[dict[str, Any]] = []
        for tool in listed:
            if server.only is None or tool["name"] in server.only:
                self._add(tool)

    def _add(self, tool: Mapping[str, Any]) -> None:
        given = tool["name"]
        name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{self.server.prefix}{given}")
        where = f"MCP server {self.server.name!r}"
        if not NAME.fullmatch(name):
            raise ToolSourceError(f"{where}: the tool {given!r} would be {name!r}: expected at most 64 characters")
        if name in self.names:
            raise ToolSourceError(f"{where}: the tools {self.names[name]!r} and {given!r} would both be {name!r}")
        if name != f"{self.server.prefix}{given}":
            warn_once(("mcp name", where, given), f"{where}: models know the tool {given!r} as {name!r}")
        self.names[name] = given
        parameters = dict(tool.get("inputSchema") or {})
        with contextlib.suppress(ValueError, KeyError):  # a type that contains itself, or another kind of reference
            parameters = inlined(parameters, parameters.get("$defs", {}))
        parameters = {"type": "object", "properties": {}, **parameters}
        function = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
        self.tools.append({"type": "function", "function": function})

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the answer of a tool as text. Raises ``MCPToolError`` if the server answers with an error, and
        ``ToolSourceError`` if it has ended."""
        try:
            given = await self.session.call_tool(self.names[name], arguments)
        except Exception as error:
            if not _is_over(error):
                raise
            self.has_ended = True
            if self.server.command:
                await self.errors.ends()
            raise ToolSourceError(f"MCP server {self.server.name!r} ended{_shown(self.errors)}") from error
        answer = given.model_dump(mode="json", by_alias=True, exclude_none=True)
        text = text_of(answer, self.server.name)
        if answer.get("isError"):
            raise MCPToolError(text)
        return text


def _is_over(error: Exception) -> bool:
    """Return True if a call failed because the server is gone, not because of the call."""
    import anyio
    from mcp.types import CONNECTION_CLOSED

    closed = isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError | anyio.EndOfStream)
    return closed or getattr(getattr(error, "error", None), "code", None) == CONNECTION_CLOSED


async def _list_tools(session: Any) -> list[dict[str, Any]]:
    """Return the tools of all pages, as the protocol writes them."""
    from mcp.types import PaginatedRequestParams

    listed: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        answer = page.model_dump(mode="json", by_alias=True, exclude_none=True)
        listed += answer["tools"]
        cursor = answer.get("nextCursor")
        if not cursor:
            return listed


def text_of(answer: Mapping[str, Any], server: str = "") -> str:
    """Return the parts of an answer as text, one a line. What is no text is named, and counted.

    Example: ``text_of({"content": [{"type": "text", "text": "4"}, {"type": "image", "mimeType": "image/png", "data":
    "iVBORw=="}]})`` is ``"4\\n[image: image/png, not shown]"``.
    """
    texts, hidden = [], 0
    for part in answer.get("content") or ():
        resource = part.get("resource") or {}
        if part["type"] == "text":
            texts.append(part["text"])
        elif part["type"] == "resource_link":
            texts.append(f"[{part['type']}: {part['uri']}]")
        elif "text" in resource:
            texts.append(resource["text"])
        else:
            hidden += 1
            kind = part.get("mimeType") or resource.get("mimeType") or "of an unknown type"
            texts.append(f"[{part['type']}: {kind}, not shown]")
    if hidden:
        count("tool_parts_not_shown", hidden)
        warn_once(
            ("mcp parts", server),
            f"MCP server {server!r} gave parts that are no text: the model reads what they are, not their content "
            "(tool_parts_not_shown)",
        )
    if not texts and "structuredContent" in answer:
        return json.dumps(answer["structuredContent"], ensure_ascii=False)
    return "\n".join(texts)


def _cause(error: BaseException, seconds: float) -> str:
    """Return why a server did not start, from the error of the library."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f" within start_timeout={seconds:g} s"
    return f" ({type(error).__name__}: {error})"


def _shown(errors: Tail) -> str:
    """Return the last lines of a server's standard error, for an error."""
    lines = errors.output.decode(errors="replace").splitlines()[-SHOWN_LINES:]
    return "; its last output:\n" + "\n".join(lines) if lines else ""
