"""A league on vLLM: past adapters sit beside the live ones in one engine, each with the weights that it had."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.inference import TransformersClient
from turnwise.run.build import Run, build_run
from turnwise.tasks.two_player import SEATS
from turnwise.train.validate import config_from_dict
from turnwise.types import ModelRequest, Sampling, Step

from .vllm_servers import lent_servers  # noqa: F401

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.usefixtures("lent_servers"),
    pytest.mark.xdist_group("vllm_runs"),
]

EXACT = 1e-5
TOKENS = 6


def run_of(folder: Path, **changes: Any) -> Run:
    settings = {
        "task": "kuhn_poker",
        "run_dir": str(folder),
        "steps": 4,
        "threads": 1,
        "health": {"start_questions": 0},
        "task_options": {"max_tokens": TOKENS},
        "policy_sharing": "lora_per_actor",
        "warm_start": {"steps": 30, "batch_size": 12, "warmup": 5, "lr": 4e-3},
        "rollout": {"prompts_per_step": 8, "client": "vllm", "vllm": {"kv_cache_gb": 0.03125}},
        "update": {"lr": 1e-2},
        "checkpoint": {"every": 1},
        "log": {"rollouts_per_step": 100},
        "league": {"share": 1.0, "every": 1, "size": 8, "opponents_per_step": 2, "matchmaker": "uniform"},
    }
    return build_run(config_from_dict(settings | changes))


def weights_of(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    policies = run.trainer.policies
    return {seat: {name: tensor.clone() for name, tensor in policies[seat].weights()} for seat in SEATS}


def test_past_adapters_play_with_the_weights_that_they_had(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    history, seen = {0: weights_of(run)}, []
    record = run.trainer.record

    async def recorded(batch: Any, metrics: Any) -> None:
        seen.extend(run.arena.last_results)
        await record(batch, metrics)
        history[run.trainer.progress.step] = weights_of(run)

    run.trainer.record = recorded  # type: ignore[method-assign]
    run.train()
    checked, by_last = set(), []
    for result in seen:
        member, seat = result.rollout.facts.league["member"], result.rollout.facts.league["seat"]
        for step in result.rollout.steps:
            assert (step.policy == seat) == (step.actor_id == seat) == step.trainable
            if step.trainable or (member, step.actor_id) in checked:
                continue
            checked.add((member, step.actor_id))
            assert error_of(run, history[member], step) < EXACT, (member, step.actor_id)
            by_last.append(error_of(run, history[4], step))
    assert max(by_last) > 10 * EXACT, "the weights of another step would not pass"
    assert len({member for member, _ in checked}) >= 2 and {seat for _, seat in checked} == set(SEATS), checked


def error_of(run: Run, weights: dict[str, dict[str, torch.Tensor]], step: Step) -> float:
    """How far what the sampler told is from what the seat of ``step`` gives its tokens with ``weights``."""
    policy = run.trainer.policies[step.actor_id]
    for name, tensor in policy.weights():
        tensor.copy_(weights[step.actor_id][name])
    request = ModelRequest(step.prompt_token_ids, Sampling(max_tokens=TOKENS))
    client = TransformersClient(policy.model, run.tokenizers)
    [scored] = asyncio.run(client.score([request], [step.completion_token_ids]))
    return float(np.abs(np.subtract(scored, step.completion_logprobs)).max())
