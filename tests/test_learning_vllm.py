"""A team learns sudoku from what vLLM samples: real weights, real engine, and a reward that rises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from turnwise.run.build import build_run
from turnwise.tasks import build_task
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.config.schema import TrainConfig
from turnwise.train.validate import config_from_dict

from .vllm_servers import lent_servers  # noqa: F401

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.usefixtures("lent_servers"),
    pytest.mark.xdist_group("vllm_runs"),
]

STEPS, PUZZLES, BRANCHES = 16, 12, 8
OPTIONS = {"blanks": [1, 3], "max_turns": 1, "quality": 0.4}


def config_of(folder: Path) -> TrainConfig:
    """Proposer and reviser, as in the demo; a model of half its depth, and puzzles with fewer blanks."""
    tokenizer = build_tokenizer(build_task("sudoku", OPTIONS).texts())
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build_model(tokenizer, **sizes, intermediate_size=288)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return config_from_dict(
        {
            "task": "sudoku",
            "task_options": OPTIONS,
            "run_dir": str(folder / "run"),
            "steps": STEPS,
            "threads": 1,
            "policies": {"default": {"path": str(folder / "model")}},
            "warm_start": {"steps": 220, "batch_size": 32},
            "rollout": {
                "prompts_per_step": PUZZLES,
                "branches": BRANCHES,
                "max_tokens": 24,
                "client": "vllm",
                "vllm": {"kv_cache_gb": 0.03125},
            },
            "credit": {"rule": "at_grpo"},
            "update": {"lr": 5e-4, "warmup": 2, "num_minibatches": 2},
        }
    )


def test_the_sudoku_team_learns(tmp_path: Path) -> None:
    """The same puzzles at each step, so that no easy or hard ones stand in the way: the mean over 96 proposals has an
    error of about 0.04, and must rise by five times that."""
    run = build_run(config_of(tmp_path))
    fresh = run.task.requests
    run.task.requests = lambda step, questions, copies: fresh(0, questions, copies)  # type: ignore[method-assign]
    try:
        run.train()
    finally:
        run.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["step_reward/proposer"] for line in lines]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.2, rewards
    # where training made logits large, a float32 forward pass is itself more than 1e-5 from a float64 one
    assert all(line["default/sampler_trainer_logprob_max_diff"] < 1e-4 for line in lines)
    # eight branches of a puzzle begin alike: what one prefilled, the others find
    assert all(line["inference/prefix_cache_hit_rate"] > 0.5 for line in lines)
    assert all(0 < line["inference/kv_cache_use"] <= 1 and line["inference/queue"] == 0 for line in lines)
    assert all(line["inference/running"] <= PUZZLES * BRANCHES and line["inference/sync_seconds"] > 0 for line in lines)
