"""The client of ``bench_gateway.py``, a process of its own: all sessions talk at once, each in one growing chat.

It reads ``{"models": [[base URL, key], ...], "calls": 4, "questions": ["first", "each next"]}`` from standard input,
and writes the milliseconds of each call. ``"tools"`` may be added; results answer the calls that the model makes.
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
    tools = {"tools": given["tools"]} if "tools" in given else {}
    messages, waits = [first], []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        for _ in range(given["calls"]):
            began = time.perf_counter()
            async with http.post(f"{url}/chat/completions", json={"messages": messages, **tools}) as response:
                if response.status != 200:
                    raise SystemExit(f"{url} answered {response.status}: {await response.text()}")
                answer = await response.json()
            waits.append(1e3 * (time.perf_counter() - began))
            message = answer["choices"][0]["message"]
            calls = message.get("tool_calls", ())
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "nothing"} for call in calls]
            messages += [message, *(results or [following])]
    return waits


async def main() -> None:
    given = json.load(sys.stdin)
    waits = await asyncio.gather(*(chat(url, key, given) for url, key in given["models"]))
    json.dump([wait for session in waits for wait in session], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
