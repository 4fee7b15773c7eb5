"""Metrics for Prometheus: a real scrape, read by the parsers of prometheus_client."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import urllib.request

import numpy as np
import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_USAGE
from turnwise.cli.run import eval as eval_command
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.log.prometheus import MAX_BYTES, MAX_SCRAPES, Prometheus
from turnwise.train.log.run_log import RunLog
from turnwise.train.log.writers import JsonLines, open_writers
from turnwise.types import GenerateResult, Rollout, Step


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def config(tmp_path, port):
    policies = {"solver": {}, "critic": {}}
    log = {"prometheus": f"127.0.0.1:{port}"}
    return TrainConfig.model_validate({"run_dir": str(tmp_path), "steps": 9, "policies": policies, "log": log})


@pytest.fixture
def server(config):
    server = Prometheus(config)
    yield server
    server.close()


def scrape(port, accept="text/plain"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def samples(port):
    """``{(name, labels): value}`` of a scrape, each read once; both formats must agree."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
    from prometheus_client.parser import text_string_to_metric_families as read

    found = []
    for parse, accept in ((read, "text/plain"), (read_open, "application/openmetrics-text; version=1.0.0")):
        every = [sample for family in parse(scrape(port, accept)) for sample in family.samples]
        by_name = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in every}
        assert len(by_name) == len(every), "two samples have one name"
        found.append(by_name)
    assert repr(found[0]) == repr(found[1])  # NaN is not equal to itself
    return found[0]


def test_names_labels_and_kinds_by_hand(server, port):
    assert [one.getsockname() for one in server._listener.sockets] == [("127.0.0.1", port)], (
        "only the address that is written listens"
    )
    assert samples(port) == {
        ("turnwise_step",): 0,
        ("turnwise_planned_steps",): 9,
        ("turnwise_steps_total",): 0,
    }
    server.log(
        4,
        {
            "reward": 0.25,
            "completion_tokens/alice": 7.5,
            "step_reward/alice": 0.5,
            "alice/entropy": 2.5,
            "critic/alice/entropy": 3.5,
            "solver/loss": 1.5,
            "critic/loss": -2.0,
            "sampled_tokens": 100,
            "total_sampled_tokens": 1000,
            "seconds_update": 2.0,
            "validation/bob/changed": 0.125,
            "inference/queue": 3,
            "inference/retries": 2,
            "inference/engines/http://10.0.0.2:80/v1/requests": 5,
            "inference/engines/http://10.0.0.2:80/v1/outstanding": 6,
            "cluster/version/engine-main-0/solver": 11,
            "cluster/version_min/solver": 10,
            "cluster/time": 1.7e9,
        },
    )
    engine = ("engine", "http://10.0.0.2:80/v1")
    found = samples(port)
    assert found.pop(("turnwise_last_step_timestamp_seconds",)) > 1.7e9
    assert found == {
        ("turnwise_step",): 4,
        ("turnwise_planned_steps",): 9,
        ("turnwise_steps_total",): 1,
        ("turnwise_reward",): 0.25,
        ("turnwise_completion_tokens", ("actor", "alice")): 7.5,
        ("turnwise_step_reward", ("actor", "alice")): 0.5,
        ("turnwise_entropy", ("actor", "alice")): 2.5,
        ("turnwise_entropy", ("actor", "alice"), ("policy", "critic")): 3.5,
        ("turnwise_loss", ("policy", "solver")): 1.5,
        ("turnwise_loss", ("policy", "critic")): -2.0,
        ("turnwise_sampled_tokens_total",): 100,
        ("turnwise_seconds_update_total",): 2.0,
        ("turnwise_validation_changed", ("actor", "bob")): 0.125,
        ("turnwise_inference_queue",): 3,
        ("turnwise_inference_retries_total",): 2,
        ("turnwise_inference_engines_requests_total", engine): 5,
        ("turnwise_inference_engines_outstanding", engine): 6,
        ("turnwise_cluster_version", ("engine", "engine-main-0"), ("policy", "solver")): 11,
        ("turnwise_cluster_version_min", ("policy", "solver")): 10,
    }


def test_gauges_are_of_the_newest_step_and_counters_add_up(server, port):
    server.log(1, {"reward": 0.25, "episodes": 8, "kl": 0.5})
    server.log(2, {"reward": 0.75, "episodes": 6})
    found = samples(port)
    assert found["turnwise_reward",] == 0.75 and found["turnwise_step",] == 2
    assert found["turnwise_episodes_total",] == 14 and found["turnwise_steps_total",] == 2
    assert ("turnwise_kl",) not in found, "the newest step did not measure it"


def test_an_actor_and_its_policy_may_share_a_name(config, port):
    server = Prometheus(config.model_copy(update={"policies": {"solver": config.policies["solver"]}}))
    server.log(1, {"completion_tokens/solver": 3, "solver/solver/entropy": 2.0, "cluster/version_min/solver": 7})
    found = samples(port)
    server.close()
    assert found["turnwise_entropy", ("actor", "solver"), ("policy", "solver")] == 2.0
    assert found["turnwise_cluster_version_min", ("policy", "solver")] == 7
    # It serves again after it was closed.
    server = Prometheus(config)
    server.log(1, {"episodes": 2})
    server.close()
    server.close()
    with pytest.raises(OSError):
        scrape(port)
    server.log(2, {"episodes": 3})
    assert samples(port)["turnwise_episodes_total",] == 5
    server.close()


