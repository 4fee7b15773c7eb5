"""The trainer and the sampler on a real shape: Qwen3-0.6B's, with random weights in bfloat16, on a GPU.

- "update": steps over 8 rows of 2,048 tokens in one packed pass, and over 2 rows of 16,384 in two, of all weights
  (float32 masters) and of a LoRA adapter of rank 16. "MFU" is 6 FLOP per weight and token, 4 with a frozen base, over
  the GPU's dense bfloat16 peak, without those of attention.
- "fan-out": 4 turns with 8 branches each, of which one goes on: padded, packed and as a trie. All have the same rows.
  Up to the rounding of bfloat16 they have equal log-probabilities ("log-probs off" is the largest difference from
  padded's) and norms of the first gradient. "tokens/s" counts the tokens of the rows.
- "sampling": 256 answers of 128 tokens to 32 prompts by the client of transformers, then the largest and the mean
  difference of the trainer's log-probabilities from the sampler's.

"first s" is the first call after those that check and compile, "s" the median of the others; "peak MB" is the most
memory that PyTorch held, "per pass" the most tokens of a micro-batch, which are halved if memory runs out. Without a
GPU or with ``--quick`` the shapes are tiny: that only shows that the bench runs.

    python bench/bench_trainer.py --rounds 5
    python bench/bench_trainer.py --part sampling
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from common import arguments, finish
from train_cases import EagerForward, steps_of
from trie_cases import LR, Case, make_batch, unique_tokens

from turnwise.inference.local.client import TransformersClient
from turnwise.inference.weights.lora import SharedBase
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train import Policy
from turnwise.train.config.optimization import UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model.forward import Forward
from turnwise.train.model.loading import peft_config
from turnwise.train.model.micro_batch import micro_batches
from turnwise.types import ModelRequest, Sampling, TrainingBatch

SHAPE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
}  # fmt: skip
TINY = {
    "vocab_size": 2_048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1_024,
}  # fmt: skip
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s of the SXM cards, from their data sheets."""
UPDATES, FAN_OUT = (Case(512, 1536, 8, 1, "no"), Case(512, 15_872, 2, 1, "no")), Case(1024, 128, 8, 4)
QUICK_UPDATES, QUICK_FAN_OUT = (Case(16, 48, 4, 1, "no"), Case(16, 112, 2, 1, "no")), Case(32, 8, 4, 2)
MOST = 16_384  # tokens of a pass


def make_model(options: Any, whole: bool) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**(SHAPE if whole else TINY), tie_word_embeddings=True, rope_theta=1e6)
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def timed(step: Callable[[], Any], rounds: int, device: str) -> dict[str, float | None]:
    """Return the seconds of the first call, the median of the others, and the peak of allocated memory in MB."""
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None
    return {"first s": seconds[0], "s": median(seconds[1:]), "peak MB": peak}


def policy_of(model: Any, batch: TrainingBatch, update: UpdateConfig, forward: Callable[[Any], Any]) -> Policy:
    """Build the policy; the batch gets its log-probabilities, as if it had sampled the rows."""
    policy = Policy("default", model, update, total_steps=1000)
    policy.forward = forward(model)
    with torch.no_grad():
        for micro in micro_batches(batch, np.arange(len(batch)), update.micro_batch_tokens):
            batch.target_logprobs[micro.token_N] = policy.logprobs(micro.to(policy.device)).float().cpu().numpy()
    return policy


