"""Actor updates of verl's ``TrainingWorker`` on two ranks (FSDP2 over gloo): every loss, and every aggregation of one.

The loss, the norm of the gradient before it is clipped, the metrics and the new weights are those of verl's own loss.
``test_losses.py`` has each loss with each aggregation, and the counts of more ranks.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.integrations.verl.losses import MODES

from .helpers import environment, settings, write_inputs

Update = dict[str, Any]


def updates(inputs: Path, out: Path, ranks: int = 2) -> dict[tuple[str, str], Update]:
    """Run the ranks, with an entropy bonus, a KL loss and two micro-batches on each, and return the updates."""
    actor = "actor_rollout_ref.actor"
    chosen = settings(inputs) | {
        f"{actor}.ppo_micro_batch_size_per_gpu": 4 // ranks,
        f"{actor}.entropy_coeff": 0.01,
        f"{actor}.use_kl_loss": True,
        f"{actor}.policy_loss.clip_cov_ratio": 1.0,  # it draws at random among its candidates: here it takes all
        f"{actor}.policy_loss.clip_cov_lb": -0.2,
        f"{actor}.policy_loss.kl_cov_ratio": 0.3,
    }
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "verl_on_cpu.worker", str(out), *(f"{k}={v}" for k, v in chosen.items())]
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    processes = [
        subprocess.Popen(
            command,
            env=environment(**common, MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=550)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, printed[0][-4000:]
    return {(row["mode"], row["agg"]): row for row in json.loads(out.read_text())}


def test_every_loss_and_every_aggregation(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    done = updates(tmp_path, tmp_path / "updates.json")
    ours = {key: row for key, row in done.items() if key[0].startswith("turnwise_")}
    assert {mode for mode, _ in ours} == {f"turnwise_{mode}" for mode in MODES}
    for (mode, agg), got in ours.items():
        expected, name = done[mode.removeprefix("turnwise_"), agg], f"{mode} {agg}"
        if mode == "turnwise_geo_mean":
            # verl takes the mean of each micro-batch, and there are two on each rank.
            assert 0 < got["grad_norm"] < expected["grad_norm"]
            continue
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6), name
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), name
        assert got["weights"] == pytest.approx(expected["weights"], abs=2e-6), name
        assert got["metrics"].keys() == expected["metrics"].keys()
        for metric, values in expected["metrics"].items():
            for mine, theirs in zip(got["metrics"][metric], values, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5), (name, metric)
    norms = {agg: row["grad_norm"] for (mode, agg), row in ours.items() if mode == "turnwise_vanilla"}
    assert len({round(norm, 6) for norm in norms.values()}) == 5  # no two aggregations are the same by chance
