"""A client's totals and peaks as metrics of a step."""

from __future__ import annotations

import json
import time

import pytest
import torch

from turnwise.inference import PoolClient, Reply, RoutingClient, ScriptedClient
from turnwise.train.config.schema import TrainConfig
from turnwise.train.log.lines import TIME
from turnwise.train.log.metrics import EVENTS, ClientMetrics, ClusterMetrics, rss_peak

from ..trained import rows_of


def totals(*values):
    names = ("generated_tokens", "seconds", "prompt_tokens", "cached_tokens", "preemptions")
    return dict(zip(names, values, strict=True))


class Client:
    def __init__(self):
        self.totals = totals(10, 2.0, 100, 0, 1)
        self.largest = {"running": 2, "waiting": 7, "kv_cache_use": 0.25}

    def stats(self):
        return dict(self.totals)

    def peaks(self):
        return dict(self.largest)


def test_each_step_is_told_of_its_own_growth():
    client = Client()
    metrics = ClientMetrics(client)
    client.totals = totals(70, 5.0, 300, 150, 4)
    first = {
        "inference/tokens_per_second": 20.0,
        "inference/prefix_cache_hit_rate": 0.75,
        "inference/preemptions": 3,
        "inference/running": 2,
        "inference/queue": 7,
        "inference/kv_cache_use": 0.25,
    }
    assert metrics.take() == pytest.approx(first)
    client.largest = {"running": 1, "waiting": 0, "kv_cache_use": 0.5}
    second = {"inference/preemptions": 0, "inference/running": 1, "inference/queue": 0, "inference/kv_cache_use": 0.5}
    assert metrics.take() == second, "nothing was generated: there is no rate"
    # Engines of a pool are told one by one.
    client = Client()
    client.totals = {"engines/one/requests": 5, "other": 1}
    metrics = ClientMetrics(client)
    client.totals = {"engines/one/requests": 7, "engines/two/requests": 4, "other": 2}
    client.largest = {"engines/one/outstanding": 3}
    assert metrics.take() == {
        "inference/engines/one/requests": 2,
        "inference/engines/two/requests": 4,
        "inference/engines/one/outstanding": 3,
    }
    # A client that tells nothing.
    assert ClientMetrics(object()).take() == {}


async def test_a_run_writes_them_down(make_trainer):
    trainer = make_trainer(steps=2, eval={"every": 1, "num_prompts": 4})
    await trainer.run()
    for line in rows_of(trainer.config.run_dir):
        told = {name.partition("/")[2]: value for name, value in line.items() if name.startswith("inference/")}
        if line["step"] == 0:
            assert told == {}
            continue
        assert told.keys() == {"tokens_per_second", "prefix_cache_hit_rate", "decoded_share"}
        assert 0 < told["decoded_share"] <= 1
        assert 0 < told["prefix_cache_hit_rate"] < 1 < told["tokens_per_second"]


# ---- Metrics of a run on a cluster, and their absence from all others ------------------------------------------------
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
        assert list(metrics.count_bytes(sent)) == sent
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


def test_engines_that_serve_and_the_peak_of_memory(config):
    found = ClusterMetrics(config, ScriptedClient(["x"])).take(SECONDS, waiting=0)
    assert not any("version" in name or "engines" in name for name in found)
    # A pool tells the acknowledged versions of engines that serve.
    client = PoolClient({name: ScriptedClient(lambda request: Reply("x")) for name in ("a", "b")})
    client.load_weights("default", [("w", torch.zeros(2))], 4)
    assert client.versions() == {"a": {"default": 4}, "b": {"default": 4}}
    client._engines["b"].serving = False
    assert client.versions() == {"a": {"default": 4}}
    # The peak of memory is in bytes.
    before = rss_peak()
    held = torch.ones(60_000_000, dtype=torch.uint8)
    assert rss_peak() >= before and rss_peak() > held.nbytes


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
