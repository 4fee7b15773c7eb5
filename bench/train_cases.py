"""Models, batches and trainers for ``bench_train.py``: rows of ragged lengths, and a step of each trainer over them."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch
from timing import first_peak
from torch import Tensor, nn

from turnwise.run.checks import tiny_model, warm_start_rows
from turnwise.tasks import build_task
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import Policy
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.model.forward import Forward, like_lengths
from turnwise.train.model.micro_batch import MicroBatch, micro_batches, pad
from turnwise.train.model.prefix_tree import PrefixTree
from turnwise.train.update.sft import constant_credit
from turnwise.train.update.sft_data import fitting
from turnwise.train.update.update import update_policy
from turnwise.train.validate import load_config
from turnwise.types import TrainingBatch
from turnwise.types.passes import Needs, Read

GROUP = 8  # completions of a prompt; also TRL's default rows per forward pass
SHORTEST, LONGEST = 64, 1024
DEMO_ROWS = 1472  # rows of a step of the demo: 64 for each step of its warm start
TEMPERATURE = 1.0
LR = 1e-6
LOSS = LossConfig(
    type="ppo", aggregation="token-mean"
)  # TRL's default, "dapo": clip at 0.2 both ways, mean over tokens


class Case(NamedTuple):
    """A model, a number of rows of 64–1024 tokens, a dtype; ``checkpointing`` recomputes activations in the backward
    pass."""

    model: str
    rows: int
    dtype: str
    checkpointing: bool


# Beyond the demo's sizes: the width, depth and vocabulary.
MODELS: dict[str, dict[str, int]] = {
    "quick": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
    "tiny": {},
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
    },
}
VOCABULARY = {"small": 50_304, "1b": 128_256}


class Models(NamedTuple):
    model: nn.Module
    tokenizer: Any


def make_model(case: Case) -> Models:
    """Build a model and a tokenizer, with equal weights at each call. "tiny" is the demo's model; "small" has 51M
    parameters, half of them in the embedding; "1b" has 1.2 billion, as many as Llama 3.2 1B."""
    tokenizer = build_tokenizer(["0123456789 abcdefghijklmnopqrstuvwxyz"])
    model: Any = build_model(tokenizer, max_position_embeddings=2 * LONGEST, **MODELS[case.model])
    if case.model in VOCABULARY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.resize_token_embeddings(VOCABULARY[case.model], mean_resizing=False)
    return Models(model.to(getattr(torch, case.dtype)), tokenizer)


def make_batch(case: Case, seed: int = 0) -> TrainingBatch:
    """Build groups of 8 rows that share a prompt. Rows have 64 to 1024 tokens, log-normal around 300."""
    rng = np.random.default_rng(seed)
    tokens, masks, lengths = [], [], []
    for _ in range(case.rows // GROUP):
        question = rng.integers(10, 250, int(np.clip(rng.lognormal(4.3, 0.5), 32, 256)))
        for _ in range(GROUP):
            total = int(np.clip(rng.lognormal(5.7, 0.7), max(SHORTEST, len(question) + 16), LONGEST))
            answer = rng.integers(10, 250, total - len(question))
            tokens += [question, answer]
            masks += [np.zeros(len(question), np.uint8), np.ones(len(answer), np.uint8)]
            lengths.append(total)
    count = len(lengths)
    return TrainingBatch.of_rows(
        token_ids=np.concatenate(tokens),
        cu_seqlens=np.cumsum([0, *lengths]),
        loss_mask=np.concatenate(masks),
        rollout_logprobs=np.zeros(sum(lengths), np.float32),
        advantages=rng.normal(size=count).astype(np.float32),
        rewards=np.zeros(count, np.float32),
        temperatures=np.full(count, TEMPERATURE, np.float32),
        actor_index=np.zeros(count, np.int64),
        policy_index=np.zeros(count, np.int64),
        min_version=np.zeros(count, np.int64),
        actors=["player"],
        policies=["default"],
    )


class Trained(NamedTuple):
    """A trainer's whole step over the batch, and a function that returns the gradient of such a step without changing
    any weight."""

    step: Callable[[], Any]
    gradient: Callable[[], Tensor]


def seconds_per_step(trained: dict[str, Trained], rounds: int, warm: int = 1) -> dict[str, float]:
    """Return median seconds per step, in turns, after ``warm`` rounds: the first one creates the optimizers' states."""
    samples: dict[str, list[float]] = {name: [] for name in trained}
    for _ in range(warm + rounds):
        for name, one in trained.items():
            start = time.perf_counter()
            one.step()
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[warm:]) for name, times in samples.items()}


