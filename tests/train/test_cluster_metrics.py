"""Metrics of a run on a cluster, and their absence from all others."""

from __future__ import annotations

import json
import time

import pytest
import torch

from turnwise.inference import PoolClient, Reply, RoutingClient, ScriptedClient
from turnwise.train.config.schema import TrainConfig
from turnwise.train.log.cluster_metrics import EVENTS, TIME, ClusterMetrics, rss_peak

SECONDS = {"seconds_rollout": 3.0, "seconds_update": 5.0}


class Pool:
    """What the metrics ask of a pool."""

    def __init__(self, **versions):
        self.held = versions

    def serving(self):
        return list(self.held)

    def versions(self):
        return self.held

    def version(self, policy):
        return 0


@pytest.fixture
def config(tmp_path):
    return TrainConfig.model_validate({"run_dir": str(tmp_path), "cluster": {"backend": "ray"}})


def happened(folder, *events):
    (folder / EVENTS).parent.mkdir(exist_ok=True)
    with (folder / EVENTS).open("a") as stream:
        stream.writelines(json.dumps({"time": 1.0, "event": event, "role": "rank-0"}) + "\n" for event in events)


def test_a_step_by_hand(config, monkeypatch):
    clock = iter([0.0, 10.0, 11.5, 20.0, 20.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(time, "time", lambda: 1700000000.25)
    pool = Pool(**{"engine-main-0": {"solver": 7, "critic": 2}, "engine-main-1": {"solver": 6}})
    metrics = ClusterMetrics(config, RoutingClient({"solver": pool, "critic": pool}))
    time.perf_counter()
    metrics.begin()
    sent = [("a", torch.zeros(3, dtype=torch.bfloat16)), ("b", torch.zeros(2, 2))]
    with metrics.syncing():
        assert list(metrics.counted(sent)) == sent
    with metrics.syncing():
        pass
    found = metrics.take(SECONDS, waiting=2)
    assert found.pop("cluster/rss_peak_bytes") > 2**20
    assert found == {
        TIME: 1700000000.25,
        "cluster/learner_busy": (5.0 - 2.0) / 8.0,
        "cluster/queue_depth": 2,
        "cluster/sync_seconds": 2.0,
        "cluster/sync_bytes": 3 * 2 + 4 * 4,
        "cluster/restarts": 0,
        "cluster/engines_serving": 2,
        "cluster/version/engine-main-0/solver": 7,
        "cluster/version/engine-main-0/critic": 2,
        "cluster/version/engine-main-1/solver": 6,
        "cluster/version_min/solver": 6,
        "cluster/version_max/solver": 7,
        "cluster/version_min/critic": 2,
        "cluster/version_max/critic": 2,
    }
    metrics.begin()
    assert metrics.take(SECONDS, waiting=0)["cluster/sync_bytes"] == 0, "each step has its own sync"


def test_restarts_are_those_since_the_last_step(config, tmp_path):
    happened(tmp_path, "started", "restarted")
    metrics = ClusterMetrics(config, None)
    restarts = lambda: metrics.take(SECONDS, waiting=0)["cluster/restarts"]  # noqa: E731
    assert restarts() == 0, "those of an earlier process are not this one's"
    happened(tmp_path, "died", "restarted", "started", "restarted")
    with (tmp_path / EVENTS).open("a") as stream:
        stream.write('{"time": 1.0, "event": "rest')
    assert restarts() == 2
    with (tmp_path / EVENTS).open("a") as stream:
        stream.write('arted", "role": "rank-1"}\n')
    assert (restarts(), restarts()) == (1, 0)


def test_a_client_without_engines(config):
    found = ClusterMetrics(config, ScriptedClient(["x"])).take(SECONDS, waiting=0)
    assert not any("version" in name or "engines" in name for name in found)


def test_the_peak_of_memory_is_in_bytes():
    before = rss_peak()
    held = torch.ones(60_000_000, dtype=torch.uint8)
    assert rss_peak() >= before and rss_peak() > held.nbytes


def test_a_pool_tells_the_acknowledged_versions_of_engines_that_serve():
    client = PoolClient({name: ScriptedClient(lambda request: Reply("x")) for name in ("a", "b")})
    client.load_weights("default", [("w", torch.zeros(2))], 4)
    assert client.versions() == {"a": {"default": 4}, "b": {"default": 4}}
    client._engines["b"].serving = False
    assert client.versions() == {"a": {"default": 4}}


async def test_a_run_on_a_cluster_logs_them_and_an_embedded_one_does_not(make_trainer):
    began = time.time()
    rows = {}
    for backend in ("embedded", "ray"):
        trainer = make_trainer(backend, steps=2, cluster={"backend": backend})
        await trainer.run()
        rows[backend] = [json.loads(line) for line in (trainer.config.run_dir / "metrics.jsonl").open()]
    assert not any(name.startswith("cluster/") for row in rows["embedded"] for name in row)
    own = {name for name in rows["ray"][0] if name.startswith("cluster/")}
    assert own == {name for name in rows["ray"][1]} - rows["embedded"][1].keys()
    weights = sum(tensor.nbytes for _, tensor in trainer.policies["default"].weights())
    first, second = rows["ray"]
    for row in (first, second):
        assert row["cluster/sync_bytes"] == weights, "each step sends all weights once"
        assert 0 < row["cluster/sync_seconds"] < row["seconds_update"] and 0 < row["cluster/learner_busy"] < 1
    ended = first[TIME] + first["seconds_rollout"] + first["seconds_update"]
    assert began < first[TIME] < ended < second[TIME] + 0.01 and second[TIME] < time.time()
