"""The memory of a rank: two ranks that hold a model of 100 million parameters each take about half of one process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BATCH = Path(__file__).with_name("sharded_ranks.py")
SHAPE = {  # that of SmolLM2-135M, with turnwise's small vocabulary
    "hidden_size": 576, "num_hidden_layers": 28, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536,
}  # fmt: skip


def peak() -> float:
    """Return the most memory that this process has had, in MiB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def work(folder: Path) -> None:
    """Make one step as one process, or as a rank."""
    torch.set_num_threads(1)
    bare = peak()
    from sharded_ranks import make_batch

    from turnwise.run.ranks import join_ranks, leave_ranks, shard
    from turnwise.train.learner.local import LocalLearner
    from turnwise.train.model.loading import load_model
    from turnwise.train.model.policy import Policy
    from turnwise.train.validate import config_from_dict

    loss = {"kl": {"coef": 0.1}}
    config = config_from_dict({"device": "cpu", "update": {"num_minibatches": 1}, "loss": loss, "run_dir": str(folder)})
    mesh = join_ranks(config)
    rank = mesh.get_rank() if mesh is not None else 0
    model: Any = load_model(str(folder / "lm"), "float32", lambda: None, empty=rank > 0)
    size = sum(parameter.numel() for parameter in model.parameters())
    policies = {"default": Policy("default", model, config.update, total_steps=20, with_reference=True)}
    learner = LocalLearner(policies, config) if mesh is None else shard(policies, config, mesh)
    del model
    if rank:
        learner.follow()
    else:
        for step in range(2):
            learner.update(make_batch(), ["default"], {}, np.random.default_rng(step), lambda done, total: None)
        learner.stop()
    (folder / f"{rank}.json").write_text(json.dumps({"MiB": peak() - bare, "parameters": size}))
    if mesh is not None:
        leave_ranks()


@pytest.mark.slow
def test_a_rank_of_two_takes_little_more_than_half_the_memory(tmp_path: Path) -> None:
    from turnwise.tasks.tiny import build_model, build_tokenizer

    build_model(build_tokenizer(["0123456789"]), **SHAPE).save_pretrained(tmp_path / "lm")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found: dict[str, list[dict[str, float]]] = {}
    for name, how in (("one", []), ("two", torchrun)):
        ran = subprocess.run(
            [sys.executable, "-P", *how, __file__, str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(BATCH.parent)])},
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        found[name] = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    print(found)
    [one] = found["one"]
    assert one["parameters"] >= 99e6
    assert max(each["MiB"] for each in found["two"]) <= 0.6 * one["MiB"]


if __name__ == "__main__":
    work(Path(sys.argv[1]))
