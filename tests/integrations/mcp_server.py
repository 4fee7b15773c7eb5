"""An MCP server with a state, and with tools that answer in all ways. Transport: ``stdio``, or a port for HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mcp.server.fastmcp import FastMCP, Image
from mcp.types import EmbeddedResource, TextContent, TextResourceContents
from pydantic import BaseModel

WAY = sys.argv[1]
server = FastMCP("own", port=int(WAY) if WAY.isdigit() else 8000, log_level="WARNING")
counted = [0]


class Place(BaseModel):
    x: int


class Way(BaseModel):
    stops: list[Place]
    start: Place | None = None


@server.tool()
def count() -> int:
    """Count the calls of this server."""
    counted[0] += 1
    return counted[0]


@server.tool()
def far(way: Way) -> str:
    """Return the last stop of a way."""
    return f"{type(way).__name__} to {way.stops[-1].x}"


@server.tool(structured_output=False)
def parts() -> list[Any]:
    """Return several parts."""
    linked = TextResourceContents(uri="file:///a.txt", text="of a file")
    image = Image(data=b"\x89PNG", format="png").to_image_content()
    return [TextContent(type="text", text="one"), image, EmbeddedResource(type="resource", resource=linked), "two"]


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise LookupError(text)


@server.tool()
async def hang() -> str:
    """Never answer."""
    import anyio

    await anyio.sleep_forever()
    return ""


@server.tool()
def die() -> str:
    """End the server, which has a child."""
    print("no more tea", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool(name="look.up")
def look_up() -> str:
    """Have a name that APIs refuse."""
    return "found"


if __name__ == "__main__":
    if len(sys.argv) > 2:  # a file for the ids of the processes: the server, and a child that never ends by itself
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
        with Path(sys.argv[2]).open("a") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
    if WAY == "slow":
        time.sleep(600)
    server.run("streamable-http" if WAY.isdigit() else "stdio")
