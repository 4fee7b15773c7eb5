"""A run on a Ray cluster whose engines are vLLM servers, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from turnwise.train.config.toml import to_toml
from turnwise.train.validate import config_from_dict


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "cluster" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_engines_on_a_cluster_sample_what_the_ranks_compute(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pool = {"count": 1, "cpus": 0, "options": {"kv_cache_gb": 0.0625, "engine_arg": {"max_model_len": 512}}}
    config = config_from_dict(
        {
            "run_dir": str(folder),
            "steps": 6,
            "threads": 1,
            "device": "cpu",
            "health": {"start_questions": 0},
            "warm_start": {"steps": 10, "batch_size": 16},
            "rollout": {"prompts_per_step": 4, "branches": 2},
            "credit": {"rule": "constant"},
            "update": {"lr": 1e-3},
            "eval": {"num_prompts": 3},
            "cluster": {
                "backend": "ray",
                "wait": 300,
                "learner": {"cpus": 0},
                "engines": {"main": pool},
                "arena": {"count": 1, "cpus": 0},
            },
        }
    )
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "turnwise", "train", str(file), "--traceback"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        while not (folder / "metrics.jsonl").is_file():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        [engine] = [event for event in events(folder) if event["role"] == "engine-main-0" and "pid" in event][:1]
        os.kill(engine["pid"], signal.SIGKILL)
        told, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == 0, told
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["updates"] >= 1
        [error] = [value for name, value in row.items() if name.endswith("sampler_trainer_logprob_max_diff")]
        assert 0 < error < 1e-5
    assert ("died", "engine-main-0") in [(event["event"], event["role"]) for event in events(folder)]
