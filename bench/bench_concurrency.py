"""``rollout.max_concurrency = "auto"`` beside fixed limits: on a modelled engine, and with vLLM.

The case "model" runs turnwise's own limit on a virtual clock (``virtual_clock.py``), so the machine doesn't matter and
each run gives the same numbers. Only the engine is modelled, as vLLM schedules on one H100 with a model of 8 billion
parameters in bfloat16 (32 layers, 8 KV heads of 128 dimensions). One iteration takes

    8.8 ms + 39 ns per token in the cache of a running request + 32 µs per token that it computes:

the weights' 16 GB at 3.35 TB/s and 4 ms of overhead, 131 kB of keys and values per token at the same rate, and 2 FLOPs
per parameter and token at half of 989 TFLOP/s. The cache has 380,000 tokens (50 GB). An iteration computes up to 8,192
tokens of prompts. A request is admitted when its prompt fits. When the cache is full, the youngest request is preempted
and computed again. Contexts of ended and preempted requests stay as a prefix cache, least recently used first out,
while nothing else needs the room. Not modelled: blocks, kernels that fill a GPU badly, siblings' common prompts.

    "short"   1,024 answers a step of 200 tokens at the median, to prompts of 300: 1,024 calls fit into the cache
    "long"    1,024 answers of 1,024 tokens at the median (log-normal, spread 1, at most 16,384): about 130 fit
    "agents"  512 episodes of 8 turns, each 500 new tokens, an answer of 300 and a tool of 2 s: contexts grow to 7,400

The case "vllm" plays episodes of two turns with vLLM's own server and a tiny random model, whose cache holds
few of them: does the limit follow real metrics, and what does it cost?

    python bench/bench_concurrency.py                 # the model; with --case vllm in an environment that has vLLM
"""

from __future__ import annotations

import asyncio
import statistics
import time
from argparse import Namespace
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from common import arguments, finish
from virtual_clock import run_virtually

from turnwise.arena.runtime.concurrency import PrioritySemaphore
from turnwise.arena.stages.auto_concurrency import FollowingSemaphore
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import EngineReport, ModelRequest, Sampling
from turnwise.utils.threads import run_to_end

BASE, PER_CACHED, PER_COMPUTED = 8.8e-3, 39e-9, 32e-6
"""Seconds of an iteration, and in addition per token that it reads from the cache and per token that it computes."""

CACHE, PREFILL, SEQUENCES = 380_000, 8_192, 1_024
"""Tokens in the cache, tokens of prompts per iteration, and running requests, at most."""


def named(limit: int | str) -> str:
    return "turnwise, auto" if limit == "auto" else f"{limit} at most"


LIMITS: tuple[Any, ...] = (32, 64, 128, 256, 1024, "auto")


# ---------------------------------------------------------------------------------------------------------------------
# The engine
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(slots=True, eq=False)
class Request:
    """A request of the conversation ``key``: ``length`` tokens are there, of which the cache holds ``held``."""

    key: int
    length: int
    left: int
    done: asyncio.Future[None]
    held: int = 0
    begun: bool = False


