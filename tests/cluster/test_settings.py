"""Settings of ``[cluster]`` that don't fit together are refused by their key, before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.cluster.commands import commands_of
from turnwise.cluster.placement import Role
from turnwise.cluster.supervisor import Place
from turnwise.settings.section import RunFacts
from turnwise.train.config.toml import ConfigError, parse_settings
from turnwise.train.validate import config_from_dict, contradictions

POOL = {"engine": "transformers", "options": {"max_batch_size": 1}}
RAY = {"backend": "ray", "engines": {"main": POOL}}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"cluster": {"learner": {"count": 2}}}, "cluster.learner"),
        ({"cluster": {"engines": {"main": POOL}}}, "cluster.engines"),
        ({"cluster": {"backend": "static", "engines": {"main": POOL}}}, "cluster.engines"),
        ({"cluster": {"backend": "static", "learner": {"count": 2}}}, "start ranks with torchrun"),
        ({"cluster": {**RAY, "arena": {"addresses": ["127.0.0.1:1"]}}}, "cluster.arena.addresses"),
        ({"cluster": RAY, "rollout": {"client": "vllm"}}, "rollout.client"),
        ({"cluster": {"backend": "ray", "arena": {"count": 1}}}, "workers need engines"),
        (
            {
                "cluster": {"backend": "ray", "engines": {"a": {**POOL, "policies": ["a", "b"]}}},
                "policies": {"a": {}, "b": {}},
            },
            "an engine serves one base",
        ),
        ({"cluster": RAY, "policies": {"a": {}, "b": {}}}, "an engine serves one base"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(settings: dict[str, Any], told: str) -> None:
    assert any(told in line for line in contradictions(parse_settings(settings)))


def test_pools_that_can_not_be() -> None:
    engines = {"a": {**POOL, "policies": ["b"]}}
    config = config_from_dict({"cluster": {"backend": "ray", "engines": engines}, "policies": {"a": {}, "b": {}}})
    task: Any = SimpleNamespace(name="t", actors=(), parts={}, episodes={}, credit=None)
    facts = RunFacts(config=config, task=task)
    assert any("policy 'a' is in none" in line for line in config.cluster.conflicts(facts, "cluster"))
    with pytest.raises(ConfigError, match="min_count = 3: expected at most count = 2"):
        config_from_dict({"cluster": {"engines": {"main": {"count": 2, "min_count": 3}}}})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cluster": RAY},
        {"cluster": {**RAY, "arena": {"count": 2}}},
        {"cluster": {"backend": "ray", "learner": {"count": 2}}},
        {"cluster": {"backend": "static", "arena": {"addresses": ["127.0.0.1:1"]}, "wait": 5}},
    ],
)
def test_settings_that_fit(settings: dict[str, Any]) -> None:
    assert contradictions(parse_settings(settings)) == []


def test_commands(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of ranks, addresses, options; and the secret is in no argument, no variable and no file."""
    monkeypatch.setenv("TURNWISE_CLUSTER_KEY", "of another run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    options = {"max_batch_size": 1, "engine_args": {"dtype": "float32"}, "dummy_weights": False}
    cluster = {"backend": "ray", "learner": {"count": 2}, "engines": {"main": {**POOL, "options": options}}}
    config = config_from_dict({"run_dir": str(tmp_path / "run"), "cluster": cluster})
    commands = commands_of(config, {"main": tmp_path / "model"}, "abracadabra")
    rank = commands["rank"](Place(Role("rank-1", "rank", {}), "10.0.0.1", 4000, 0))
    assert {name: rank.env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000",
    }  # fmt: skip
    engine = commands["engine"](Place(Role("engine-main-0", "engine", {}, "main"), "10.0.0.2", 4001, 0))
    words = " ".join(engine.arguments)
    assert f"serve {tmp_path / 'model'} --engine transformers --dummy-weights --host 10.0.0.2 --port 4001" in words
    assert words.endswith("--max-batch-size 1 --engine-arg dtype=float32")
    worker = commands["worker"](Place(Role("worker-0", "worker", {}), "10.0.0.3", 4002, 0))
    for command in (rank, engine, worker):
        assert command.arguments[:2] == ["--secret", "TURNWISE_CLUSTER_KEY"] and command.stdin == "abracadabra\n"
        assert "abracadabra" not in repr(command) and "AWS_SECRET_ACCESS_KEY" not in command.env
        assert "TURNWISE_CLUSTER_KEY" not in command.env and "RANK" not in worker.env
    assert not any("abracadabra" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
