"""One rank of verl's ``TrainingWorker``: an actor update for each loss and each aggregation, verl's and turnwise's.

``python -m verl_on_cpu.worker OUT OVERRIDE...`` with torch's variables for ranks. Rank 0 writes ``OUT``, JSON with one
row per update.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import open_dict
from tensordict import NonTensorData
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from turnwise.integrations.verl.losses import MODES

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
ROWS, PROMPT, RESPONSE, WORDS = 8, 5, 7, 250


def make_worker(overrides: list[str]) -> tuple[TrainingWorker, Any]:
    """Return the worker, as ``ActorRolloutRefWorker`` builds it, and the ``actor`` section of the configuration."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides).actor_rollout_ref
    actor: ActorConfig = omega_conf_to_dataclass(config.actor)
    actor.model_config = omega_conf_to_dataclass(config.model)
    actor.engine.micro_batch_size_per_gpu = config.actor.ppo_micro_batch_size_per_gpu
    actor.engine.use_dynamic_bsz = False
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=actor.model_config,
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    return worker, config.actor


def rows(
    rank: int, ranks: int, *, count: int = ROWS, prompt: int = PROMPT, response: int = RESPONSE, entropy: bool = True
) -> Any:
    """Return this rank's part of one optimizer step, ragged, as verl's trainer sends it."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, response + 1, (count,), generator=g).tolist()
    lengths[0] = response
    columns: dict[str, list[torch.Tensor]] = {}
    for length in lengths:
        ids = torch.randint(2, WORDS, (prompt + length,), generator=g)
        mask = (torch.rand(length, generator=g) < 0.8).long()
        mask[0] = 1
        one = {
            "input_ids": ids,
            "position_ids": torch.arange(prompt + length),
            "prompts": ids[:prompt],
            "responses": ids[prompt:],
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": -torch.rand(length, generator=g) * 2 - 4.5,
            "ref_log_prob": -torch.rand(length, generator=g) * 2 - 4.5,
            "advantages": torch.randn(length, generator=g),
        }
        for name, value in one.items():
            columns.setdefault(name, []).append(value)
    mine = slice(rank * count // ranks, (rank + 1) * count // ranks)
    nested = {name: torch.nested.as_nested_tensor(v[mine], layout=torch.jagged) for name, v in columns.items()}
    tokens = NonTensorData([prompt + length for length in lengths])
    rest = {"global_batch_size": count, "temperature": 1.0, "global_token_num": tokens, "calculate_entropy": entropy}
    return tu.get_tensordict(nested, rest)


def update(
    worker: TrainingWorker, first: list[torch.Tensor], actor: Any, mode: str, agg: str, *, rank: int, ranks: int
) -> dict[str, Any]:
    """Return loss, gradient norm, metrics and new weights of one optimizer step from the weights ``first``."""
    with torch.no_grad():
        for parameter, value in zip(worker.engine.module.parameters(), first, strict=True):
            parameter.copy_(value)
    worker.engine.optimizer.state.clear()
    with open_dict(actor):
        actor.policy_loss.loss_mode, actor.loss_agg_mode = mode, agg
    worker.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(actor)))
    done = tu.get(worker.train_batch(rows(rank, ranks)), "metrics")
    per_rank = {name: value for name, value in done.items() if name.startswith("actor/")}
    weights = [value.full_tensor().flatten() for value in worker.engine.module.state_dict().values()]
    return {
        "mode": mode,
        "agg": agg,
        "loss": done["loss"],
        "grad_norm": done["grad_norm"],
        "metrics": {name: [list(part.values) for part in parts] for name, parts in per_rank.items()},
        "weights": torch.cat(weights).tolist(),
    }


def main(out: str, *overrides: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker, actor = make_worker(list(overrides))
    first = [parameter.detach().clone() for parameter in worker.engine.module.parameters()]
    cases = [("vanilla", agg) for agg in AGGREGATIONS]
    cases += [(mode, AGGREGATIONS[nth % 5]) for nth, mode in enumerate(MODES) if mode != "vanilla"]
    done = [
        update(worker, first, actor, name, agg, rank=rank, ranks=ranks)
        for mode, agg in cases
        for name in (mode, f"turnwise_{mode}")
    ]
    if rank == 0:
        Path(out).write_text(json.dumps(done))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
