"""Other projects' gateways for ``bench_gateway.py``, each in a process of its own and at its own defaults.

    python bench/gateway_peers.py "verifiers train" 500 http://127.0.0.1:8000 folder/of/a/tokenizer

It opens the sessions and writes ``[[base URL, key], ...]``. Then it answers each line of standard input: ``cpu`` with
the processor seconds of this process so far, and ``streams`` with the token ids that the gateway recorded, as lists by
session and call (empty lists where it records none). It ends when standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

Streams = list[list[list[int]]]
"""Token ids (prompt and completion) by session and call."""


class Peer(NamedTuple):
    """A gateway: the module that it needs, the package that has it and how to install that, what it does in a call,
    and if it records token ids."""

    needs: str
    package: str
    install: str
    does: str
    records_ids: bool


VERIFIERS = ("verifiers.v1.interception", "verifiers", "`make test-verifiers` puts verifiers 0.4 into .venv-verifiers")
RLLM = ("rllm_model_gateway", "rllm-model-gateway", "pip install rllm-model-gateway")
PEERS = {
    "verifiers train": Peer(*VERIFIERS, "renders, tokenizes, records token ids", True),
    "verifiers eval": Peer(*VERIFIERS, "forwards, records messages", False),
    "rllm sqlite": Peer(*RLLM, "forwards, records the server's token ids in a file", True),
    "rllm memory": Peer(*RLLM, "forwards, records the server's token ids", True),
}


def missing(peer: Peer) -> str | None:
    """Return how to install ``peer``, or ``None`` if it is here."""
    try:
        found = importlib.util.find_spec(peer.needs)
    except ImportError:
        found = None
    return None if found else peer.install


def version(package: str) -> str | None:
    """Return the version of ``package``, and its commit if git installed it; ``None`` if it is not installed."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    commit = json.loads(found.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id", "")
    return f"{found.version} {commit[:8]}".strip()


def settled_cpu() -> float:
    """Return this process's processor seconds once it rests: what a gateway puts off until after its answer counts."""
    while True:
        before = time.process_time()
        time.sleep(0.5)
        if time.process_time() - before < 0.005:
            return before


def converse(models: list[tuple[str, str]], streams: Callable[[], Streams], out: Any) -> None:
    """Write the models, and answer the lines of standard input."""
    print(json.dumps(models), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(streams() if line.strip() == "streams" else settled_cpu()), file=out, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# verifiers: a pool of interception servers, with the client of evaluations or that of training
# ---------------------------------------------------------------------------------------------------------------------
async def verifiers(kind: str, sessions: int, url: str, tokenizer: str, out: Any) -> None:
    from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.interception import ElasticInterceptionPoolConfig, make_interception
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    where = {"base_url": f"{url}/v1", "api_key_var": "NONE"}
    client = TrainClientConfig(renderer_model_name=tokenizer, **where) if kind == "train" else EvalClientConfig(**where)
    context = ModelContext(model="tiny", client=client)
    traces = [
        Trace(task=TraceTask(type="Task", data=TaskData(prompt="x")), agent=AgentInfo(config=AgentConfig()))
        for _ in range(sessions)
    ]

    def streams() -> Streams:
        return [[_tokens_until(trace, call.node) for call in trace.calls] for trace in traces]

    pool = make_interception(ElasticInterceptionPoolConfig(), requires_tunnel=False)
    async with pool, contextlib.AsyncExitStack() as stack:
        slots = [await stack.enter_async_context(pool.acquire(RolloutSession(context, t))) for t in traces]
        await asyncio.to_thread(converse, [(f"{base}/v1", key) for base, key, _ in slots], streams, out)


def _tokens_until(trace: Any, node: int | None) -> list[int]:
    """Join the tokens of a trace's nodes from the root to ``node``."""
    parts = []
    while node is not None:
        parts.append(trace.nodes[node].token_ids)
        node = trace.nodes[node].parent
    return [token for part in reversed(parts) for token in part]


# ---------------------------------------------------------------------------------------------------------------------
# rLLM: a proxy in front of the server
# ---------------------------------------------------------------------------------------------------------------------
def rllm(store: str, sessions: int, url: str, out: Any) -> None:
    from rllm_model_gateway.client import GatewayClient
    from rllm_model_gateway.server import main

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def serve() -> None:
        _await_health(f"http://127.0.0.1:{port}/health")
        with GatewayClient(f"http://127.0.0.1:{port}") as client:
            opened = [client.create_session() for _ in range(sessions)]
            models = [(client.get_session_url(session), "none") for session in opened]

            def streams() -> Streams:
                found = [client.get_session_traces(session) for session in opened]
                return [[[*t.prompt_token_ids, *t.completion_token_ids] for t in traces] for traces in found]

            converse(models, streams, out)
        os._exit(0)  # main() serves until the process ends

    threading.Thread(target=serve, daemon=True).start()
    sys.argv = ["rllm-model-gateway", "--port", str(port), "--worker", f"{url}/v1", "--store", store]
    main()


def _await_health(url: str) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(url):
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} didn't answer within 60 s")


if __name__ == "__main__":
    method, sessions, url, tokenizer = sys.argv[1:]
    # Gateways log to standard output, so take it away from them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    project, kind = method.split()
    if project == "verifiers":
        asyncio.run(verifiers(kind, int(sessions), url, tokenizer, answers))
    else:
        rllm(kind, int(sessions), url, answers)
