"""Run vLLM's API server, and end it with its starter: ``python -m turnwise.inference.server.launch``.

The starter holds the other end of the server's standard input. When that closes, or the starter is gone, the server and
all processes of its group are killed. :class:`RequestGate` guards all routes of the server.
"""

from __future__ import annotations

import hmac
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from turnwise.inference.common.listening import is_known_host
from turnwise.inference.vllm.worker import computes_on_cpu

API_SERVER = "vllm.entrypoints.openai.api_server"
"""vLLM's server as a module. The CPU package has it too, but no `vllm serve`."""

KEY = "VLLM_API_KEY"
"""The environment variable from which vLLM reads the key that clients must send."""

HOSTS = "TURNWISE_SERVE_HOSTS"
"""The environment variable with the host names, separated by commas, that requests may use."""

STARTER = "TURNWISE_SERVE_STARTER"
"""The environment variable with the process id of the starter."""

REMOTE = ("turnwise_reload", "turnwise_describe", "turnwise_adapter", "turnwise_limit_head")
"""The worker's methods that clients may call: those of turnwise's ``WorkerExtension``."""

RPC = "/collective_rpc"

LOAD = "/turnwise/load"
"""The route that reports the engine's load: see :class:`EngineLoad`."""

ROUTES = {
    "GET": {"/health", "/metrics", "/v1/models", "/version", "/weight_info", LOAD},
    "POST": {
        "/inference/v1/generate", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize",
        "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version", RPC,
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    },
}  # fmt: skip
"""The routes that clients may use. vLLM's development mode, which opens the routes for weights, opens many more."""

MAX_BYTES = 2**20
"""The most bytes in a call of a worker's method. A weight handle is small: it locates weights, but holds none."""

CPU_ARGUMENTS = ["--block-size=32", "--enforce-eager", "--no-enable-chunked-prefill"]
"""Short blocks let short prompts share the cache. Compiling takes a minute, too long for small models. If a
step can't take in a whole prompt, vLLM rewinds the request's generator, which fails on a CPU."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Admission:
    """Admits requests with the key, to the routes of :data:`ROUTES`. Only ``/health`` needs no key.

    The ``Host`` header must be an address or one of the names in :data:`HOSTS`. Else a web page could reach the server
    under its own name, by pointing that name to this machine (DNS rebinding).
    """

    def __init__(self) -> None:
        self._expected = f"Bearer {os.environ[KEY]}".encode()
        self._hosts = {"localhost", *os.environ.get(HOSTS, "").lower().split(",")} - {""}

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and message for a request that is refused; ``None`` for one that may pass."""
        if not is_known_host(scope["headers"], self._hosts):
            return 400, "the Host header names another server: use its address, or start it with this --allowed-host"
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/health"):
            return None
        keys = _values(scope, b"authorization")
        if len(keys) != 1 or not hmac.compare_digest(keys[0], self._expected):
            return 401, "the server asks for a key, and this is not it"
        if path not in ROUTES.get(method, ()):
            return 404, "turnwise serve has no such route"
        return None


