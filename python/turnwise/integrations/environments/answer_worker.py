"""Scores answers in its own process: reasoning-gym evaluates some of them as Python.

``scoring.py`` starts this file as a script and writes one JSON line per request. Each answer is scored in a fork that
may only compute, within the limits of :mod:`turnwise.sandbox.sandbox`. A fork that breaks a limit dies alone.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import select
import signal
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise.sandbox.child import lock_in

MAX_BYTES = 4096
"""Length of a fork's reply."""


def main() -> None:
    """Read the job, report readiness, and answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a dataset prints never mixes with the scores
    job = json.loads(sys.stdin.readline())
    dataset = importlib.import_module("reasoning_gym").create_dataset(job["dataset"], **job["arguments"])
    entry_of = lru_cache(maxsize=1024)(dataset.__getitem__)
    # A locked fork can open no file, so modules that scoring imports late are imported here, by a known answer.
    first = entry_of(0)
    dataset.score_answer(first["answer"], first)
    answers.write('{"ready": true}\n')
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        reply = score_locked(dataset, entry_of(request["index"]), request["answer"], job)
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def score_locked(dataset: Any, entry: dict[str, Any], answer: str | None, job: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"score": 0.05}``, or ``{"failed": "killed by SIGXCPU"}`` for an answer that breaks a limit."""
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        _score_and_exit(dataset, entry, answer, {**job["lock"], "parent": parent}, writing)
    os.close(writing)
    said, deadline = b"", time.monotonic() + job["wall_seconds"]
    while len(said) < MAX_BYTES:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(reading, MAX_BYTES) if ready else b""
        said += chunk
        if not chunk:
            break
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return _reply(said, status)


def _reply(said: bytes, status: int) -> dict[str, Any]:
    """Read a fork's reply, which a hostile answer may have written."""
    try:
        reply = json.loads(said)
        if isinstance(reply, dict) and isinstance(reply.get("failed"), str):
            return {"failed": reply["failed"]}
        score = float(reply["score"])
    except (ValueError, TypeError, LookupError, RecursionError):
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return {"failed": f"killed by {signal.Signals(number).name}" if number else "ended without a score"}
    return {"score": score} if math.isfinite(score) else {"failed": f"score {score}"}


def _score_and_exit(dataset: Any, entry: dict[str, Any], answer: str | None, lock: Any, writing: int) -> None:
    """Give up all rights, score, write the reply and end. Never returns."""
    try:
        os.dup2(2, 0)
        # The fork already has the modules of the worker, so its memory limit counts from what it has.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + lock["memory_bytes"]
        limits = {**lock["limits"], "RLIMIT_AS": (limit, limit)}
        allowed = bytes.fromhex(lock["filter"])
        lock_in({"limits": limits, "filter": allowed, "parent": lock["parent"]})
        reply: dict[str, Any] = {"score": float(dataset.score_answer(answer, entry))}
    except BaseException as error:
        reply = {"failed": f"{type(error).__name__}: {error}"[:200]}
    os.write(writing, json.dumps(reply).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
