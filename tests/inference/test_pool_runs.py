"""Whole runs that sample from a pool of engines in other processes, which are killed on the way."""

from __future__ import annotations

import asyncio
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

from turnwise.inference import PoolClient, VLLMServerClient
from turnwise.run.build import Run, build_run
from turnwise.run.checks import task_of, tiny_model
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

from .engine_server import KEY_VARIABLE, EngineServers
from .helpers import requests_of, sent, versions_of


def config_of(folder: Path, **rollout: Any) -> TrainConfig:
    return config_from_dict(
        {
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    config = config_from_dict({"run_dir": str(folder / "unused")})
    for part in tiny_model(config, task_of(config)):
        part.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[EngineServers]:
    with EngineServers(folder / "model") as servers:
        yield servers


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.trainer.policies["default"].weights()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run with one engine, in its own process."""
    run = build_run(config_of(folder, max_batch_rows=1))
    before = weights_of(run)
    run.train()
    assert not same(weights_of(run), before)
    return weights_of(run)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_killed_engine_changes_no_bit(
    seed: int, folder: Path, servers: EngineServers, undisturbed: dict[str, torch.Tensor]
) -> None:
    """One of two engines is killed at a random request, and comes back at another time of its own."""
    draw = random.Random(seed)
    victim, at = draw.randrange(2), draw.randrange(5, 35)
    run = build_run(config_of(folder, client="vllm-server", server={"url": servers.urls, "api_key_env": KEY_VARIABLE}))
    pool, killed = run.arena.client, []

    def kill() -> None:
        """Stop the engine first, to be sure that a request of it dies with it."""
        while not killed:
            if pool.stats()["requests"] >= at and pool._engines[servers.urls[victim]].outstanding:
                servers.kill(victim, signal.SIGSTOP)
                time.sleep(0.05)  # an answer that was already sent arrives
                if pool._engines[servers.urls[victim]].outstanding:
                    killed.append(pool.stats()["requests"])
                    servers.kill(victim)
                servers.kill(victim, signal.SIGCONT)
            time.sleep(0.0005)
        servers.start(victim)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train()
    thread.join(60)
    assert killed
    stats = pool.stats()
    run.close()
    assert same(weights_of(run), undisturbed), f"killed engine {victim} after {killed[0]} requests"
    assert stats[f"engines/{servers.urls[victim]}/deaths"] >= 1 and stats["retries"] >= 1
    assert any(f"engine {servers.urls[victim]} failed" in str(warning.message) for warning in told)
    assert all(stats[f"engines/{url}/requests"] >= 5 for url in servers.urls), "both engines had a share"


@pytest.mark.slow
def test_an_engine_that_stands_still_changes_no_bit(
    folder: Path, servers: EngineServers, undisturbed: dict[str, torch.Tensor]
) -> None:
    server = {"url": servers.urls, "api_key_env": KEY_VARIABLE, "dead_after": 0.5}
    run = build_run(config_of(folder, client="vllm-server", server=server))
    pool = run.arena.client

    def stop() -> None:
        while pool.stats()["requests"] < 20 or not pool._engines[servers.urls[1]].outstanding:
            time.sleep(0.0005)
        servers.kill(1, signal.SIGSTOP)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        run.train()
        thread.join()
        assert pool.serving() == servers.urls[:1]
    finally:
        servers.kill(1, signal.SIGCONT)
    run.close()
    assert same(weights_of(run), undisturbed)


@pytest.mark.slow
async def test_weights_that_change_on_the_way_are_refused(folder: Path, servers: EngineServers) -> None:
    """One bit arrives as another at one of two engines. That one serves nothing, until it is started again."""
    config = config_of(folder)
    tokenizer, model = tiny_model(config, task_of(config))
    servers.flip(1)
    engines = {
        url: VLLMServerClient(servers.endpoint(number, patience=0.0, retries=0), tokenizer, model)
        for number, url in enumerate(servers.urls)
    }
    async with PoolClient(engines) as pool:
        with pytest.warns(UserWarning, match=f"engine {servers.urls[1]} failed.*other sums than those that were sent"):
            pool.load_weights("default", sent(model), 1)
        assert pool.serving() == servers.urls[:1]
        assert versions_of(await pool.generate(requests_of(6))) == {1}
        assert pool.stats()[f"engines/{servers.urls[1]}/requests"] == 0
        await asyncio.to_thread(servers.kill, 1)
        await asyncio.to_thread(servers.start, 1)
        while len(pool.serving()) < 2:
            await asyncio.sleep(0.05)
        assert versions_of(await pool.generate(requests_of(6))) == {1}


def test_refusals(folder: Path) -> None:
    twice = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match=rf"'rollout.server.url'.*expected each server once.*got '{twice}' again"):
        build_run(config_of(folder, client="vllm-server", server={"url": [twice, twice]}))
    with pytest.raises(ConfigError, match=r"'rollout.server'.*can't be reached"):
        build_run(config_of(folder, client="vllm-server", server={"url": [twice, "http://127.0.0.1:2"]}))
    with pytest.raises(ConfigError, match=r"rollout\.server\.url"):
        config_of(folder, client="vllm-server", server={"url": []})
