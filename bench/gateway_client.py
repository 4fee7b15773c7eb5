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


async def chat(url: str, key: str, given: dict[str, Any]) -> list[float]:
    """Make all calls of a session, each with the whole chat before it, over a connection of its own."""
    first, following = ({"role": "user", "content": text} for text in given["questions"])
    messages, waits = [first], []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        for _ in range(given["calls"]):
            began = time.perf_counter()
            async with http.post(f"{url}/chat/completions", json={"messages": messages}) as response:
                if response.status != 200:
                    raise SystemExit(f"{url} answered {response.status}: {await response.text()}")
                answer = await response.json()
            waits.append(1e3 * (time.perf_counter() - began))
            messages += [answer["choices"][0]["message"], following]
    return waits


async def main() -> None:
    given = json.load(sys.stdin)
    waits = await asyncio.gather(*(chat(url, key, given) for url, key in given["models"]))
    json.dump([wait for session in waits for wait in session], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
