"""Receivers of weights in processes of their own, as many as a test wants: ``python receiving.py`` imports torch once,
and forks one for each address that comes in on its standard input.

A receiver connects to that address. It gets commands, and answers each: what it opened, or the error.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

SECONDS = 20.0
"""In which a receiver must answer."""


class Receivers:
    """Receivers by number, and their process ids."""

    def __init__(self, python: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-test-")
        self._path = str(Path(self._folder.name) / "s")
        self._key = secrets.token_bytes(16)
        self._listener = Listener(self._path, "AF_UNIX", authkey=None)
        self._zygote = subprocess.Popen(
            [python, "-P", __file__],
            stdin=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.lines: list[Connection] = []
        self.pids: list[int] = []

    def start(self, count: int, environment: dict[str, str] | None = None) -> list[int]:
        """Start receivers, and return their numbers."""
        assert self._zygote.stdin is not None
        first = len(self.lines)
        for _ in range(count):
            self._zygote.stdin.write(self._path + "\n")
        self._zygote.stdin.flush()
        for _ in range(count):
            self.lines.append(self._listener.accept())
            self.pids.append(self.lines[-1].recv())
        numbers = list(range(first, first + count))
        if environment is not None:
            for number in numbers:
                self.do(number, "environment", environment)
        return numbers

    def do(self, number: int, *command: Any) -> Any:
        self.lines[number].send(command)
        return self.answer(number)

    def ask(self, numbers: Sequence[int], handle: Any) -> None:
        """Let receivers open a handle at the same time. They answer later."""
        for number in numbers:
            self.lines[number].send(("open", handle))

    def answer(self, number: int) -> Any:
        if not self.lines[number].poll(SECONDS):
            self.kill([number], signal.SIGUSR1)  # it prints where it is
            time.sleep(0.2)
            raise AssertionError(f"receiver {number} said nothing for {SECONDS:g} s")
        return self.lines[number].recv()

    def open(self, numbers: Sequence[int], handle: Any) -> list[Any]:
        self.ask(numbers, handle)
        return [self.answer(number) for number in numbers]

    def kill(self, numbers: Sequence[int], how: signal.Signals = signal.SIGKILL) -> None:
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(self.pids[number], how)

    def forget(self) -> None:
        """Kill all."""
        self.kill(range(len(self.pids)))
        for line in self.lines:
            line.close()
        self.lines, self.pids = [], []

    def close(self) -> None:
        self.forget()
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait()
        self._listener.close()
        self._folder.cleanup()


def described(weights: Any) -> dict[str, Any]:
    """Dtype, shape and a digest of the bytes of each tensor, and the first name of those that share its memory."""
    from turnwise.inference.weights.weight_block import storage_key

    first: dict[Any, str] = {}
    found = {}
    for name, tensor in sorted(weights.items()):
        content = tensor.detach().contiguous().view(-1).view(dtype=__import__("torch").uint8).numpy().tobytes()
        tied = first.setdefault(storage_key(tensor), name)
        found[name] = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(content).hexdigest(), tied)
    return found


def arrived(handle: Any) -> dict[str, Any]:
    """Describe the weights that ``handle`` refers to."""
    from turnwise.inference.weights.sync import open_weights

    with open_weights(handle) as weights:
        return described(weights)


# -- in a receiver's process -------------------------------------------------------------------------------------------
def opened(handle: Any) -> Any:
    try:
        return arrived(handle)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def end_at(stage: str, how: int) -> None:
    """Send this process the signal ``how`` when it comes to ``stage`` for the first time."""
    from turnwise.inference.weights import group, receive

    def die() -> None:
        os.kill(os.getpid(), how)

    ours, read = group.BroadcastGroup, receive.Receiver._read_block
    rehearse, broadcast = ours.rehearse, ours.broadcast
    met: list[int] = []

    def rehearsing(self: Any, *arguments: Any) -> Any:
        if stage == "before":
            die()
        found = rehearse(self, *arguments)
        if stage == "rehearsed":
            die()
        return found

    def broadcasting(self: Any, buckets: Any, check: Any, each: Any = int) -> None:
        met.append(1)
        if stage == "between" and len(met) > 1:  # the first is the rehearsal
            broadcast(self, buckets[:1], check)
            die()
            buckets = buckets[1:]
        broadcast(self, buckets, check, each)

    def reading(self: Any, size: int) -> Any:
        if stage == "alone":
            die()
        return read(self, size)

    ours.rehearse, ours.broadcast = rehearsing, broadcasting  # type: ignore[method-assign]
    receive.Receiver._read_block = reading  # type: ignore[method-assign]


def flip_next() -> None:
    """Let one bit of the next weights be another."""
    from turnwise.inference.weights import receive

    plain = receive.Receiver.receive

    def flipped(self: Any, size: int, sequence: int) -> Any:
        block = plain(self, size, sequence)
        block[-64] ^= 4
        receive.Receiver.receive = plain  # type: ignore[method-assign]
        return block

    receive.Receiver.receive = flipped  # type: ignore[method-assign]


def mishear() -> None:
    """Hear another number in every rehearsal than the one that was broadcast."""
    from turnwise.inference.weights import group

    plain = group.BroadcastGroup.rehearse
    group.BroadcastGroup.rehearse = lambda self, number, check: plain(self, number, check)[::-1]  # type: ignore[method-assign]


def pretend_gpu() -> None:
    """Take weights of an nccl handle on the CPU, where gloo moves them."""
    import torch

    from turnwise.inference.weights import receive

    receive.device_of = lambda kind: torch.device("cpu")


def obey(path: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    line = Client(path, "AF_UNIX")
    line.send(os.getpid())
    commands = {"open": opened, "end_at": end_at, "flip": flip_next, "mishear": mishear, "pretend_gpu": pretend_gpu}
    while True:
        try:
            command, *arguments = line.recv()
        except (EOFError, OSError):
            os._exit(0)
        if command == "environment":
            os.environ.update(arguments[0])
            line.send(None)
            continue
        line.send(commands[command](*arguments))


def main() -> None:
    import torch

    import turnwise.inference.weights.sync  # noqa: F401 - before the forks, which then share its memory

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for path in sys.stdin:
        if not os.fork():
            os.close(0)
            try:
                obey(path.strip())
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
