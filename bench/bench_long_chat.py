"""Long chats: CPU time and memory of 256 episodes of 32 turns of 1,000 tokens, beside `verifiers`, and how both grow.

In each turn the model says 480 tokens (bytes) and the environment answers 500. Both sides have clients that answer at
once and record all token ids, those of prompts too: turnwise renders and tokenizes them, `verifiers` gets them from its
server. The bench first verifies that both send the same chats and give the same rewards. Each number is of a process of
its own: CPU time until all episodes are done, and the peak of resident memory above that before. "exponent" is the
``k`` of ``cost = c * turns ** k`` between the last two numbers of turns.

    python bench/bench_long_chat.py
    python bench/bench_long_chat.py --episodes 32
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from typing import Any

from arena_cases import Ours, Talk, Verifiers
from bench_arena import OURS, THEIRS, verify
from common import arguments, finish, peer
from growth import in_child
from timing import first_peak

from turnwise.utils.memory import frozen_heap

EPISODES, QUICK_EPISODES = 256, 4
TURNS, QUICK_TURNS = (8, 16, 32), (2, 4)


def talk(turns: int) -> Talk:
    return Talk(turns, "x" * 480, "y" * 500, tokens=600)


def sides(turns: int, episodes: int) -> dict[str, Any]:
    """Return the methods. Both keep all results until the last episode is done."""
    found: dict[str, Any] = {OURS: Ours(episodes, talk=talk(turns))}
    module = peer("verifiers.legacy")
    if module is not None and peer("verifiers.legacy.clients") is not None:
        found[THEIRS] = Verifiers(module, talk(turns))
    return found


def cost(method: str, turns: int, episodes: int) -> tuple[float, int | None]:
    """Return the CPU seconds and the peak of memory in bytes, after a few episodes that warm caches up."""
    sides(2, 2)[method].play("chat", 2)
    played = sides(turns, episodes)[method]
    began = time.process_time()
    peak = first_peak(lambda: played.play("chat", episodes))
    return time.process_time() - began, peak


def run(options: argparse.Namespace) -> None:
    episodes = QUICK_EPISODES if options.quick else options.episodes
    every = QUICK_TURNS if options.quick else TURNS
    methods = list(sides(2, 2))
    in_child(lambda: verify(sides(every[0], 6), every[0], ["chat"]))
    rows: list[dict[str, Any]] = []
    before: dict[str, tuple[float, float]] = {}
    for turns in every:
        for method in methods:
            with frozen_heap():
                seconds, peak = in_child(partial(cost, method, turns, episodes))
            costs = seconds, peak or math.nan
            grown = [math.log2(now / then) for now, then in zip(costs, before.get(method, costs), strict=True)]
            before[method] = costs
            last = turns == every[-1]
            rows.append(
                {
                    "method": method,
                    "episodes": episodes,
                    "turns": turns,
                    "CPU s": seconds,
                    "CPU ms per call": 1e3 * seconds / episodes / turns,
                    "exponent": grown[0] if last else None,
                    "memory MB": costs[1] / 1e6,
                    "its exponent": grown[1] if last else None,
                }
            )
    finish("long_chat", f"Long chats, {episodes} episodes at once", rows, options)


if __name__ == "__main__":
    run(arguments(__doc__, {"episodes": EPISODES}))
