"""Whole runs that sample from a pool of engines in other processes, which are killed on the way."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.inference.scripted import ByteTokenizer
from turnwise.run.build import build_run
from turnwise.run.checks import dry_run, task_of, tiny_model
from turnwise.run.clients import build_client, check_client
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict
from turnwise.types import ModelError

from ..trained import equal, weights_of
from .engine_server import KEY_VARIABLE, EngineServers, engine_here
from .helpers import EXACT, build, error_of, requests_of, sent, versions_of


def config_of(folder: Path, cluster: Any = None, **rollout: Any) -> TrainConfig:
    return config_from_dict(
        {
            "cluster": cluster or {},
            "run_dir": str(folder / f"run-{time.monotonic_ns()}"),
            "steps": 2,
            "threads": 1,
            "device": "cpu",
            "health": {"start_questions": 0},
            "rollout": {"prompts_per_step": 2, "branches": 3, **rollout},
            "policies": {"default": {"path": str(folder / "model")}},
            "credit": {"rule": "constant"},
            "update": {"lr": 1e-3},
            "eval": {"num_prompts": 3},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, narrow_model: None) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    config = config_from_dict({"run_dir": str(folder / "unused")})
    for part in tiny_model(config, task_of(config)):
        part.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[EngineServers]:
    os.environ.setdefault(KEY_VARIABLE, "sesame")
    with pytest.MonkeyPatch.context() as patch:  # engines of a cluster have the run's key
        patch.setenv("TURNWISE_CLUSTER_KEY", os.environ[KEY_VARIABLE])
        with EngineServers(folder / "model") as servers:
            yield servers


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run with one engine, in its own process."""
    run = build_run(config_of(folder, max_batch_rows=1))
    before = weights_of(run.trainer)
    run.train()
    assert not equal(weights_of(run.trainer), before)
    return weights_of(run.trainer)


@pytest.mark.parametrize(
    ("seed", "hangs"),
    [
        pytest.param(0, False, marks=[pytest.mark.slow, pytest.mark.representative]),
        *(pytest.param(seed, False, marks=pytest.mark.slow) for seed in range(1, 6)),
        pytest.param(17, True, marks=pytest.mark.slow),
    ],
)
def test_a_killed_engine_changes_no_bit(
    seed: int, hangs: bool, folder: Path, servers: EngineServers, undisturbed: dict[str, torch.Tensor]
) -> None:
    """One of two engines is killed at a random request, and comes back at another time of its own; or it hangs."""
    draw = random.Random(seed)
    victim, at = draw.randrange(2), draw.randrange(5, 35)
    server = {"url": servers.urls, "api_key_env": KEY_VARIABLE, "dead_after": 0.5 if hangs else 30.0}
    run = build_run(config_of(folder, client="vllm", server=server))
    pool, killed = run.arena.client, []

    def kill() -> None:
        """Stop the engine first, to be sure that a request of it dies with it."""
        while not killed:
            if pool.stats()["requests"] >= at and pool._engines[servers.urls[victim]].outstanding:
                servers.kill(victim, signal.SIGSTOP)
                time.sleep(0.05)  # an answer that was already sent arrives
                if pool._engines[servers.urls[victim]].outstanding:
                    killed.append(pool.stats()["requests"])
                    if hangs:
                        return
                    servers.kill(victim)
                servers.kill(victim, signal.SIGCONT)
            time.sleep(0.0005)
        servers.start(victim)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.train()
        thread.join(60)
        assert killed
        assert not hangs or pool.serving() == [servers.urls[1 - victim]]
    finally:
        servers.kill(victim, signal.SIGCONT)
    stats = pool.stats()
    run.close()
    assert equal(weights_of(run.trainer), undisturbed), f"killed engine {victim} after {killed[0]} requests"
    assert stats[f"engines/{servers.urls[victim]}/deaths"] >= 1 and stats["retries"] >= 1
    assert any(f"engine {servers.urls[victim]} failed" in str(warning.message) for warning in told)
    assert all(stats[f"engines/{url}/requests"] >= 5 for url in servers.urls), "both engines had a share"


def write_members(run_dir: Path, epoch: int, **engines: dict[str, str]) -> None:
    """Write the members of a run, the engines of each pool, as the supervisor of a cluster does."""
    file = run_dir / "cluster" / "members.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".new").write_text(json.dumps({"epoch": epoch, "engines": engines, "workers": {}}))
    file.with_suffix(".new").rename(file)


