"""A publish of weights to 1, 2, 4 and 8 receivers: one after the other, against one broadcast to all.

Each receiver is a process. It opens the handle, which checks the sums of what arrived, and answers. A publish ends with
the last answer. Both ways take turns in the same run, each with receivers of its own that keep their connections. The
bench first verifies that every receiver has exactly what was sent.

"MB from the sender" is the formula: one after the other, the sender sends the weights once per receiver; gloo's
broadcast is a binomial tree, in which it sends them once per bit of the number of receivers. "MB on lo" is what Linux
counted on the loopback device, in the quietest round. Other programs that use it add to it. Seconds of receivers that
share the cores of one machine say little about a network: there the sender's bytes count.

    python bench/bench_publish.py
    python bench/bench_publish.py --mib 256 --receivers 8
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import arguments, finish

from turnwise.inference.weights.publish import CollectiveTransfer
from turnwise.inference.weights.sync import open_weights

LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
COUNTS = (1, 2, 4, 8)
IN_TURN, TOGETHER = "one after the other", "turnwise: one broadcast"
SECONDS = 120.0
"""In which a receiver must answer."""


def receive(line: Connection) -> None:
    """Open each handle that comes, and answer with the sum of its weights."""
    torch.set_num_threads(1)
    while (handle := line.recv()) is not None:
        with open_weights(handle) as weights:
            line.send(float(weights["last"].double().sum()))


def start(count: int) -> list[Connection]:
    """Fork receivers, which share this process's torch."""
    processes = multiprocessing.get_context("fork")
    lines = []
    for _ in range(count):
        ours, theirs = processes.Pipe()
        processes.Process(target=receive, args=(theirs,), daemon=True).start()
        lines.append(ours)
    return lines


def answer(line: Connection, expected: float) -> None:
    if not line.poll(SECONDS):
        raise SystemExit(f"a receiver said nothing for {SECONDS:g} s")
    found = line.recv()
    assert found == expected, f"a receiver has weights of sum {found}: expected {expected}"


def publish(method: str, lines: Sequence[Connection], handle: Any, expected: float) -> float:
    """Return the seconds until all receivers have the weights of ``handle``."""
    began = time.perf_counter()
    for line in lines:
        line.send(handle)
        if method == IN_TURN:
            answer(line, expected)
    for line in lines if method == TOGETHER else ():
        answer(line, expected)
    return time.perf_counter() - began


def on_loopback() -> int:
    return int(LOOPBACK.read_text()) if LOOPBACK.exists() else 0


def main() -> None:
    options = arguments(__doc__, {"mib": 64}, receivers=COUNTS)
    receivers, rounds = (COUNTS[:2], 2) if options.quick else (options.receivers, min(options.rounds, 9))
    size = 2**20 * (1 if options.quick else options.mib)
    sets = {(method, count): start(count) for count in receivers for method in (IN_TURN, TOGETHER)}
    # With gather=0 no receiver waits for another. So each that asks alone is served alone.
    transfers = {key: CollectiveTransfer("gloo", gather=0.0 if key[0] == IN_TURN else 30.0) for key in sets}
    seconds: dict[Any, list[float]] = {key: [] for key in sets}
    moved: dict[Any, list[int]] = {key: [] for key in sets}
    weights = {"first": torch.zeros(size // 8), "last": torch.zeros(size // 8)}
    for number in range(1, rounds + 2):
        for key, lines in sets.items():
            weights["last"].fill_(number)
            transfers[key].expect(len(lines))
            handle, expected = transfers[key].send(weights), float(number) * (size // 8)
            before = on_loopback()
            took = publish(key[0], lines, handle, expected)
            if number > 1:  # the first connects
                seconds[key].append(took)
                moved[key].append(on_loopback() - before)
    rows = []
    for (method, count), found in seconds.items():
        stats = transfers[method, count].stats()
        together = method == TOGETHER and count > 1
        assert stats["in_groups" if together else "alone"] >= rounds * count, stats
        median = statistics.median(found)
        sends = count.bit_length() if method == TOGETHER else count
        rows.append(
            {
                "receivers": count,
                "method": method,
                "MB": size / 1e6,
                "s": median,
                "× in turn": statistics.median(seconds[IN_TURN, count]) / median,
                "MB from the sender": sends * size / 1e6,
                "MB on lo": min(moved[method, count]) / 1e6,
            }
        )
    for key, lines in sets.items():
        for line in lines:
            line.send(None)
        transfers[key].close()
    finish("publish", f"A publish of {size / 1e6:.0f} MB over gloo, {rounds} rounds", rows, options)


if __name__ == "__main__":
    main()
