"""Measures how a cost grows with the amount of work: an axis, its sizes, and the exponent of what they cost.

Each size runs in forked children, whose memory nothing else has used.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import time
import traceback
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from turnwise.utils.memory import frozen_heap

Counts = Mapping[str, float]
FITTED = 3
"""The largest sizes, through which an exponent is fitted: small ones are ruled by fixed costs."""
CPU, MEMORY = "CPU", "memory"


class Axis(NamedTuple):
    """One kind of work. ``prepare(size)`` returns the work itself, which may return counts of its own by name.

    ``bounds`` has the largest exponent of each measure: :data:`CPU` in seconds, :data:`MEMORY` as the peak of Python's
    allocations in bytes, or a count. ``most`` bounds values at the largest size instead.
    """

    name: str
    unit: str
    prepare: Callable[[int], Callable[[], Counts | None]]
    sizes: Sequence[int]
    small: Sequence[int]
    bounds: Counts
    most: Counts = MappingProxyType({})
    """Bounds of values; those of times are printed and fail nothing."""


def in_child(call: Callable[[], Any]) -> Any:
    """Return the value of ``call`` in a forked child. Raises ``RuntimeError`` if the child fails."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as stream:
                stream.write(pickle.dumps(call()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        told = stream.read()
    if status := os.waitpid(child, 0)[1]:
        raise RuntimeError(f"a child of the bench ended with status {status}: see its error above")
    return pickle.loads(told)


def _costs(axis: Axis, size: int, *, traced: bool) -> dict[str, float]:
    """Return what one run of ``size`` costs: its time and counts, or ``traced`` its memory, which takes longer."""
    work = axis.prepare(size)
    gc.collect()
    gc.freeze()
    if traced:
        tracemalloc.start()
        work()
        return {MEMORY: tracemalloc.get_traced_memory()[1]}
    began = time.process_time()
    counts = work()
    return {CPU: time.process_time() - began, **(counts or {})}


def measure(axis: Axis, sizes: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Return the least of each measure in ``rounds``, by size. Sizes take turns, as other programs may run.

    While a time alone grows faster than its bound, which a busy machine can do too, up to three times as many rounds
    run.
    """

    def every() -> dict[str, list[float]]:
        axis.prepare(sizes[0])()  # imports and caches count for no size
        gc.collect()
        gc.freeze()
        found: dict[str, list[float]] = {}
        for number in range(3 * rounds):
            for index, size in enumerate(sizes):
                for traced in (False,) if number or MEMORY not in axis.bounds else (False, True):
                    for name, cost in in_child(partial(_costs, axis, size, traced=traced)).items():
                        values = found.setdefault(name, [math.inf] * len(sizes))
                        values[index] = min(values[index], cost)
            missed = [name for name, bound in axis.bounds.items() if exponent(sizes, found[name]) > bound]
            if number + 1 >= rounds and missed != [CPU]:
                break
        return found

    with frozen_heap():  # a collection in a child would visit, and so copy, the whole heap of this process
        return in_child(every)  # type: ignore[no-any-return]


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return ``k`` of the fit ``value = c * size ** k`` to the :data:`FITTED` largest sizes; -inf for values of 0."""
    points = [(math.log(s), math.log(v)) for s, v in zip(sizes, values, strict=True) if v > 0][-FITTED:]
    if len(points) < 2:
        return -math.inf
    middle, height = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((x - middle) * (y - height) for x, y in points) / sum((x - middle) ** 2 for x, _ in points)