@dataclass
class ModelledEngine:
    """The engine that the module describes. ``load`` is what the limit reads."""

    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    prefixes: OrderedDict[int, int] = field(default_factory=OrderedDict)
    used: int = 0
    kept: int = 0
    preemptions: int = 0
    prompts: int = 0
    hits: int = 0
    computed: int = 0
    sampled: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        self.wake = asyncio.Event()
        self.task = asyncio.ensure_future(self.run())

    async def load(self) -> dict[str, EngineReport | None]:
        use = self.used / CACHE
        report = EngineReport(len(self.running), len(self.waiting), use, self.preemptions, self.prompts, self.hits)
        return {"engine": report}

    async def answer(self, key: int, prompt: int, tokens: int) -> None:
        done = asyncio.get_running_loop().create_future()
        self.waiting.append(Request(key, prompt, tokens, done))
        self.wake.set()
        await done

    async def run(self) -> None:
        while True:
            if not self.running and not self.waiting:
                self.wake.clear()
                await self.wake.wait()
            self.admit()
            await asyncio.sleep(self.step())

    def admit(self) -> None:
        while self.waiting and len(self.running) < SEQUENCES:
            first = self.waiting[0]
            if self.used + first.length > CACHE and self.running:
                return
            self.waiting.popleft()
            first.held = min(self.prefixes.pop(first.key, 0), first.length - 1)
            self.kept = sum(self.prefixes.values()) if first.held else self.kept
            self.prompts, self.hits = self.prompts + first.length, self.hits + first.held
            self.take(first.length)
            self.running.append(first)
        self.peak = max(self.peak, len(self.running))

    def take(self, tokens: int) -> None:
        """Use ``tokens`` more of the cache, from prefixes that nobody used for longest if need be."""
        self.used += tokens
        while self.used + self.kept > CACHE and self.prefixes:
            key, held = next(iter(self.prefixes.items()))
            lost = min(held, self.used + self.kept - CACHE)
            self.kept -= lost
            if lost == held:
                del self.prefixes[key]
            else:
                self.prefixes[key] = held - lost

    def leave(self, request: Request) -> None:
        """Free the room of ``request``, whose computed tokens stay while nothing else needs it."""
        self.used -= request.length
        self.prefixes[request.key] = request.held
        self.kept += request.held
        self.take(0)

    def step(self) -> float:
        """Compute until the first request ends, at most 16 iterations, and return their seconds."""
        budget, computed, decoding = PREFILL, 0, []
        for request in self.running:
            if request.held < request.length - 1:
                chunk = min(budget, request.length - 1 - request.held)
                request.held, budget, computed = request.held + chunk, budget - chunk, computed + chunk
            if request.held == request.length - 1:
                decoding.append(request)
        alone = not computed
        count = min(16, min((each.left for each in decoding), default=1)) if alone else 1
        while self.used + count * len(decoding) > CACHE:  # vLLM preempts the youngest
            youngest = self.running.pop()
            if youngest in decoding:
                decoding.remove(youngest)
            self.leave(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
        seconds = count * (BASE + PER_CACHED * self.used) + PER_COMPUTED * (computed + count * len(decoding))
        self.computed += computed + count * len(decoding)
        self.sampled += count * len(decoding)
        self.take(count * len(decoding))
        for request in decoding:
            request.length, request.held, request.left = (
                request.length + count,
                request.held + count,
                request.left - count,
            )
            if not request.left:
                self.leave(request)
                request.done.set_result(None)
        self.running = [request for request in self.running if request.left]
        return seconds


# ---------------------------------------------------------------------------------------------------------------------
# The episodes
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """Episodes of a step: their ``turns`` with ``new`` tokens of prompt each, answers and tools."""

    episodes: int
    turns: int
    new: int
    median: int
    sigma: float
    most: int
    tool: float = 0.0


WORK = {
    "short": Work(1024, 1, 300, 200, 0.5, 2_048),
    "long": Work(1024, 1, 1_000, 1_024, 1.0, 16_384),
    "agents": Work(512, 8, 500, 300, 0.8, 4_096, tool=2.0),
}


async def play(work: Work, limit: int | str, steps: int) -> dict[str, Any]:
    engine, loop, random = ModelledEngine(), asyncio.get_running_loop(), Random(0)
    budget = FollowingSemaphore(engine) if limit == "auto" else PrioritySemaphore(int(limit))  # type: ignore[arg-type]
    limits, calls, ends = [], [], [0.0]

    async def episode(number: int, seed: int) -> None:
        own, context = Random(seed), 0
        for turn in range(work.turns):
            if turn:
                await asyncio.sleep(work.tool * own.lognormvariate(0, 0.5))
            tokens = max(1, min(work.most, round(work.median * own.lognormvariate(0, work.sigma))))
            began = loop.time()
            async with budget.slot((number,)):
                await engine.answer(number, context + work.new, tokens)
                limits.append(budget.limit)
            calls.append(loop.time() - began)
            context += work.new + tokens

    for step in range(steps):
        numbers = range(step * work.episodes, (step + 1) * work.episodes)
        await asyncio.gather(*(episode(number, random.getrandbits(63)) for number in numbers))
        ends.append(loop.time())
    engine.task.cancel()
    seconds = [end - begin for begin, end in pairwise(ends)]
    wanted = engine.sampled + steps * work.episodes * work.turns * work.new
    return {
        "tokens/s": engine.sampled / ends[-1],
        "step p50 s": statistics.median(seconds),
        "first step s": seconds[0],
        "running, most": engine.peak,
        "preemptions": engine.preemptions,
        "computed again": (engine.computed - wanted) / wanted,
        "call p95 s": statistics.quantiles(calls, n=20)[18],
        "limits": f"{min(limits)}-{max(limits)}",
        "last limit": limits[-1],
    }


def model_rows(options: Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, work in WORK.items():
        if options.quick:
            work = Work(64, min(work.turns, 2), work.new, 32, 0.5, 64, work.tool)
        for limit in LIMITS:
            row = run_virtually(play(work, limit, options.steps))
            rows.append({"episodes": name, "method": named(limit), **row})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# vLLM
# ---------------------------------------------------------------------------------------------------------------------
PLAYERS, ROUNDS, PROMPT, ANSWER = 256, 2, 48, 64
CACHE_GB = 0.0125
"""Keys and values of about 6,500 tokens: 2 kB a token in float32."""


async def play_with_vllm(client: Any, limit: int | str, seed: int, players: int = PLAYERS) -> dict[str, Any]:
    random = Random(seed)
    budget = FollowingSemaphore(client) if limit == "auto" else PrioritySemaphore(int(limit))
    before, seconds, limits = client.stats(), [], []
    client.peaks()

    async def episode(number: int) -> None:
        prompt = [random.randrange(3, 250) for _ in range(PROMPT)]
        for _ in range(ROUNDS):
            began = time.perf_counter()
            async with budget.slot((number,)):
                sampling = Sampling(max_tokens=random.randint(1, 2 * ANSWER), seed=number)
                [response] = await client.generate([ModelRequest(prompt, sampling)])
                limits.append(budget.limit)
            seconds.append(time.perf_counter() - began)
            prompt = [*prompt, *response.completion_token_ids, *(random.randrange(3, 250) for _ in range(16))]

    began = time.perf_counter()
    await asyncio.gather(*map(episode, range(players)))
    whole, peaks, after = time.perf_counter() - began, client.peaks(), client.stats()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    return {
        "tokens/s": grown["generated_tokens"] / whole,
        "seconds": whole,
        "running, most": round(peaks["running"]),
        "queue, most": round(peaks["waiting"]),
        "cache, most": peaks["kv_cache_use"],
        "preemptions": round(grown["preemptions"]),
        "prompt tokens cached": grown["cached_tokens"] / grown["prompt_tokens"],
        "call p95 s": statistics.quantiles(seconds, n=20)[18],
        "limits": f"{min(limits)}-{max(limits)}",
        "last limit": limits[-1],
    }


async def vllm_rows() -> list[dict[str, Any]]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from turnwise.inference import VLLMClient

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    options = {"max_num_seqs": 1024, "kv_cache_gb": CACHE_GB, "engine_args": {"max_model_len": 512}}
    client = VLLMClient(Qwen3ForCausalLM(config).eval(), ByteTokenizer(), **options)
    rows = []
    try:
        await play_with_vllm(client, 32, 99, 64)  # warms up
        for seed, limit in enumerate(("auto", 32, 256, 1024, "auto")):
            row = {"method": named(limit), **await play_with_vllm(client, limit, seed)}
            print(row, flush=True)
            rows.append(row)
    finally:
        await client.close()
    return rows


def main() -> None:
    options = arguments(__doc__, {"steps": 6}, case=("model", "vllm"))
    if options.quick:
        options.case, options.steps = ["model"], 2
    if "model" in options.case:
        finish("concurrency", "Limits of concurrent calls, on a virtual clock", model_rows(options), options)
    if "vllm" in options.case:
        finish("concurrency", "Limits of concurrent calls, vLLM", run_to_end(vllm_rows()), options)


if __name__ == "__main__":
    main()
