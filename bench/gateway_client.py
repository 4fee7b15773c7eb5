"""The client of ``bench_gateway.py``, a process of its own: all sessions talk at once, each in one growing chat.

It reads ``{"models": [[base URL, key], ...], "calls": 4, "questions": ["first", "each next"]}`` from standard input,
and writes the milliseconds of each call.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp


async def chat(http: aiohttp.ClientSession, url: str, key: str, given: dict[str, Any]) -> list[float]:
    """Make all calls of a session, each with the whole chat before it."""
    first, following = ({"role": "user", "content": text} for text in given["questions"])
    messages, waits = [first], []
    for _ in range(given["calls"]):
        began = time.perf_counter()
        answer = await call(http, f"{url}/chat/completions", key, messages)
        waits.append(1e3 * (time.perf_counter() - began))
        messages += [answer["choices"][0]["message"], following]
    return waits


async def call(http: aiohttp.ClientSession, url: str, key: str, messages: list[dict[str, Any]]) -> Any:
    """Call once, and up to twice more if the connection breaks, as OpenAI's SDK does: servers end idle connections."""
    headers = {"Authorization": f"Bearer {key}"}
    for attempts_left in (2, 1, 0):
        try:
            async with http.post(url, json={"messages": messages}, headers=headers) as response:
                if response.status != 200:
                    raise SystemExit(f"{url} answered {response.status}: {await response.text()}")
                return await response.json()
        except aiohttp.ClientConnectionError:
            if not attempts_left:
                raise


async def main() -> None:
    given = json.load(sys.stdin)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        waits = await asyncio.gather(*(chat(http, url, key, given) for url, key in given["models"]))
    json.dump([wait for session in waits for wait in session], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
