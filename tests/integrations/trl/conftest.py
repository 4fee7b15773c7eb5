"""Trains a tiny random model with TRL's real ``GRPOTrainer``, with and without turnwise, on the same rollouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .helpers import STEPS, Run, load_trl, reward, rollouts, save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load_trl()
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def train(model_folder: Path, tmp_path: Path) -> Callable[..., Run]:
    """``train(cls, **config)`` trains and returns a :class:`Run`.

    The settings are TRL's defaults but for those that a CPU, a short test, and ``config`` need. ``correction`` is a
    mode of vLLM's importance sampling correction, ``tools`` puts a tool's token into each completion, and ``samples``
    has the model sample instead of ``rollouts``.
    """
    load_trl()
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    def run(
        cls: Any,
        *,
        correction: str | None = None,
        tools: bool = False,
        steps: int = STEPS,
        seed: int = 0,
        samples: bool = False,
        attention: str = "sdpa",
        fields: dict[str, list[Any]] | None = None,
        folder: Path = model_folder,
        dataset: list[dict[str, Any]] | None = None,
        reward_funcs: Any = reward,
        arguments: dict[str, Any] | None = None,
        **config: Any,
    ) -> Run:
        seen: list[dict[str, Any]] = []

        class Watched(cls):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                seen.append(dict(inputs))
                return super().compute_loss(model, inputs, *args, **kwargs)

        if correction is not None:
            config["vllm_importance_sampling_mode"] = correction
        options: dict[str, Any] = {
            "output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4,
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
            rollout_func=None if samples else rollouts(seed, tools, fields or {}),
            **arguments or {},
        )
        if correction is not None:  # TRL's correction of vLLM's log-probs, without vLLM
            trainer.use_vllm, trainer._last_loaded_step = True, -1
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer.train()
        weights = {name: value.detach().double() for name, value in trainer.model.named_parameters()}
        return Run(weights, trainer.state.log_history, seen, trainer)

    return run