class EngineLoad:
    """The engine's load, from vLLM's reports of each step.

    ``preemptions`` are counted from the start. Peaks are those since the last :meth:`take`: requests ``running`` and
    ``waiting``, and ``kv_cache_use``, the share in [0, 1] of the memory for keys and values.
    """

    def __init__(self) -> None:
        self.preemptions = 0
        self._peaks = (0, 0, 0.0)

    def see(self, scheduler: Any, iteration: Any) -> None:
        """Count a step from vLLM's ``SchedulerStats`` and ``IterationStats``, or ``None`` for those it lacks."""
        if scheduler is not None:
            waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            now = (scheduler.num_running_reqs, waiting, scheduler.kv_cache_usage)
            self._peaks = tuple(map(max, self._peaks, now))
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs

    def take(self) -> dict[str, float]:
        """Return the values by name, and start new peaks."""
        (running, waiting, use), self._peaks = self._peaks, (0, 0, 0.0)
        return {"running": running, "waiting": waiting, "kv_cache_use": use, "preemptions": self.preemptions}

    def watch(self) -> None:
        """Count all steps of the engines that this process serves."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        record = PrometheusStatLogger.record

        def seen(logger: Any, scheduler_stats: Any, iteration_stats: Any, *arguments: Any, **options: Any) -> None:
            self.see(scheduler_stats, iteration_stats)
            record(logger, scheduler_stats, iteration_stats, *arguments, **options)

        PrometheusStatLogger.record = seen


load = EngineLoad()


class RequestGate:
    """Middleware that passes on what :class:`Admission` admits, and calls of the worker's methods in :data:`REMOTE`.

    vLLM itself asks for no key on the routes that load weights.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app, self._admission = app, Admission()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # closed before it is accepted, so the answer is 403
        elif (refusal := self._admission.refusal(scope)) is not None:
            await _reject(send, *refusal)
        elif scope["path"] == LOAD:
            await _answer(send, 200, load.take())
        elif scope["path"] != RPC:
            await self._app(scope, receive, send)
        else:
            await self._call(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a call of a worker's method, and pass it on if the method may be called."""
        content, more = b"", True
        while more and len(content) <= MAX_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            content += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            asked = None if more or len(content) > MAX_BYTES else json.loads(content)
        except (ValueError, RecursionError):
            asked = None
        method = asked.get("method") if isinstance(asked, dict) else None
        if method not in REMOTE:
            await _reject(send, 403, f"method={str(method)[:80]!r}: only {', '.join(REMOTE)} can be called")
            return
        # The body is used up, so replay it to the server.
        read = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]

        async def again() -> MutableMapping[str, Any]:
            return read.pop() if read else await receive()

        await self._app(scope, again, send)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    """The values of a request's header ``name`` (in lower case)."""
    return [value for key, value in scope["headers"] if key.lower() == name]


async def _reject(send: Send, status: int, message: str) -> None:
    await _answer(send, status, {"error": {"message": message, "code": status}})


async def _answer(send: Send, status: int, said: Any) -> None:
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Run vLLM's API server in this process, with the arguments of the command line."""
    threading.Thread(target=end_with_starter, name="turnwise-starter", daemon=True).start()
    arguments = sys.argv[1:]
    if computes_on_cpu():
        # Without the first, vLLM compiles its sampler for 10 seconds; by the second, the engine's process starts no
        # further one for the model.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        given = {argument.partition("=")[0] for argument in arguments}
        arguments = [argument for argument in CPU_ARGUMENTS if argument.partition("=")[0] not in given] + arguments
    load.watch()
    sys.argv = [API_SERVER, *arguments]
    with shared_ports():
        runpy.run_module(API_SERVER, run_name="__main__", alter_sys=True)


@contextmanager
def shared_ports() -> Iterator[None]:
    """Let this process listen on the port that its starter keeps for it; a single vLLM server doesn't ask for that."""
    bind = socket.socket.bind

    def shared(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[1] and hasattr(socket, "SO_REUSEPORT"):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bind(self, address)

    setattr(socket.socket, "bind", shared)  # noqa: B010
    try:
        yield
    finally:
        setattr(socket.socket, "bind", bind)  # noqa: B010


def end_with_starter() -> None:
    """Kill this process's group once its standard input ends, or its starter, whose forks may keep the input open."""
    watched = [0]
    with suppress(ProcessLookupError):
        if STARTER in os.environ and hasattr(os, "pidfd_open"):
            watched = [0, os.pidfd_open(int(os.environ[STARTER]))]
        while select.select(watched, [], [])[0] == [0] and os.read(0, 4096):
            pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    from turnwise.inference.server import launch  # the module that vLLM imports too, with the same `load`

    launch.main()
