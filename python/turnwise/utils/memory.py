"""Memory of a process: its limit, the errors that mean it is used up, and the objects garbage collection visits."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_frozen = False  # within frozen_heap(); gc.get_freeze_count() says it too, but takes 0.1 s for a million objects
_MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "not enough memory")


def memory_capacity() -> float:
    """Return the most bytes that this process can have: all memory, or the limit of its container or of ``ulimit``.

    The use of other processes does not count, so the number is the same at every start.
    """
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for path in _CGROUPS:
        with suppress(OSError, ValueError):  # "max" is no number
            limits.append(float(Path(path).read_text(encoding="ascii")))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(float(soft))
    return min(limits)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of an allocator: Python's, C++'s, or torch's on a CPU or GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exempt all objects that exist now from garbage collection, until the block ends.

    Imported libraries hold some 400,000 objects. Each full collection visits all of them, and a step allocates enough
    to cause about one. Objects that the block makes are collected as usual. Inside another such block it does nothing.
    """
    global _frozen
    if _frozen or gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    _frozen = True
    try:
        yield
    finally:
        _frozen = False
        gc.unfreeze()


# What glibc's mallopt takes (malloc.h), and its defaults once a process has freed large blocks.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULTS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_MAX: 65536}
_KEEPING = {_TRIM_THRESHOLD: -1, _MMAP_MAX: 0}  # give nothing back, and map no block on its own
_keepers = 0
_keeping = threading.Lock()


@cache
def _glibc() -> Any:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None


@contextmanager
def kept_memory(owners: Iterable[Any]) -> Iterator[None]:
    """Let the process keep the memory that it frees, until the block ends, if some weights are not on a GPU.

    ``owners`` are models of torch, or policies with a ``model``; others count for nothing.

    By default glibc maps each block beyond 32 MiB on its own, and gives it back when it is free. Each page of a next
    one then costs a page fault, and the kernel's time to clear it.
    """
    global _keepers
    models = (getattr(owner, "model", owner) for owner in owners)
    weights = (weight for model in models for weight in getattr(model, "parameters", tuple)())
    libc = _glibc() if any(not weight.is_cuda for weight in weights) else None
    if libc is None:
        yield
        return
    with _keeping:
        _keepers += 1
        for option, value in _KEEPING.items() if _keepers == 1 else ():
            libc.mallopt(option, value)
    try:
        yield
    finally:
        with _keeping:
            _keepers -= 1
            if not _keepers:
                for option, value in _DEFAULTS.items():
                    libc.mallopt(option, value)
                libc.malloc_trim(0)
