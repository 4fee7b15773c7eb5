"""The arena's own time per model call, with a client that answers at once, beside `verifiers`.

It first verifies that both sides send the same chats and give the same rewards. "chat" has 2,000 concurrent episodes of
four turns; "lead" has 400 episodes with four nested chats each. Times are CPU time of all threads of the process per
model call, medians of interleaved rounds; the clients' answers are prepared in advance. "template" is turnwise with a
Hugging Face tokenizer's chat template instead of bytes, which is work that `verifiers` leaves to its server. "Credit
and batch" times credit (GRPO) and packing of 10,000 steps. "Memory" is that of this process before and after 100,000
episodes.

    python bench/bench_arena.py
    python bench/bench_arena.py --episodes 200000
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from arena_cases import ANSWER, CHILDREN, REPLY, TURNS, Ours, Verifiers, question
from common import arguments, finish, peer
from inference_cases import resident

from turnwise.tasks.tiny import build_tokenizer
from turnwise.utils.memory import frozen_heap

EPISODES, QUICK_EPISODES = 2000, 80
MAX_CALL_US, MAX_BATCH_MS, MAX_GROWTH = 150.0, 50.0, 2.0
OURS, THEIRS, TEMPLATE = "turnwise", "verifiers", "turnwise, template"
Rows = list[dict[str, Any]]
GOALS = ("workload", "goal", "figure", "wanted", "met")


def calls_of(workload: str, episodes: int) -> int:
    """Return the number of model calls in ``episodes`` top-level episodes."""
    return episodes * (TURNS if workload == "chat" else 1 + CHILDREN * TURNS)


def tops(workload: str, episodes: int) -> int:
    """Return the number of top-level episodes for ``episodes`` concurrent ones."""
    return episodes if workload == "chat" else episodes // (1 + CHILDREN)


def cpu_seconds(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    gc.collect()
    start = time.process_time()
    value = call(*arguments)
    return time.process_time() - start, value


def verify(methods: dict[str, Any], turns: int = TURNS, workloads: Sequence[str] = ("chat", "lead")) -> None:
    """Stop the bench unless all methods send the same number of the same chats and give equal rewards."""
    for workload in workloads:
        told = []
        for name, method in methods.items():
            counter = method.client if isinstance(method, Ours) else method
            counter.asked = Counter()
            rewards = method.rewards(method.play(workload, 6))
            calls = 6 * turns if workload == "chat" else calls_of(workload, 6)
            assert counter.asked.total() == calls, f"{name}: {counter.asked.total()} calls"
            told.append((counter.asked, rewards))
            counter.asked = None
        assert all(one == told[0] for one in told), f"{workload}: the methods did not play the same"


def per_call(methods: dict[str, Any], episodes: int, rounds: int) -> Rows:
    rows = []
    for workload in ("chat", "lead"):
        count = tops(workload, episodes)
        calls = calls_of(workload, count)
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(rounds):
            for name, method in methods.items():
                seconds[name].append(cpu_seconds(method.play, workload, count)[0])
        for name, times in seconds.items():
            own = statistics.median(times)
            rows.append(
                {
                    "workload": workload,
                    "method": name,
                    "episodes": count if workload == "chat" else count * (1 + CHILDREN),
                    "calls": calls,
                    "µs per call": 1e6 * own / calls,
                    "× turnwise": own / statistics.median(seconds[OURS]),
                }
            )
    return rows


def batch(name: str, ours: Ours, episodes: int, rounds: int) -> dict[str, Any]:
    """Time credit and packing of finished episodes. Rewards differ, so that no advantage is 0."""
    results = ours.play("chat", episodes)
    for number, result in enumerate(results):
        result.rollout.rewards["player"] = (number % 7) ** 1.5
    credit, pack, packed = [], [], None
    for _ in range(rounds):
        credit.append(cpu_seconds(ours.arena.assign_credit, results)[0])
        seconds, packed = cpu_seconds(ours.arena.build_training_batch, results)
        pack.append(seconds)
    assert packed is not None and len(packed) == calls_of("chat", episodes), "steps are missing in the batch"
    return {
        "method": name,
        "steps": len(packed),
        "tokens": len(packed.token_ids),
        "credit ms": 1e3 * statistics.median(credit),
        "batch ms": 1e3 * statistics.median(pack),
    }


def memory(ours: Ours, batch_of: int, episodes: int) -> Rows:
    """Measure the memory of the process after a warm-up, and after ``episodes`` more in batches that are dropped."""
    for _ in range(3):
        ours.play("chat", batch_of)
    gc.collect()
    before = resident()
    played = 0
    while played < episodes:
        ours.play("chat", batch_of)
        played += batch_of
    gc.collect()
    after = resident()
    known = before is not None and after is not None
    return [
        {
            "method": OURS,
            "episodes": played,
            "before MB": before / 1e6 if before else None,
            "after MB": after / 1e6 if after else None,
            "growth %": 100 * (after / before - 1) if known and before and after else None,
        }
    ]


def goals(speeds: Rows, batches: Rows, held: Rows) -> Rows:
    """Return one row per goal."""
    found: list[tuple[str, str, float, float]] = [
        (row["workload"], "µs per call", row["µs per call"], MAX_CALL_US) for row in speeds if row["method"] == OURS
    ]
    found += [
        (f"{row['steps']} steps, {row['tokens']} tokens", "batch ms", row["batch ms"], MAX_BATCH_MS) for row in batches
    ]
    if held[0]["growth %"] is not None:
        found += [(f"{held[0]['episodes']} episodes", "growth %", held[0]["growth %"], MAX_GROWTH)]
    return [
        {"method": OURS}
        | dict(zip(GOALS, (*goal[:3], f"≤ {goal[3]:g}", "yes" if goal[2] <= goal[3] else "NO"), strict=True))
        for goal in found
    ]


def methods(concurrency: int) -> dict[str, Any]:
    found: dict[str, Any] = {OURS: Ours(concurrency)}
    found[TEMPLATE] = Ours(concurrency, build_tokenizer([question(0), REPLY, ANSWER]))
    module = peer("verifiers.legacy")
    if module is not None and peer("verifiers.legacy.clients") is not None:
        found[THEIRS] = Verifiers(module)
    return found


def run(options: argparse.Namespace) -> None:
    episodes = QUICK_EPISODES if options.quick else EPISODES
    rounds = min(options.rounds, 2 if options.quick else 5)
    every = methods(episodes)
    verify(every)
    with frozen_heap():  # as training does
        speeds = per_call(every, episodes, rounds)
    finish("arena", f"The arena's own time, {episodes:,} concurrent episodes", speeds, options)
    steps = QUICK_EPISODES if options.quick else 2500
    with frozen_heap():
        batches = [batch(name, every[name], steps, 2 if options.quick else 9) for name in (OURS, TEMPLATE)]
    finish("arena", "Credit and batch", batches, options)
    held = memory(every[OURS], episodes, 4 * episodes if options.quick else options.episodes)
    finish("arena", "Memory", held, options)
    if not options.quick:
        finish("arena", "The arena: goals", goals(speeds, batches, held), options)


if __name__ == "__main__":
    run(arguments(__doc__, {"episodes": 100_000}))