def freed(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def update(options: Any, whole: bool) -> list[dict[str, Any]]:
    rows = []
    methods = ("turnwise, full", "turnwise, LoRA")
    for case, method in itertools.product(UPDATES if whole else QUICK_UPDATES, methods):
        freed(options.device)
        model = make_model(options, whole)
        weights = sum(p.numel() for p in model.parameters())
        if method == "turnwise, LoRA":
            model = SharedBase(model).add_adapter("default", peft_config(LoraConfig(rank=16)), seed=0)
        batch = make_batch(case)
        config = UpdateConfig(lr=LR, micro_batch_tokens=min(case.tokens, MOST))
        policy = policy_of(model, batch, config, lambda model: Forward(model, "packed"))
        measured = timed(steps_of(policy, batch, config).step, options.rounds, options.device)
        speed = case.tokens / (measured["s"] or 1)
        name = torch.cuda.get_device_name() if options.device == "cuda" else ""
        peak = next((peak for card, peak in PEAKS.items() if card in name), None)
        flop = (6 if method == "turnwise, full" else 4) * weights * speed
        passed = policy.micro_batch_tokens(min(case.tokens, MOST))  # half as many if memory ran out
        rows.append({"part": "update", "method": method, "rows": case.siblings, "tokens": case.tokens,
                     "per pass": passed, **measured,
                     "tokens/s": speed,
                     "MFU": flop / peak if peak else None})  # fmt: skip
        del model, policy
    return rows


def fan_out(options: Any, whole: bool) -> list[dict[str, Any]]:
    case, rows = FAN_OUT if whole else QUICK_FAN_OUT, []
    forwards: dict[str, Callable[[Any], Any]] = {
        "padded": EagerForward,
        "packed": lambda model: Forward(model, "packed"),
        "turnwise trie": lambda model: Forward(model, "trie"),
    }
    ideal = case.tokens / unique_tokens(make_batch(case))
    expected: np.ndarray | None = None
    for method, forward in forwards.items():
        freed(options.device)
        model, batch = make_model(options, whole), make_batch(case)
        config = UpdateConfig(lr=LR, micro_batch_tokens=case.siblings * case.longest)
        policy = policy_of(model, batch, config, forward)
        expected = batch.rollout_logprobs if expected is None else expected
        off = float(np.abs(batch.rollout_logprobs - expected).max())
        trained = steps_of(policy, batch, config)
        norm = trained.step()["grad_norm"]
        measured = timed(trained.step, options.rounds, options.device)
        padded = rows[0]["s"] if rows else measured["s"]
        rows.append({"part": "fan-out", "method": method, "tokens": case.tokens, **measured,
                     "tokens/s": case.tokens / (measured["s"] or 1), "× padded": padded / (measured["s"] or 1),
                     "ideal": ideal, "log-probs off": off,
                     "gradient norm": norm})  # fmt: skip
        del model, policy, trained
    return rows


def sampling(options: Any, whole: bool) -> list[dict[str, Any]]:
    freed(options.device)
    answers, siblings, length, tokens = (256, 8, 256, 128) if whole else (8, 4, 12, 6)
    model, rng = make_model(options, whole), np.random.default_rng(0)
    prompts = [rng.integers(10, 250, length).tolist() for _ in range(answers // siblings)]
    room = answers * (length + tokens)
    client = TransformersClient(
        model, build_tokenizer(["0123456789"]), share=True, max_batch_rows=answers, max_batch_tokens=room
    )
    loop, seeds = asyncio.new_event_loop(), itertools.count()

    def sample() -> Any:
        settings = [Sampling(max_tokens=tokens, seed=next(seeds)) for _ in range(answers)]
        requests = [ModelRequest(prompts[i // siblings], each) for i, each in enumerate(settings)]
        return loop.run_until_complete(client.generate(requests))

    measured = timed(sample, options.rounds, options.device)
    drawn = sample()
    loop.run_until_complete(client.close())
    batch = batch_of([prompts[i // siblings] for i in range(answers)], drawn)
    policy = Policy("default", model, UpdateConfig(lr=LR), total_steps=1)
    differences = []
    with torch.no_grad():
        for micro in micro_batches(batch, np.arange(len(batch)), 16_384):
            micro = micro.to(policy.device)
            differences.append((policy.logprobs(micro).float() - micro.rollout_logprobs_N).abs().cpu())
    off = torch.cat(differences)
    count = sum(len(each.completion_token_ids) for each in drawn)
    return [
        {"part": "sampling", "method": "turnwise transformers", "tokens": count, **measured,
         "tokens/s": count / (measured["s"] or 1), "largest difference": float(off.max()),
         "mean difference": float(off.mean())}
    ]  # fmt: skip


def batch_of(prompts: list[list[int]], drawn: list[Any]) -> TrainingBatch:
    rows = list(zip(prompts, drawn, strict=True))
    parts = [np.array([*prompt, *each.completion_token_ids]) for prompt, each in rows]
    masks = [np.repeat(np.array([0, 1], np.uint8), [len(p), len(each.completion_token_ids)]) for p, each in rows]
    logprobs = [np.array([*([0.0] * len(p)), *each.logprobs], np.float32) for p, each in rows]
    zeros = np.zeros(len(rows), np.int64)
    return TrainingBatch.of_rows(
        token_ids=np.concatenate(parts), cu_seqlens=np.cumsum([0, *map(len, parts)]), loss_mask=np.concatenate(masks),
        rollout_logprobs=np.concatenate(logprobs), advantages=np.ones(len(rows), np.float32),
        rewards=np.zeros(len(rows), np.float32), temperatures=np.ones(len(rows), np.float32), actor_index=zeros,
        policy_index=zeros, min_version=zeros, actors=["player"], policies=["default"],
    )  # fmt: skip


PARTS: dict[str, Callable[[Any, bool], list[dict[str, Any]]]] = {
    "update": update,
    "fan-out": fan_out,
    "sampling": sampling,
}


def main() -> None:
    options = arguments(__doc__, part=tuple(PARTS))
    whole = options.device == "cuda" and not options.quick
    options.rounds = min(options.rounds, 5)
    for part in options.part:
        rows = PARTS[part](options, whole)
        shape = "Qwen3-0.6B's shape" if whole else "A tiny shape"
        finish("trainer", f"{shape}, {part}", rows, options)


if __name__ == "__main__":
    main()
