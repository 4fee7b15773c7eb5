"""Runs on a real Ray cluster of three nodes with invented resources."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from turnwise.cluster.members import Members, events_file, log_file
from turnwise.cluster.placement import NoRoom, roles_of
from turnwise.cluster.ray_backend import RayBackend
from turnwise.run.cluster import EXIT_LATER
from turnwise.train.config.cluster import ClusterConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.validate import config_from_dict

from ..trained import SMALL, equal, rows_of
from .test_supervisor import runs

ROLLOUT = {"prompts_per_step": 2, "branches": 2, "max_batch_rows": 1}
COMMON: dict[str, Any] = {**SMALL, "device": "cpu", "rollout": ROLLOUT, "update": {"lr": 5e-5}}
ENGINES = {
    "main": {
        "count": 2, "cpus": 0, "resources": {"sim_gpu": 1}, "engine": "transformers",
        "options": {"max_batch_size": 1},
    }
}  # fmt: skip
RANK = {"cpus": 0, "resources": {"learner": 1}}


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """The address of a cluster of three nodes, of which two have a ``learner`` and two ``sim_gpu``."""
    from ..kill_cluster import three_nodes

    with three_nodes() as cluster:
        yield cluster.address


def start(folder: Path, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
    """Start ``turnwise train`` on a config with ``settings``."""
    config = config_from_dict({**COMMON, "run_dir": str(folder), **settings})
    file = folder.with_suffix(".toml")
    file.write_text(to_toml(config))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "turnwise", "train", str(file), "--traceback", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def train(folder: Path, *arguments: str, **settings: Any) -> str:
    """Run ``turnwise train`` to its end, and return what it prints."""
    process = start(folder, *arguments, **settings)
    told, _ = process.communicate(timeout=400)
    assert process.returncode == 0, told
    return told


def wait_for_a_step(process: subprocess.Popen[str], folder: Path) -> None:
    while not (folder / "metrics.jsonl").is_file():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def engines_serving(folder: Path) -> float:
    """In the last whole row of a run's metrics; 0 without one."""
    file = folder / "metrics.jsonl"
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0] if file.is_file() else ""
    return json.loads(whole.splitlines()[-1])["cluster/engines_serving"] if whole else 0


def weights(folder: Path) -> dict[str, Any]:
    [file] = folder.glob("policies/*/model.safetensors")
    return load_file(file)


def events(folder: Path) -> list[tuple[str, str]]:
    return [(event["event"], event["role"]) for event in map(json.loads, events_file(folder).read_text().splitlines())]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(folder)
    return folder


@pytest.mark.slow
def test_two_engines_and_two_workers_train_as_one_process_does(tmp_path: Path, ray_address: str, alone: Path) -> None:
    """Bit for bit; and an engine and a worker are killed on the way."""
    folder = tmp_path / "run"
    cluster = {
        "backend": "ray", "address": ray_address, "trust_network": True, "learner": RANK, "engines": ENGINES,
        "arena": {"count": 2, "cpus": 0}, "faults": {"dead_after": 10.0},
    }  # fmt: skip
    process = start(folder, cluster=cluster)
    try:
        wait_for_a_step(process, folder)
        started = {e["role"]: e["pid"] for e in map(json.loads, events_file(folder).read_text().splitlines())}
        assert set(started) == {"rank-0", "engine-main-0", "engine-main-1", "worker-0", "worker-1"}
        # The rank stands still until both are back, as two steps might end before.
        os.kill(started["rank-0"], signal.SIGSTOP)
        for role in ("engine-main-0", "worker-1"):
            os.kill(started[role], signal.SIGKILL)
        back, deadline = {("restarted", "engine-main-0"), ("restarted", "worker-1")}, time.monotonic() + 120
        while not back <= set(events(folder)):
            assert process.poll() is None and time.monotonic() < deadline, events(folder)
            time.sleep(0.1)
        os.kill(started["rank-0"], signal.SIGCONT)
        told, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert "training for 2 steps" in told and "engine-main-0 was killed by SIGKILL; starting it again" in told
    found, want = weights(folder), weights(alone)
    assert equal(found, want)
    a, b = (rows_of(run, "rollouts.jsonl") for run in (folder, alone))
    assert [row["rewards"] for row in a] == [row["rewards"] for row in b]
    assert {("died", "engine-main-0"), ("died", "worker-1"), ("ended", "worker-0")} <= set(events(folder))
    assert Members.read(folder).engines == {}
    # The secret is in no file.
    assert not any(runs(pid) for pid in started.values())
    for role in started:
        assert log_file(folder, role).is_file()


