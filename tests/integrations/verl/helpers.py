"""Runs verl's ``main_ppo`` on this CPU: a tiny model, sixteen questions, and the overrides that a CPU needs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MODULES = Path(__file__).parent / "modules"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(map(str.isalpha, solution_str)) / 8
"""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def write_model(folder: Path, **sizes: int) -> None:
    """Write a Qwen2, by default of two layers, and a tokenizer of bytes.

    verl wants a newline and ``<|im_end|>`` to be tokens.
    """
    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 1}
    config = Qwen2Config(**{"vocab_size": len(tokenizer), **tiny, **heads, **ids, **sizes})
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_inputs(folder: Path, **sizes: int) -> None:
    """Write what a run reads: the model, its questions, a reward function and the list of agent loops."""
    write_model(folder / "model", **sizes)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i % 9} + {i % 7} ="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i % 9 + i % 7)},
            "extra_info": {"index": i},
        }
        for i in range(16)
    ]
    pd.DataFrame(rows).to_parquet(folder / "questions.parquet")
    (folder / "reward.py").write_text(REWARD)
    loop = [{"name": "team", "_target_": "verl_on_cpu.team.TeamLoop"}]
    (folder / "loops.yaml").write_text(json.dumps(loop))


def settings(inputs: Path) -> dict[str, object]:
    """Return the overrides of verl's configuration for the model and the questions in ``inputs``."""
    model, actor, rollout = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
    questions = inputs / "questions.parquet"
    return {
        "data.train_files": questions,
        "data.val_files": questions,
        "data.train_batch_size": 4,
        "data.shuffle": False,
        "data.max_prompt_length": 64,
        "data.max_response_length": 8,
        "data.dataloader_num_workers": 0,
        f"{model}.path": inputs / "model",
        f"+{model}.override_config.attn_implementation": "eager",
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.model_dtype": "fp32",
        f"{actor}.fsdp_config.dtype": "float32",
        f"{actor}.optim.lr": 1e-3,
        f"{rollout}.name": "transformers",
        f"{rollout}.n": 4,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 8,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.n_gpus_per_node": 1,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.agent.agent_loop_config_path": inputs / "loops.yaml",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": 2,
        "trainer.logger": '["console"]',
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.device": "cpu",
        "reward.custom_reward_function.path": inputs / "reward.py",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process in which verl runs on a CPU."""
    path = os.pathsep.join(filter(None, [str(MODULES), os.environ.get("PYTHONPATH")]))
    verl = {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1", **verl, **more}


@contextmanager
def training(inputs: Path, folder: Path, *overrides: str, replayed: Path | None = None) -> Iterator[Popen[str]]:
    """Run ``main_ppo`` for two steps in ``folder``, on the samples and advantages of the run in ``replayed`` if given.

    Both may run at the same time. What still runs at the end of the block is ended.
    """
    folder.mkdir()
    more = {} if replayed is None else {"VERL_ON_CPU_REPLAYED": str(replayed)}
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as sockets, (folder / "log").open("w") as log:
        ray = {"num_cpus": 16, "num_gpus": 1, "include_dashboard": False, "_temp_dir": sockets}
        given = settings(inputs) | {f"++ray_kwargs.ray_init.{name}": value for name, value in ray.items()}
        process = Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{k}={v}" for k, v in given.items()), *overrides],
            cwd=folder,
            env=environment(VERL_ON_CPU_FOLDER=str(folder), RAY_DEDUP_LOGS="0", **more),
            stdout=log,
            stderr=log,
            text=True,
        )
        try:
            # Two clusters that start at once may take longer than Ray waits.
            while process.poll() is None and "Started a local Ray instance" not in (folder / "log").read_text():
                time.sleep(0.2)
            yield process
        finally:
            process.terminate()  # and Ray with it
            process.wait(60)


def printed_by(process: Popen[str], folder: Path) -> str:
    """Wait for the end of ``process``, and return what it printed."""
    process.wait(timeout=570)
    printed = (folder / "log").read_text()
    assert process.returncode == 0, printed[-6000:]
    return printed
