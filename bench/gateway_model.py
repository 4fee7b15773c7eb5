"""The model behind the gateways of ``bench_gateway.py``, a process of its own: a vLLM server that answers at once.

It reads one line from standard input, ``{"name": "tiny", "answer": "...", "answer_ids": [...], "prompts": [[...]]}``
(token ids of the answer, and of the prompt before each call), writes its port, and serves until standard input ends.
A chat's number of messages tells which prompt it is. All answers are made once.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from aiohttp import web

LOGPROB = -0.5


def make_answers(given: dict[str, Any]) -> tuple[Callable[[], bytes], Callable[[int, bool, bool], bytes]]:
    """Return the bodies of the token endpoint, and of a chat: by number of messages, with log-probabilities, and with
    token ids."""
    ids, text = given["answer_ids"], given["answer"]

    @lru_cache
    def tokens() -> bytes:
        content = [{"token": f"token_id:{i}", "token_id": i, "logprob": LOGPROB, "top_logprobs": []} for i in ids]
        label = [{"start": 0, "end": len(ids), "version": "default"}]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return json.dumps({"request_id": "one", "choices": [choice | {"weight_versions": label}]}).encode()

    @lru_cache
    def chat(messages: int, logprobs: bool, token_ids: bool) -> bytes:
        prompt = given["prompts"][messages // 2]
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None}
        choice |= {"finish_reason": "stop", "stop_reason": None}
        if logprobs:
            choice["logprobs"] = {
                "content": [{"token": str(i), "logprob": LOGPROB, "bytes": None, "top_logprobs": []} for i in ids]
            }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        body = {"id": "one", "object": "chat.completion", "created": 0, "model": given["name"], "usage": usage}
        if token_ids:
            choice["token_ids"], body["prompt_token_ids"] = ids, prompt
        return json.dumps(body | {"choices": [choice]}).encode()

    return tokens, chat


async def main() -> None:
    given = json.loads(sys.stdin.readline())
    tokens, chat = make_answers(given)

    def answer(body: bytes) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async def on_tokens(request: web.Request) -> web.Response:
        await request.read()
        return answer(tokens())

    async def on_chat(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        return answer(chat(len(body["messages"]), bool(body.get("logprobs")), bool(body.get("return_token_ids"))))

    async def on_models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": given["name"], "max_model_len": 4096}]})

    async def on_health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/inference/v1/generate", on_tokens)
    app.router.add_post("/v1/chat/completions", on_chat)
    app.router.add_get("/v1/models", on_models)
    app.router.add_get("/health", on_health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