def _peak_here(make: Callable[[str, Any], Trained], method: str, case: Any, threads: int) -> int | None:
    torch.set_num_threads(threads)
    step = make(method, case).step
    return first_peak(lambda: (step(), step()))


def peak_of_two_steps(make: Callable[[str, Any], Trained], method: str, case: Any, threads: int) -> int | None:
    """Return the bytes that the first two steps of ``make(method, case)`` need beyond the loaded model, measured in a
    new process, without any data of the other methods."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_here, make, method, case, threads).result()


# ---------------------------------------------------------------------------------------------------------------------
# Ours
# ---------------------------------------------------------------------------------------------------------------------
def turnwise(case: Case, batch: TrainingBatch, forward: Callable[[nn.Module], Any] = Forward) -> Trained:
    """Train with turnwise; a forward pass takes about as many tokens as 8 rows have on average."""
    model: Any = make_model(case).model
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    budget = -(-len(batch.token_ids) * GROUP // case.rows) + LONGEST // 8
    return updates(model, batch, UpdateConfig(lr=LR, micro_batch_tokens=budget), forward)


def updates(
    model: nn.Module, batch: TrainingBatch, update: UpdateConfig, forward: Callable[[nn.Module], Any]
) -> Trained:
    """Train with ``update_policy`` as the loop calls it, and with ``forward(model)`` as the policy's forward pass."""
    policy = Policy("default", model, update, total_steps=1000)
    policy.forward = forward(model)
    give_logprobs(policy, batch, update)
    return steps_of(policy, batch, update)


@torch.no_grad()
def give_logprobs(policy: Policy, batch: TrainingBatch, update: UpdateConfig) -> None:
    """Write the sampler's log-probs into ``batch``: those of the weights that train."""
    for micro in micro_batches(batch, np.arange(len(batch)), update.micro_batch_tokens):
        batch.target_logprobs[micro.token_N] = policy.logprobs(micro.to(policy.device)).cpu().numpy()


def steps_of(policy: Policy, batch: TrainingBatch, update: UpdateConfig) -> Trained:
    """Train ``policy`` with ``update_policy``. If it is sharded, all ranks make the steps together."""

    def step() -> Any:
        return update_policy(policy, batch, update, LOSS, np.random.default_rng(0))

    def gradient() -> Tensor:
        kept: list[Tensor] = []

        def keep() -> float:
            kept.append(flat_gradient(policy.model))
            policy.model.zero_grad(set_to_none=True)
            return float(kept[0].norm())

        policy.step, taken = keep, policy.step  # type: ignore[method-assign]
        step()
        policy.step = taken  # type: ignore[method-assign]
        return kept[0]

    return Trained(step, gradient)


