"""A tiny random model, a tokenizer of bytes, random rollouts, and what a training leaves."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
BYTES = 256
SIZES: dict[str, Any] = {
    "vocab_size": BYTES + 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": BYTES,
    "bos_token_id": BYTES + 1,
    "eos_token_id": BYTES + 1,
}
STEPS = 8
OF_TIME = {"step_time"} | {
    f"{mode}_{name}" for mode in ("train", "eval") for name in ("runtime", "samples_per_second", "steps_per_second")
}
"""Logged values that no two runs share."""


class Run(NamedTuple):
    """Weights after training, the logged metrics of each step, and the inputs of each call of the loss."""

    weights: dict[str, Tensor]
    logs: list[dict[str, float]]
    inputs: list[dict[str, Any]]
    trainer: Any


def save_model(folder: Path, family: str = "llama", **config_of_llama: Any) -> Path:
    """Save a random model and a tokenizer of bytes, which no network is needed for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)} | {"<pad>": BYTES, "<eos>": BYTES + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    if family == "gpt2":
        config: Any = GPT2Config(
            vocab_size=BYTES + 2, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=BYTES + 1,
            attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        )  # fmt: skip
    else:
        config = LlamaConfig(**SIZES, **config_of_llama)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def rollouts(seed: int, tools: bool, fields: dict[str, list[Any]], letters: int) -> Callable[..., dict[str, Any]]:
    """A ``rollout_func`` of random completions of 3 to 8 tokens. The model is nearly uniform over its tokens, so
    log-probs near ``-log(258)`` give importance weights near 1, inside and outside of their bounds. ``fields`` are
    further columns. With few ``letters``, rows with positive and with negative advantages have tokens in common."""
    choose = random.Random(seed)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        encode = trainer.processing_class
        completions = [[choose.randrange(letters) for _ in range(choose.randint(3, 8))] for _ in prompts]
        for tokens in completions[::2]:  # every other one ends, and the rest ran into their limit
            tokens[-1] = BYTES + 1
        found: dict[str, Any] = {
            "prompt_ids": [encode(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": [[-5.55 + choose.gauss(0, 0.8) for _ in tokens] for tokens in completions],
        }
        if tools:
            found["env_mask"] = [[1] * (len(tokens) - 2) + [0, 1] for tokens in completions]
        return found | fields

    return rollout


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion) % 4) for completion in completions]


def train_once(
    cls: Any,
    *,
    correction: str | None = None,
    tools: bool = False,
    steps: int = STEPS,
    seed: int = 0,
    samples: bool = False,
    letters: int = BYTES,
    evaluates: bool = False,
    attention: str = "sdpa",
    fields: dict[str, list[Any]] | None = None,
    folder: Path,
    out: Path,
    dataset: list[dict[str, Any]] | None = None,
    reward_funcs: Any = reward,
    arguments: dict[str, Any] | None = None,
    **config: Any,
) -> Run:
    """Train with ``cls``, a ``GRPOTrainer``, on :func:`rollouts`.

    The settings are TRL's defaults but for those that a CPU, a short test, and ``config`` need. ``correction`` is a
    mode of vLLM's importance sampling correction, ``tools`` puts a tool's token into each completion, and ``samples``
    has the model sample instead. ``arguments`` are further ones of ``cls``.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    seen: list[dict[str, Any]] = []

    class Watched(cls):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(dict(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    if correction is not None:
        config["vllm_importance_sampling_mode"] = correction
    options: dict[str, Any] = {
        "output_dir": str(out), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4,
        "num_generations": 4, "max_completion_length": 8, "max_steps": steps, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "learning_rate": 1e-3, "num_iterations": 4, "disable_tqdm": True,
    }  # fmt: skip
    prompts = [{"prompt": "What is " + "one and " * (i % 3) + f"{i}?"} for i in range(8)]
    trainer = Watched(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention),
        args=GRPOConfig(**options | config),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list(prompts if dataset is None else dataset),
        reward_funcs=reward_funcs,
        rollout_func=None if samples else rollouts(seed, tools, fields or {}, letters),
        **arguments or {},
    )
    if correction is not None:  # TRL's correction of vLLM's log-probs, without vLLM
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.train()
    if evaluates:  # its metrics join the others
        trainer.evaluate(Dataset.from_list(prompts[:4]))
    weights = {name: value.detach().double() for name, value in trainer.model.named_parameters()}
    return Run(weights, trainer.state.log_history, seen, trainer)
