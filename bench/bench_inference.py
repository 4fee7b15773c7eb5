"""Sampling: our clients beside plain `generate`, over the same requests and as many tokens for each.

It verifies that the log-probabilities of each method are those of a forward pass with the same weights, before the
timed rounds, and again after the last weight sync. "flat" is 256 × 64 tokens from short prompts; "tree" is 4 trees of 4
turns, at each of which 8 siblings answer a prompt of at least 512 tokens with 16 tokens. All methods take turns, round
by round, with new prompts in each round. "first token" is the time of one request for one token after 512 new ones,
without other load; "sync" is the time to send all weights. "memory" is that of this process and its descendants, before
the counted syncs and after.

    python bench/bench_inference.py
    python bench/bench_inference.py --model tiny --client vllm --syncs 600
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import torch
from common import arguments, finish
from inference_cases import (
    PLAIN,
    QUICK,
    SIZE,
    WORKLOADS,
    Size,
    Turns,
    first_token,
    make,
    methods,
    moved,
    resident,
    teacher_forced,
)

from turnwise.run.clients import KINDS

MODELS = ("tiny", "small", "1b")
# In nats. In float32 and with 50,000 words `generate` itself was 1.05e-5 from one forward pass.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.1}
CACHED, UNCACHED = "turnwise vllm", "turnwise vllm, no prefix cache"
MAX_SYNC_MS, MAX_GROWTH, LEAST_TREE = 75.0, 2.0, 2.0
SETTLING_SYNCS = 20  # the first grow buffers once


async def answers(method: Any, turns: Turns) -> list[Any]:
    return [response for requests in turns for response in await method.generate(requests)]


async def verify(every: dict[str, Any], model: Any, size: Size, seed: int) -> None:
    """Stop the bench unless each method returns ``model``'s log-probabilities for as many tokens as requested."""
    for name, method in every.items():
        for workload in WORKLOADS.values():
            turns = workload(size, seed)
            responses = await answers(method, turns)
            wanted = [request.sampling.max_tokens for requests in turns for request in requests]
            assert [len(r.completion_token_ids) for r in responses] == wanted, f"{name}: other numbers of tokens"
            for response in responses[:: max(1, len(responses) // 4)]:
                off = float((teacher_forced(model, response) - torch.tensor(response.logprobs)).abs().max())
                assert off < TOLERANCE[model.dtype], f"{name}: log-probabilities are off by {off:.3g}"


async def throughput(every: dict[str, Any], size: Size, rounds: int, model: str) -> list[dict[str, Any]]:
    """Measure the tokens per second of each method on each workload, medians of rounds in turns."""
    rows = []
    for workload, build in WORKLOADS.items():
        seconds: dict[str, list[float]] = {name: [] for name in every}
        before = {name: stats(method) for name, method in every.items()}
        tokens = 0
        for turn in range(rounds):
            turns = build(size, 1000 + turn)
            tokens = sum(request.sampling.max_tokens for requests in turns for request in requests)
            for name, method in every.items():
                start = time.perf_counter()
                await answers(method, turns)
                seconds[name].append(time.perf_counter() - start)
        for name, method in every.items():
            grown = {key: value - before[name][key] for key, value in stats(method).items()}
            rate = tokens / statistics.median(seconds[name])
            rows.append(
                {
                    "model": model,
                    "workload": workload,
                    "tokens": tokens,
                    "method": name,
                    "tokens/s": rate,
                    "× generate": statistics.median(seconds[PLAIN]) / statistics.median(seconds[name]),
                    "prompt cached": grown["cached_tokens"] / grown["prompt_tokens"] if grown else None,
                }
            )
    return rows


def stats(method: Any) -> dict[str, float]:
    told = getattr(method, "stats", dict)()
    return {key: told[key] for key in ("cached_tokens", "prompt_tokens") if key in told}


async def latency(
    every: dict[str, Any], size: Size, rounds: int, syncs: int, weights: list[Any], model: str
) -> list[dict[str, Any]]:
    """Measure the time to the first token, then the time of weight syncs and the memory before and after them. A few
    tokens are sampled after each sync, as in a run."""
    firsts: dict[str, list[float]] = {name: [] for name in every}
    for turn in range(rounds):
        for name, method in every.items():
            start = time.perf_counter()
            await answers(method, first_token(size, 2000 + turn))
            firsts[name].append(time.perf_counter() - start)
    rows = []
    for name, method in every.items():
        times, held = await sync(method, size, syncs, weights)
        rows.append(
            {
                "model": model,
                "method": name,
                "first token ms": 1e3 * statistics.median(firsts[name]),
                "sync ms": 1e3 * statistics.median(times),
                "sync p95 ms": 1e3 * sorted(times)[int(0.95 * len(times))],
                "syncs": syncs,
                "memory before MB": held[0] / 1e6 if held else None,
                "memory after MB": held[1] / 1e6 if held else None,
                "growth %": 100 * (held[1] / held[0] - 1) if held else None,
            }
        )
    return rows


async def sync(method: Any, size: Size, syncs: int, weights: list[Any]) -> tuple[list[float], tuple[int, int] | None]:
    """Return the seconds of each of ``syncs`` syncs, and the memory before and after. The last sync sends the model's
    own weights."""
    times: list[float] = []
    before: int | None = None
    settling = SETTLING_SYNCS + SETTLING_SYNCS % len(weights)
    for number in range(settling + syncs + syncs % len(weights)):
        if number == settling:
            before, times = resident(), []
        start = time.perf_counter()
        method.load_weights("default", weights[number % len(weights)].items(), number + 1)
        times.append(time.perf_counter() - start)
        await answers(method, first_token(size, 10_000 + number))
    after = resident()
    return times, None if before is None or after is None else (before, after)


def goals(speeds: list[dict[str, Any]], rows: list[dict[str, Any]], syncs: int) -> list[dict[str, Any]]:
    """Return one row per goal."""
    found: list[tuple[str, str, str, float, str, bool]] = []
    rate = {(row["model"], row["method"]): row["tokens/s"] for row in speeds if row["workload"] == "tree"}
    for (model, method), value in rate.items():
        if method == CACHED and (model, UNCACHED) in rate:
            ratio = value / rate[model, UNCACHED]
            wanted = f"≥ {LEAST_TREE}"
            found.append((model, method, "tree, × no prefix cache", ratio, wanted, ratio >= LEAST_TREE))
    for row in rows:
        model, method = row["model"], row["method"]
        if method == CACHED and model == "tiny":
            took = row["sync ms"]
            found.append((model, method, "sync ms", took, f"≤ {MAX_SYNC_MS}", took <= MAX_SYNC_MS))
        if method.startswith(CACHED) and syncs >= 100 and row["growth %"] is not None:
            grown = row["growth %"]
            wanted = f"≤ {MAX_GROWTH}"
            found.append((model, method, f"growth % over {syncs} syncs", grown, wanted, grown <= MAX_GROWTH))
    names = ("model", "method", "goal", "figure", "wanted", "met")
    return [dict(zip(names, (*goal[:5], "yes" if goal[5] else "NO"), strict=True)) for goal in found]


async def measure(name: str, options: argparse.Namespace) -> None:
    size = QUICK if options.quick else SIZE
    rounds, syncs = min(options.rounds, 2 if options.quick else 5), 4 if options.quick else options.syncs
    model = make(name, options.device)
    weights = moved(model)
    every = methods(model, options.client, kv_cache_gb=4.0 if options.device == "cuda" else 0.25)
    try:
        await verify(every, model, size, 0)
        title = f"{name}, {str(model.dtype).removeprefix('torch.')}"
        speeds = await throughput(every, size, rounds, name)
        finish("inference", f"Sampling, {title}", speeds, options)
        rows = await latency(every, size, rounds, syncs, weights, name)
        finish("inference", f"First token and weight sync, {title}", rows, options)
        await verify(every, model, size, 1)
    finally:
        for method in every.values():
            await method.close()
    if reached := goals(speeds, rows, syncs):
        finish("inference", f"Sampling: goals, {title}", reached, options)


def main() -> None:
    options = arguments(__doc__, {"syncs": 50}, model=MODELS, client=tuple(KINDS))
    if options.quick:
        options.model = ["tiny"]
    elif options.device == "cpu" and options.model != ["1b"]:
        options.model = [name for name in options.model if name != "1b"]  # takes hours there: only where asked for
    for name in options.model:
        asyncio.run(measure(name, options))


if __name__ == "__main__":
    main()
