"""Times writes at the front and inside of a list of 64,000 entries, and reads of the list after such writes."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from common import statements
from state_cases import Turnwise

Row = dict[str, Any]

ENTRIES = 64_000
WRITES = {  # of a held list: the first write after a fork
    "insert(0)": lambda items: items.insert(0, 7),
    "pop(0)": lambda items: items.pop(0),
    "del [0]": lambda items: items.__delitem__(0),
    "insert inside": lambda items: items.insert(ENTRIES // 2, 7),
    "pop inside": lambda items: items.pop(ENTRIES // 2),
    "append": lambda items: items.append(7),
    "set [0]": lambda items: items.__setitem__(0, 7),
}
READS = {
    "int list element": "items[32_768]",
    "int list, random elements": "for place in places: items[place]",
    "int list, all elements": "sum(items)",
}
HISTORIES = ("after insert(0)", "after 32,000 random writes")


def writes(rounds: int) -> list[Row]:
    """Return one row per write, with the time of the first one on a fork and the bytes that it un-shares.

    "plain" is the same write on a plain list, without the copy that a branch needs.
    """
    held = Turnwise().hold({"items": list(range(ENTRIES))})
    held.fork()
    rows = []
    for name, write in WRITES.items():
        child, model = held.fork(), list(range(ENTRIES))
        items = child.data["items"]
        before = held.store.stats().bytes
        write(items)
        unshared = held.store.stats().bytes - before
        write(model)
        assert list(items) == model, f"{name}: the list is wrong"
        assert list(held.data["items"]) == list(range(ENTRIES)), f"{name}: writing to a fork changed the state"
        samples: dict[str, list[float]] = {"turnwise": [], "plain": []}
        for _ in range(max(rounds, 5)):
            forks = [held.fork() for _ in range(64)]
            for method, targets in (("turnwise", [fork.data["items"] for fork in forks]), ("plain", [model] * 64)):
                start = time.perf_counter()
                for target in targets:
                    write(target)
                samples[method].append((time.perf_counter() - start) / len(targets))
            model = list(range(ENTRIES))
        seconds = {method: statistics.median(taken) for method, taken in samples.items()}
        rows.append({"write": name, "method": "turnwise", "µs": seconds["turnwise"] * 1e6, "bytes un-shared": unshared})
        rows.append({"write": name, "method": "plain", "µs": seconds["plain"] * 1e6})
    return rows


def written(items: Any, history: str) -> Any:
    """Write to a list, which keeps its length: once at the front, or at many random places."""
    if history == HISTORIES[0]:
        items.insert(0, 7)
        items.pop()
        return items
    rng = random.Random(0)
    for _ in range(16_000):
        items.insert(rng.randrange(len(items)), 7)
        del items[rng.randrange(len(items))]
    return items


def reads(rounds: int) -> list[Row]:
    """Time reads of a fork's list after writes at the front or inside, beside a plain list with the same writes."""
    places = [random.Random(1).randrange(ENTRIES) for _ in range(256)]
    cases = {}
    for history in HISTORIES:
        plain = written(list(range(ENTRIES)), history)
        ours = written(Turnwise().hold({"items": list(range(ENTRIES))}).fork().data["items"], history)
        assert list(ours) == plain, f"{history}: the list is wrong"
        for method, items in (("plain", plain), ("turnwise", ours)):
            for read, source in READS.items():
                cases[f"{read}, {history}/{method}"] = (source, {"items": items, "places": places})
    seconds = statements(cases, rounds, seconds=0.4)
    rows = []
    for case in cases:
        read, method = case.split("/")
        ratio = seconds[case] / seconds[f"{read}/plain"]
        rows.append({"read": read, "method": method, "ns": seconds[case] * 1e9, "× plain": ratio})
    return rows