@pytest.mark.slow
@pytest.mark.representative
@pytest.mark.parametrize("transfer", ["safetensors", "gloo"])
def test_a_run_follows_the_members_of_its_cluster(
    transfer: str,
    folder: Path,
    servers: EngineServers,
    undisturbed: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run waits for its first engine, which then has another address. The old one still answers: nobody asks it."""
    monkeypatch.setenv("TURNWISE_CLUSTER_KEY", os.environ[KEY_VARIABLE])
    pool = {"count": 1, "engine": "transformers", "options": {"max_batch_size": 1}}
    cluster = {"backend": "ray", "address": "auto", "engines": {"main": pool}, "wait": 60.0}
    config = config_of(folder, cluster, server={"transfer": transfer})
    late = threading.Timer(0.5, write_members, [config.run_dir, 4], {"main": {"engine-0": servers.urls[0]}})
    late.start()
    run = build_run(config)
    client: Any = run.arena.client
    weights = config.run_dir / "cluster" / "weights"
    files = list(weights.glob("*.safetensors")) if weights.is_dir() else []
    assert bool(files) == (transfer == "safetensors"), "a folder that other hosts see too"
    labels: list[str] = []
    asked, reached, choose = itertools.count(1), threading.Event(), client._router.choose

    def choose_and_hold(*request: Any) -> str:
        """The first engine stops at the 15th request, so only the second one can answer it."""
        if next(asked) == 15:
            servers.kill(0, signal.SIGSTOP)
            reached.set()
        return choose(*request)

    def move() -> None:
        reached.wait()
        write_members(config.run_dir, 5, main={"engine-0": servers.urls[1]})
        while [engine.client._endpoint.url for engine in client._engines.values()] != servers.urls[1:]:
            time.sleep(0.01)
        servers.kill(0, signal.SIGCONT)
        labels.append(servers.label(0))

    monkeypatch.setattr(client._router, "choose", choose_and_hold)
    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    run.train()
    thread.join(60)
    assert client.serving() == ["engine-0"] and client.stats()["engines/engine-0/requests"] >= 5
    run.close()
    assert equal(weights_of(run.trainer), undisturbed)
    assert labels == [servers.label(0)], "the engine of before got weights of the run"
    assert servers.label(1) not in labels
    assert not (list(weights.iterdir()) if weights.is_dir() else [])


async def test_each_pool_has_its_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policies without a common base, one pool for each, with its own tokenizer; an engine that joins gets its
    pool's weights."""

    class Loud(ByteTokenizer):
        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            return super().decode(token_ids, skip_special_tokens) + "!"

    models = {"solver": build("served", seed=1), "critic": build("served", seed=2)}
    pools = {name: {"policies": [name], "engine": "transformers"} for name in models}
    config = config_from_dict(
        {
            "run_dir": str(tmp_path),
            "policies": {name: {} for name in models},
            "cluster": {"backend": "ray", "engines": pools, "wait": 60.0},
        }
    )
    with engine_here(build("served")) as (one, _), engine_here(build("served")) as (two, _):
        monkeypatch.setenv("TURNWISE_CLUSTER_KEY", os.environ[KEY_VARIABLE])
        write_members(tmp_path, 1, solver={"engine-0": one.url}, critic={"engine-1": two.url})
        check_client(config)
        async with build_client(config, {"solver": ByteTokenizer(), "critic": Loud()}, models) as client:
            for name, model in models.items():
                client.load_weights(name, sent(model), 3)
            with engine_here(build("served")) as (three, _):
                write_members(tmp_path, 2, solver={"engine-2": three.url}, critic={"engine-1": two.url})
                while client.clients["solver"].serving() != ["engine-2"]:
                    await asyncio.sleep(0.01)
                for name, model in models.items():
                    responses = await client.generate(requests_of(3, policy=name))
                    assert error_of(model, responses) < EXACT and versions_of(responses) == {3}
                    assert {response.text.endswith("!") for response in responses} == {name == "critic"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cluster": {"engines": {"a": {}, "b": {}}}}, r"'cluster.engines': policy 'default' is in 'a' and 'b'"),
        ({"cluster": {"engines": {"a": {"policies": ["other"]}}}}, r"policy '(other|default)' is in"),
        ({"loop": {"deterministic": True}, "cluster": {"engines": {"a": {}}}}, r"'loop.deterministic'.*engines 'a'"),
        (
            {"cluster": {"engines": {"a": {}}, "wait": 0.1}},
            r"no engine of pool 'a' was healthy within cluster.wait = 0.1",
        ),
    ],
)
def test_clusters_that_can_not_be(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNWISE_CLUSTER_KEY", "sesame")
    change = {**change, "cluster": {"backend": "ray", **change["cluster"]}}
    with pytest.raises((ConfigError, ModelError), match=said):
        config = config_from_dict({"run_dir": str(tmp_path), "rollout": {"group_size": 2}, **change})
        dry_run(config)
        check_client(config)
        build_client(config, ByteTokenizer(), dict.fromkeys(config.policies))


def test_refusals(folder: Path) -> None:
    twice = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match=rf"'rollout.server.url'.*expected each server once.*got '{twice}' again"):
        build_run(config_of(folder, client="vllm", server={"url": [twice, twice]}))
    with pytest.raises(ConfigError, match=r"'rollout.server'.*can't be reached"):
        build_run(config_of(folder, client="vllm", server={"url": [twice, "http://127.0.0.1:2"]}))
    with pytest.raises(ConfigError, match=r"rollout\.server\.url"):
        config_of(folder, client="vllm", server={"url": []})
