"""A run on a Ray cluster whose engines are vLLM servers, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from turnwise.cluster.members import events_file

from .cluster.test_ray import events, start, wait_for_a_step
from .trained import rows_of


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_engines_on_a_cluster_sample_what_the_ranks_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    folder = tmp_path / "run"
    pool = {"count": 1, "cpus": 0, "options": {"kv_cache_gb": 0.0625, "engine_arg": {"max_model_len": 512}}}
    process = start(
        folder,
        steps=6,
        warm_start={"steps": 10, "batch_size": 16},
        rollout={"prompts_per_step": 4, "branches": 2},
        update={"lr": 1e-3},
        cluster={
            "backend": "ray",
            "wait": 300,
            "learner": {"cpus": 0},
            "engines": {"main": pool},
            "arena": {"count": 1, "cpus": 0},
        },
    )
    try:
        wait_for_a_step(process, folder)
        told = [json.loads(line) for line in events_file(folder).read_text().splitlines()]
        [engine] = [event for event in told if event["role"] == "engine-main-0" and "pid" in event][:1]
        os.kill(engine["pid"], signal.SIGKILL)
        said, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == 0, said
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["default/updates"] >= 1
        [error] = [value for name, value in row.items() if name.endswith("sampler_trainer_logprob_max_diff")]
        assert 0 < error < 1e-5
    assert ("died", "engine-main-0") in events(folder)