@pytest.mark.slow
def test_the_example_starts_a_cluster_that_checks_tokens(tmp_path: Path) -> None:
    """On a Ray of its own. Whoever has no token is refused there. The run begins with the first engine that answers,
    goes on until the second one serves too, and ends once it is resumed."""
    short = {
        "threads": 1, "health.start_questions": 0, "warm_start.steps": 4, "warm_start.batch_size": 8,
        "rollout.prompts_per_step": 3, "rollout.branches": 4, "eval.every": 0, "eval.num_prompts": 4,
        "checkpoint.every": 1000, "checkpoint.keep_best": False, "credit.rule": "episodic", "run_dir": tmp_path / "run",
    }  # fmt: skip
    words = [word for key, value in short.items() for word in (f"--{key}", str(value).lower())]
    example = Path(__file__).parents[2] / "examples" / "cluster.toml"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-P", "-m", "turnwise", "train", str(example), *words, "--steps"]
    with (tmp_path / "told").open("w+") as told, subprocess.Popen(
        [*command, "1000"], env=environment, stdout=told, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        try:
            while engines_serving(tmp_path / "run") < 2:
                assert process.poll() is None, (tmp_path / "told").read_text()
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(200) == 143, (tmp_path / "told").read_text()
        finally:
            process.kill()
    steps = max(3, len(rows_of(tmp_path / "run")) + 1)
    ran = subprocess.run([*command, str(steps)], env=environment, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0 and "report: " in ran.stdout, ran.stdout + ran.stderr
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, steps + 1)) and all(row["default/updates"] for row in rows)
    assert all(1 <= row["cluster/engines_serving"] <= 2 for row in rows)
    assert {("ended", "worker-0"), ("ended", "engine-main-1")} <= set(events(tmp_path / "run"))


@pytest.mark.slow
def test_two_ranks_as_ray_actors(tmp_path: Path, ray_address: str, alone: Path) -> None:
    folder = tmp_path / "run"
    cluster = {"backend": "ray", "address": ray_address, "trust_network": True, "learner": {**RANK, "count": 2}}
    train(folder, cluster=cluster)
    found, want = weights(folder), weights(alone)
    assert found.keys() == want.keys()
    assert max(float((found[name] - value).abs().max()) for name, value in want.items()) <= 1e-6


@pytest.mark.slow
def test_a_signal_lets_the_run_save_and_end(tmp_path: Path, ray_address: str) -> None:
    folder = tmp_path / "run"
    cluster = {"backend": "ray", "address": ray_address, "trust_network": True, "learner": RANK}
    process = start(folder, cluster=cluster, steps=1000)
    try:
        wait_for_a_step(process, folder)
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 143, told
    assert "run the same command again to go on" in told.replace("\n", " ")
    assert events(folder)[-1] == ("ended", "rank-0") and list((folder / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_a_head_that_dies_lets_the_run_save_and_go_on_later(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    folder = tmp_path / "run"
    cluster = Cluster(initialize_head=True, head_node_args={"object_store_memory": 100 * 2**20, "num_cpus": 2})
    try:
        settings = {"backend": "ray", "address": cluster.address, "trust_network": True, "faults": {"dead_after": 5.0}}
        process = start(folder, cluster={**settings, "learner": {"cpus": 0}}, steps=1000, checkpoint={"every": 500})
        try:
            wait_for_a_step(process, folder)
            [server] = cluster.head_node.all_processes["gcs_server"]
            os.kill(server.process.pid, signal.SIGKILL)
            told, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    finally:
        cluster.shutdown()
    assert process.returncode == EXIT_LATER, told
    assert "has not answered for 5 s; the same command goes on from the newest checkpoint" in told.replace("\n", " ")
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    assert (folder / "checkpoints" / f"step_{steps:08d}").is_dir()
    [started] = [
        e["pid"] for e in map(json.loads, events_file(folder).read_text().splitlines()) if "started" in e["event"]
    ]
    assert not runs(started)


@pytest.mark.slow
def test_what_the_cluster_cannot_hold_is_named_within_wait(tmp_path: Path, ray_address: str) -> None:
    """Neither what it has not, nor what others hold. A cluster that checks no token is refused at once."""
    given = {"backend": "ray", "address": ray_address, "learner": RANK}
    ask = {"main": {**ENGINES["main"], "resources": {"sim_gpu": 3}}}
    large, open_ = (
        start(tmp_path / name, "--dry-run" if cluster else "--traceback", cluster={**given, **cluster})
        for name, cluster in (("large", {"trust_network": True, "wait": 5, "engines": ask}), ("open", {}))
    )
    settings = ClusterConfig.model_validate({**given, "trust_network": True, "learner": {"count": 2, **RANK}})
    roles = roles_of(settings)
    with RayBackend(settings) as backend:
        backend.place(roles, 60)
        began = time.monotonic()
        with pytest.raises(NoRoom, match=r"after cluster.wait = 2 s.*Missing: learner \(asked 2, 0 there\)"):
            RayBackend(settings).place(roles, 2)
        assert time.monotonic() - began < 30
    told, _ = large.communicate(timeout=100)
    assert large.returncode == 1
    assert "Missing: one node with 0 CPU, 3 sim_gpu for engine-main-0" in told.replace("\n", " "), told
    told, _ = open_.communicate(timeout=100)
    assert open_.returncode and "checks no token" in told and "RAY_AUTH_MODE=token" in told, told


@pytest.mark.parametrize("at", ["127.0.0.1:1", "ray://127.0.0.1:10001"])
def test_a_cluster_that_cannot_be_joined(at: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.address"), RayBackend(ClusterConfig(backend="ray", address=at)):
        pass
