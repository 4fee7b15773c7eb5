"""TRL's GRPO step with and without turnwise's mixin: whole steps of ``GRPOTrainer`` but for sampling, at its defaults.

It first verifies that both trainers have the same gradient. Then it times steps in turns: rewards, advantages, forward
and backward pass, clipping, AdamW, over recorded completions. "ragged" has 8 rows of 64 to 1024 tokens, log-normal
around 300; "siblings" has 8 completions of 64 tokens of one prompt of 512. "passes" is what runs through a model:
the policy alone, as by default, or also the old policy and a reference, as with vLLM's correction and a KL term.
"packed" runs a shared prompt once per row. The model is a Qwen3 with random weights, hidden size 512, two layers and
4,096 tokens, in float32. "peak MB" is the memory that a step needs above the weights and AdamW's state, in a process
of its own.

    python bench/bench_trl.py
    python bench/bench_trl.py --rows ragged --checkpointing no
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from common import arguments, finish, peak_memory, peer

TOLERANCE = 1e-4  # of the gradient's norm
GRID: dict[str, tuple[str, ...]] = {
    "rows": ("ragged", "siblings"),
    "passes": ("policy", "policy, old, reference"),
    "checkpointing": ("yes", "no"),  # TRL's default is yes
}
METHODS = ("TRL", "turnwise packed", "turnwise")
GENERATIONS = 8  # TRL's default
BATCHES = 2  # different ones that the steps go through
LEAST_SPEED = {"ragged": 1.5, "siblings": 3.0}
MAX_MEMORY = 0.5
VOCABULARY, LAYERS, CHARACTERS = 4096, 2, 94


class Case(NamedTuple):
    rows: str
    passes: str
    checkpointing: str
    quick: bool = False


class Batch(NamedTuple):
    prompt: list[int]
    completions: list[list[int]]


class Trained(NamedTuple):
    """``step()`` takes a whole optimizer step; ``gradient()`` returns that of the first batch."""

    step: Callable[[], None]
    gradient: Callable[[], torch.Tensor]


def make_batches(case: Case) -> list[Batch]:
    rng = np.random.default_rng(0)
    shorter = 8 if case.quick else 1
    batches = []
    for _ in range(BATCHES):
        if case.rows == "siblings":
            prompt, totals = 512 // shorter, [(512 + 64) // shorter] * GENERATIONS
        else:
            prompt = int(np.clip(rng.lognormal(4.3, 0.5), 32, 256)) // shorter
            drawn = np.clip(rng.lognormal(5.7, 0.7, GENERATIONS), 64, 1024) // shorter
            totals = [max(int(total), prompt + 4) for total in drawn]
        tokens = [rng.integers(4, CHARACTERS, total).tolist() for total in (prompt, *totals)]
        batches.append(Batch(tokens[0], [row[prompt:] for row in tokens[1:]]))
    return batches


def save_model(folder: Path, width: int) -> None:
    """Save a tokenizer and a model, which at 512 has a third as many weights in its head as in its layers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(32 + i): 2 + i for i in range(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=LAYERS,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_trained(method: str, case: Case, folder: Path) -> Trained:
    """Build a trainer of its defaults but for the machine, and a step as its loop takes it."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    logging.disable_progress_bar()
    batches = make_batches(case)
    taken = 0

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        batch = batches[taken % BATCHES]
        tokens = batch.completions
        return {
            "prompt_ids": [batch.prompt] * len(prompts),
            "completion_ids": tokens,
            "logprobs": [[-9.0] * len(row) for row in tokens],
        }

    whole = case.passes != "policy"
    config = GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, num_generations=GENERATIONS,
        per_device_train_batch_size=GENERATIONS, max_completion_length=1024, report_to=[], disable_tqdm=True,
        beta=0.04 if whole else 0.0, gradient_checkpointing=case.checkpointing == "yes",
    )  # fmt: skip
    cls, mine = GRPOTrainer, {}
    if method != "TRL":
        cls, mine = TurnwiseGRPOTrainer, {"sequence_layout": "packed" if method.endswith("packed") else "auto"}
    trainer: Any = cls(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completion_ids, **_: [float(sum(row) % 5) for row in completion_ids],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "?"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_func=rollout,
        **mine,
    )
    if whole:  # TRL's correction of vLLM's log-probs, which needs those of the old policy, without vLLM
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.create_optimizer_and_scheduler(num_training_steps=1000)
    trainer.current_gradient_accumulation_steps = 1
    if config.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
    trainer.model.train()
    rows = [{"prompt": "?"} for _ in range(GENERATIONS)]

    def backward() -> None:
        trainer.training_step(trainer.model, rows, None)

    def step() -> None:
        nonlocal taken
        backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), config.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        taken += 1

    def gradient() -> torch.Tensor:
        backward()
        found = torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters()])
        trainer.model.zero_grad()
        return found

    return Trained(step, gradient)


def verify(case: Case, trained: dict[str, Trained]) -> None:
    """Stop the bench unless all methods have the same gradient."""
    expected = trained["TRL"].gradient()
    for name, one in trained.items():
        if name != "TRL":
            off = float((one.gradient() - expected).norm() / expected.norm())
            assert off < TOLERANCE, f"{name}, {case}: the gradient is off by {off:.3g} of its norm"


def peak_here(method: str, case: Case, folder: Path, threads: int) -> int | None:
    torch.set_num_threads(threads)
    one = make_trained(method, case, folder)
    for _ in range(BATCHES):  # AdamW's state
        one.step()
    return peak_memory(lambda: [one.step() for _ in range(BATCHES)])


def peak(*case: Any) -> int | None:
    """Return the largest peak of the batches' steps, measured in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_here, *case).result()


def measure(case: Case, rounds: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    methods = [name for name in METHODS if case.rows == "siblings" or name != "turnwise packed"]
    trained = {name: make_trained(name, case, folder) for name in methods}
    verify(case, trained)
    # Whole cycles of the batches, in turns.
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(1 + rounds):
        for name, one in trained.items():
            start = time.perf_counter()
            for _ in range(BATCHES):
                one.step()
            seconds[name].append((time.perf_counter() - start) / BATCHES)
    of_step = {name: median(times[1:]) for name, times in seconds.items()}
    del trained
    peaks = {name: None if case.quick else peak(name, case, folder, threads) for name in methods}
    batches = make_batches(case)
    tokens = sum(len(b.prompt) + len(row) for b in batches for row in b.completions) / BATCHES
    return [
        {
            **{key: getattr(case, key) for key in GRID},
            "method": name,
            "tokens": round(tokens),
            "s per step": of_step[name],
            "tokens/s": tokens / of_step[name],
            "× TRL": of_step["TRL"] / of_step[name],
            "peak MB": peaks[name] / 1e6 if peaks[name] else None,
            "× TRL's memory": peaks[name] / peaks["TRL"] if peaks[name] and peaks["TRL"] else None,
        }
        for name in methods
    ]


def goals(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one row per goal."""
    for row in rows:
        if row["method"] != "turnwise":
            continue
        case = ", ".join(f"{key}: {row[key]}" for key in GRID)
        least, memory = LEAST_SPEED[row["rows"]], row["× TRL's memory"]
        met = "yes" if row["× TRL"] >= least else "NO"
        yield {"case": case, "method": "turnwise", "goal": "× TRL's speed", "figure": row["× TRL"],
               "wanted": f"≥ {least}", "met": met}  # fmt: skip
        if memory is not None:
            met = "yes" if memory <= MAX_MEMORY else "NO"
            yield {"case": case, "method": "turnwise", "goal": "× TRL's memory", "figure": memory,
                   "wanted": f"≤ {MAX_MEMORY}", "met": met}  # fmt: skip


def main() -> None:
    options = arguments(__doc__, **GRID)
    options.device = "cpu"  # on a GPU it has not been tried yet
    if peer("trl") is None:
        finish("trl", "TRL's GRPO step", [{"method": "turnwise", "goal": "not run: TRL is missing"}], options)
        return
    every: list[dict[str, Any]] = []
    cases = [Case(*values) for values in product(*(getattr(options, key) for key in GRID))]
    if options.quick:
        cases = [Case("siblings", "policy", "yes", quick=True)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with contextlib.redirect_stderr(io.StringIO()):
            save_model(folder, 64 if options.quick else 512)
        for case in cases:
            rows = measure(case, min(options.rounds, 3), options.threads, folder)
            finish("trl", f"TRL's GRPO step, {', '.join(case[:3])}", rows, options)  # what is done stays
            every += rows
    if met := [] if options.quick else list(goals(every)):
        finish("trl", "TRL's GRPO step: goals", met, options)


if __name__ == "__main__":
    main()