def demo_update() -> tuple[Trained, TrainingBatch, int]:
    """Return the update of ``turnwise demo``, a batch in the shape of its steps, and the batch's unique tokens.

    The batch holds the demo's demonstrations, about as many rows as a step samples; an advantage is a random number.
    """
    file = resources.files("turnwise.cli.run") / "demo_sudoku.toml"
    with resources.as_file(file) as path:
        config = load_config(path, {"run_dir": "unused", "warm_start.steps": DEMO_ROWS // 64})
    task = build_task(config.task, {"seed": config.seed, **config.task_options})
    tokenizer, model = tiny_model(config, task)
    longest = model.config.max_position_embeddings
    batch = constant_credit(fitting(tokenizer, warm_start_rows(config, task).rows, longest, lambda _: None))
    batch.advantages[:] = np.random.default_rng(0).normal(size=len(batch))
    batch.rewards[:] = 0
    batch.policies[:] = ["default"]
    return updates(model, batch, config.update, Forward), batch, len(PrefixTree(batch.token_ids, batch.cu_seqlens))


class EagerForward:
    """Plain PyTorch: padded rows of similar length, logits of the completions' columns, and their log-softmax."""

    trie_share = 0.0

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def read(self, micro: MicroBatch, needs: Needs) -> Read:
        order, logprobs, entropies = [], [], []
        for rows in like_lengths(micro.lengths):
            block = pad(micro, rows)
            first = int(block.column.min())
            logits = self.model(
                input_ids=block.input_ids,
                attention_mask=block.attention_mask,
                use_cache=False,
                logits_to_keep=block.input_ids.shape[1] - first,
            ).logits
            all_NV = torch.log_softmax(logits[block.row, block.column - first].float() / TEMPERATURE, dim=-1)
            order.append(block.token)
            logprobs.append(all_NV.gather(1, micro.targets_N[block.token][:, None])[:, 0])
            with torch.no_grad():  # a metric
                entropies.append(-(all_NV.exp() * all_NV).sum(-1))
        back = torch.cat(order).argsort()
        return Read(torch.cat(logprobs)[back], torch.cat(entropies)[back] if needs.entropy else None)


# ---------------------------------------------------------------------------------------------------------------------
# TRL's
# ---------------------------------------------------------------------------------------------------------------------
def trl(case: Case, batch: TrainingBatch) -> Trained:
    """Train with ``GRPOTrainer``: its own batch of padded rows, ``training_step`` for every 8 rows, and its optimizer.

    Only sampling is left out: the rows of ``batch`` replace its completions. They are padded as TRL pads them, prompts
    on the left and completions on the right, over the whole batch.
    """
    trainer = make_trl(case)
    model = trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    trainer.create_optimizer()
    passes = case.rows // GROUP
    trainer.current_gradient_accumulation_steps = passes
    rows = trl_rows(batch)
    trainer._generate_and_score_completions = lambda _: dict(rows)
    model.train()

    def accumulate() -> None:
        for _ in range(passes):
            trainer.training_step(model, [], rows["num_items_in_batch"])

    def step() -> None:
        accumulate()
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        model.zero_grad()

    def gradient() -> Tensor:
        accumulate()
        kept = flat_gradient(model)
        model.zero_grad()
        return kept

    return Trained(step, gradient)


def make_trl(case: Case) -> Any:
    """Build a ``GRPOTrainer`` with its defaults, except: no autocast, as ours has none, the case's checkpointing, and
    the CPU."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, tokenizer = make_model(case)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=case.checkpointing,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=case.rows // GROUP,
            num_generations=GROUP,
            max_completion_length=LONGEST,
            learning_rate=LR,
            temperature=TEMPERATURE,
            report_to=[],
            disable_tqdm=True,
        )
        return GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["1"] * case.rows}),
            processing_class=tokenizer,
        )


def trl_rows(batch: TrainingBatch) -> dict[str, Tensor]:
    from trl.trainer.utils import pad as trl_pad

    prompts, completions = [], []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        first = start + int(np.flatnonzero(batch.loss_mask[start:end])[0])
        prompts.append(torch.from_numpy(batch.token_ids[start:first]))
        completions.append(torch.from_numpy(batch.token_ids[first:end]))

    def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
        ones = [torch.ones_like(row) for row in rows]
        return trl_pad(rows, padding_side=side), trl_pad(ones, padding_side=side)

    (prompt_ids, prompt_mask), (ids, mask) = padded(prompts, "left"), padded(completions, "right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.from_numpy(batch.advantages),
        "num_items_in_batch": mask.sum(),
    }


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the whole gradient in one dimension, that of a sharded model too."""
    parts: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten().float() for g in parts])


def eager(case: Case, batch: TrainingBatch) -> Trained:
    """Train with turnwise's step and a plain forward pass."""
    return turnwise(case, batch, EagerForward)


METHODS: dict[str, Callable[[Case, TrainingBatch], Trained]] = {"TRL": trl, "eager": eager, "turnwise": turnwise}


def make_trained(method: str, case: Case) -> Trained:
    gc.collect()
    return METHODS[method](case, make_batch(case))
