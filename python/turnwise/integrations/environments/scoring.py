"""Scores of answers by a dataset of reasoning-gym, in a separate process or in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

from turnwise.arena.rewards.invalid_action import READING_ERRORS
from turnwise.sandbox import SandboxLimits
from turnwise.sandbox.sandbox import find_filter

LIMITS = SandboxLimits(cpu_seconds=2, wall_seconds=30.0, memory_mb=512)
"""Limits of one answer; the memory is beyond what the process has at its start."""


class AnswerScorer(Protocol):
    """Scores the answers of one dataset."""

    def score(self, index: int, answer: str | None) -> tuple[float, str]:
        """Return the dataset's score of ``answer``, and the reason if it failed, else ``""``.

        A failed answer has the score of a missing one.
        """
        ...


class PlainScorer:
    """Scores in this process: an answer may run as Python here. For datasets that only compare texts."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def score(self, index: int, answer: str | None) -> tuple[float, str]:
        entry = self.dataset[index]
        try:
            return float(self.dataset.score_answer(answer, entry)), ""
        except READING_ERRORS as error:
            return float(self.dataset.score_answer(None, entry)), f"{type(error).__name__}: {error}"[:200]


class LockedScorer:
    """Scores in a worker process, each answer in a fork that may only compute. Only Linux has such forks.

    The worker starts on the first answer and ends with this object. Raises ``SandboxError`` on another system.

    Example: ``LockedScorer("countdown", {"seed": 0, "size": 100}).score(3, "1 + 2")``
    """

    def __init__(self, dataset: str, arguments: dict[str, Any], limits: SandboxLimits = LIMITS) -> None:
        allowed = find_filter(strict=True)
        assert allowed is not None, "strict"
        lock = {"limits": limits.rlimits(), "filter": allowed.hex(), "memory_bytes": limits.memory_mb * 2**20}
        self._job = {"dataset": dataset, "arguments": arguments, "lock": lock, "wall_seconds": limits.wall_seconds}
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def score(self, index: int, answer: str | None) -> tuple[float, str]:
        reply = self._ask(index, answer)
        if "score" in reply:
            return reply["score"], ""
        missing = self._ask(index, None)
        if "score" not in missing:
            raise RuntimeError(
                f"dataset {self._job['dataset']!r} can't score without files ({missing['failed']}): expected "
                "task_options.sandbox = false, if its answers are only compared"
            )
        return missing["score"], reply["failed"]

    def _ask(self, index: int, answer: str | None) -> dict[str, Any]:
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps({"index": index, "answer": answer}) + "\n")
            process.stdin.flush()
            return self._read(process)

    def _start(self) -> subprocess.Popen[str]:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"} | dict.fromkeys(names, "1")
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", str(Path(__file__).with_name("answer_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._job) + "\n")
        process.stdin.flush()
        self._read(process)
        self._process = process
        return process

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker that scores dataset {self._job['dataset']!r} ended; its error is above")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _end(process: subprocess.Popen[str]) -> None:
    """Close the worker's input, which ends it, and wait."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()