def test_awkward_names_and_numbers_are_still_a_valid_scrape(server, port):
    """Two names that are one to Prometheus, an actor and a policy of one name, quotes and line breaks in labels, and
    values that are no numbers."""
    server.log(1, {"metric/a-b": 1.0, "metric/a b": 2.0, 'completion_tokens/x"\n\\': 3.0, "loss": float("nan"),
                   "ratio": float("inf"), "note": "text", "step": 7.0, "episodes": 1, "completion_tokens/solver": 3,
                   "solver/loss": 1.0, "solver/entropy/solver": 2.0})  # fmt: skip
    found = samples(port)
    assert found["turnwise_loss", ("policy", "solver")] == 1.0
    assert found["turnwise_completion_tokens", ("actor", "solver")] == 3
    assert found["turnwise_entropy", ("actor", "solver"), ("policy", "solver")] == 2.0
    assert {found["turnwise_metric_a_b",], found["turnwise_metric_a_b_",]} == {1.0, 2.0}
    assert found["turnwise_completion_tokens", ("actor", 'x"\n\\')] == 3.0
    assert found["turnwise_loss",] != found["turnwise_loss",] and found["turnwise_ratio",] == float("inf")
    assert not any("note" in key[0] for key in found)
    assert (found["turnwise_step",], found["turnwise_step_",]) == (1, 7.0)


def said(port, request):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request)
        found = b""
        while piece := client.recv(2**16):
            found += piece
    return found


def test_strangers_take_no_place_from_a_scrape_and_web_pages_read_nothing(server, port):
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(5 * MAX_SCRAPES)]
    for one in idle:
        with contextlib.suppress(OSError):  # it gave way
            one.sendall(b"G")
    assert "turnwise_step 0.0" in scrape(port)
    assert threading.active_count() == before, "no connection has a thread"
    for one in idle:
        one.close()
    for request in (
        b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
        b"GET /" + b"a" * 2 * MAX_BYTES,
    ):
        with contextlib.suppress(ConnectionError):
            assert said(port, request) == b""


def test_no_secret_and_no_text_is_served(config, port, monkeypatch):
    """Only numbers leave the run: neither its episodes nor its environment nor its paths do."""
    monkeypatch.setenv("TURNWISE_CLUSTER_KEY", "key-7f3a91")
    prompt = [{"role": "user", "content": "the hidden board"}]
    step = Step("alice", 0, prompt, "my secret move", [1, 2], [3], [-0.5], [(1, 0)], "stop")
    result = GenerateResult(Rollout("r1", "duel", "a card", [step], {"alice": 1.0}, error="Boom: key-7f3a91"))
    with RunLog.from_config(config) as log:
        log.step(1, {"reward": 0.5}, [result])
        log.warn(1, "the hidden board again")
        text = scrape(port)
    assert "turnwise_reward 0.5" in text
    assert "my secret move" in (config.run_dir / "rollouts.jsonl").read_text(), "the step has text to keep back"
    for secret in ("key-7f3a91", "hidden board", "secret move", "a card", str(config.run_dir)):
        assert secret not in text


def test_a_port_in_use_is_a_clear_error_before_a_run_trains(config, tmp_path, port, capsys, monkeypatch):
    settings = f'run_dir = "{tmp_path}/run"\nsteps = 1\nrollout.group_size = 2\nlog.prometheus = "{port}"\n'
    (tmp_path / "run.toml").write_text(settings)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ConfigError) as raised:
            open_writers(config)
        assert cli.main(["train", str(tmp_path / "run.toml")]) == EXIT_USAGE
    message = str(raised.value)
    assert message.startswith(f"config key 'log.prometheus' = '127.0.0.1:{port}': expected a free port")
    assert "\n" not in message and "'log.prometheus'" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"turnwise\[logging\]"):
        open_writers(config)


def test_an_evaluation_beside_the_run_takes_no_port(config, server, monkeypatch):
    """The run holds the port meanwhile."""

    class Loaded(Exception):
        pass

    def load(config, checkpoint, log):
        assert [type(writer) for writer in open_writers(config)] == [JsonLines]
        raise Loaded

    monkeypatch.setattr(eval_command, "load_run", load)
    with pytest.raises(Loaded):
        eval_command.evaluate_from_config(config)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("9400", "127.0.0.1:9400"),
        (":9400", "127.0.0.1:9400"),
        ("0.0.0.0:9400", "0.0.0.0:9400"),
        ("[::1]:9400", "[::1]:9400"),
        ("node-3:1", "node-3:1"),
    ],
)
def test_a_port_alone_is_of_this_machine(given, address):
    assert TrainConfig.model_validate({"log": {"prometheus": given}}).log.prometheus == address
    for wrong in ("", "localhost", "0", "127.0.0.1:0", "a:65536", "::1:9400", "a:b", "http://a:80"):
        with pytest.raises(ValueError, match="expected host:port, such as"):
            TrainConfig.model_validate({"log": {"prometheus": wrong}})


def test_metrics_that_are_added_stand_beside_those_of_their_step(server, port):
    """They count no second step, and replace nothing. Numbers of numpy are numbers."""
    server.log(3, {"reward": np.float32(0.5), "sampled_tokens": 10})
    server.add(3, {"validation": 0.25, "sampled_tokens": 5})
    server.add(2, {"validation": 0.75})
    found = samples(port)
    assert found[("turnwise_reward",)] == 0.5 and found[("turnwise_validation",)] == 0.25
    assert found[("turnwise_steps_total",)] == 1 and found[("turnwise_sampled_tokens_total",)] == 15
    server.log(4, {"reward": 1.0})
    assert ("turnwise_validation",) not in samples(port)
