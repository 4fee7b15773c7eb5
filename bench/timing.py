"""Measures interleaved medians on CPU and GPU, the machine's own copy and read, and peak memory."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, as a long training process does. Otherwise large temporaries go back to the kernel
    and return page by page; this slows eager methods most, and varies from run to run."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: all from the heap, for what is mapped by itself is given back when freed
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks, however large the logits
    except (OSError, AttributeError):  # another C library: as it comes
        pass


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel, so that a process's size is the memory that it uses."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


# Bytes that no cache holds between two calls: a GPU's L2 has tens of MB, and so has a server CPU's L3.
WORKING_SET = {"cpu": 192 << 20, "cuda": 512 << 20}
Call = Callable[[], Any]


def sets_needed(bytes_per_set: int, device: str) -> int:
    """Return the number of input sets to rotate through, so that each is read from memory and not from a cache."""
    return max(1, min(64, -(-WORKING_SET[device] // max(bytes_per_set, 1))))


def medians(
    calls: Mapping[str, Call], rounds: int, seconds_per_round: float = 0.01, device: str = "cpu"
) -> dict[str, float]:
    """Return median seconds per call. Calls take turns, so that a busy minute affects all of them equally.

    On a GPU the seconds are the device's, between events. Launches are queued behind a pause of about 2 ms, so that
    Python's own time doesn't count.
    """
    time_of = _seconds_on_gpu if device == "cuda" else _seconds_on_cpu
    repeats = {}
    for name, call in calls.items():
        call()
        call()
        repeats[name] = max(1, min(1000, int(seconds_per_round / max(time_of(call, 1), 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(time_of(call, repeats[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def statements(
    cases: Mapping[str, tuple[str, dict[str, Any]]], rounds: int, seconds: float = 1.0, seconds_per_round: float = 0.005
) -> dict[str, float]:
    """Return median seconds per run of each statement, given as its source and the names in it.

    This suits statements of nanoseconds, which a call would dominate. Statements take turns; times include the loop,
    and garbage collection is on. Slow statements skip rounds, so that each takes about ``seconds`` in total, but runs
    in at least three rounds.
    """
    timers, repeats, turns = {}, {}, {}
    for name, (source, names) in cases.items():
        timer = timers[name] = timeit.Timer(source, "gc.enable()", globals={**names, "gc": gc})
        once = timer.timeit(1)
        once = timer.timeit(100) / 100 if once < 1e-4 else once if once > 0.1 else timer.timeit(1)
        repeats[name] = max(1, int(seconds_per_round / once))
        turns[name] = max(min(3, rounds), min(rounds, int(seconds / (once * repeats[name]))))
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds):
        for name, timer in timers.items():
            if (turn + 1) * turns[name] // rounds > turn * turns[name] // rounds:
                samples[name].append(timer.timeit(repeats[name]) / repeats[name])
    return {name: statistics.median(times) for name, times in samples.items()}


def _seconds_on_cpu(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _seconds_on_gpu(call: Call, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    repeats = min(repeats, 20)  # the queue of launches is bounded: more would wait for the pause to end
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # cycles, about 2 ms
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


class RotatingCopy:
    """Copies ``bytes_moved`` (read and written together) between buffers that rotate through memory, as the op's inputs
    do, so that no buffer stays in a cache. Buffers hold ones, because the kernel maps unwritten pages of zeros to one
    page, which stays in the cache."""

    def __init__(self, bytes_moved: int, device: str = "cpu") -> None:
        count = max(bytes_moved // 8, 1)
        self.pairs = [
            (torch.ones(count, device=device), torch.ones(count, device=device))
            for _ in range(sets_needed(bytes_moved, device))
        ]
        self.turn = 0

    def __call__(self) -> None:
        source, target = self.pairs[self.turn % len(self.pairs)]
        self.turn += 1
        target.copy_(source)


class RotatingRead:
    """Reads ``bytes_read`` float32 in one of the two fastest ways that PyTorch has, row sums or a dot product."""

    def __init__(self, bytes_read: int, device: str = "cpu", way: str = "rows") -> None:
        rows = max(bytes_read // (4 * 4096), 1)
        count = sets_needed(bytes_read, device)
        self.buffers = [torch.ones(rows, min(4096, max(bytes_read // 4, 1)), device=device) for _ in range(count)]
        self.way = way
        self.turn = 0

    def __call__(self) -> None:
        source = self.buffers[self.turn % len(self.buffers)]
        self.turn += 1
        if self.way == "rows":
            source.sum(1)
        else:
            flat = source.view(-1)
            torch.dot(flat, flat)


def peak_memory(call: Call, device: str = "cpu") -> int | None:
    """Return the peak of a call in bytes above the memory before it; for the second call, as the first may set up data.

    On a CPU this is the process's resident memory, whose peak only Linux can reset; ``None`` on other systems.
    """
    call()
    return first_peak(call, device)


def first_peak(call: Call, device: str = "cpu") -> int | None:
    """Measure as ``peak_memory`` does, but for the first call, with its setup."""
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not sys.platform.startswith("linux"):
        return None
    give_back_freed_memory()  # it would hide what the call needs
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    except OSError:  # not allowed in this container
        return None
    before = _resident("VmRSS")
    call()
    return max(_resident("VmHWM") - before, 0)


def process_peak() -> int | None:
    """Return the peak of this process's resident memory in bytes since its start; ``None`` without ``/proc``."""
    return _resident("VmHWM") if sys.platform.startswith("linux") else None


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
