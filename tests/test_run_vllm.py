"""Whole runs that sample with vLLM: what the trainer computes is what the sampler told, step after step."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from turnwise.cli.run.eval import evaluate_from_config
from turnwise.run.build import build_run, train_from_config
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

from .families import save_families
from .trained import rows_of
from .vllm_servers import lent_servers  # noqa: F401

pytestmark = pytest.mark.xdist_group("vllm_runs")

SMALL = {
    "steps": 4,
    "threads": 1,
    "health": {"start_questions": 0},  # these models know nothing yet
    "warm_start": {"steps": 10, "batch_size": 16},
    "rollout": {"prompts_per_step": 4, "branches": 2, "client": "vllm", "vllm": {"kv_cache_gb": 0.0625}},
    "credit": {"rule": "constant"},  # every sample trains, whatever it was worth
    "update": {"lr": 1e-3},
    "eval": {"num_prompts": 3},
}


def config_of(run_dir, **changes):
    return config_from_dict({**SMALL, "run_dir": str(run_dir), **changes})


def errors_of(line):
    return [value for key, value in line.items() if key.endswith("sampler_trainer_logprob_max_diff")]


def engines_of(server):
    """The processes of the server's group but for its leader."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            if int(rest.split()[2]) == server.pid != int(stat.parent.name) and "Engine" in name:
                found.append(int(stat.parent.name))
    return found


@pytest.mark.vllm
@pytest.mark.usefixtures("lent_servers")
def test_an_engine_that_is_killed_in_the_middle_costs_no_row(tmp_path):
    """What the trainer computes is what vLLM sampled, also by the server that comes after the one whose engine died."""
    run = build_run(config_of(tmp_path))
    client = run.arena.client
    [server] = client.servers
    restarts = server.restarts
    [engine] = client.clients["default"]._engines.values()
    killed = []

    def kill_once():
        """While the third step samples."""
        while not killed:
            if len(metrics.read_text().splitlines() if metrics.exists() else ()) == 2 and engine.outstanding >= 4:
                killed.extend(engines_of(server))
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.001)

    metrics = tmp_path / "metrics.jsonl"
    threading.Thread(target=kill_once, daemon=True).start()
    with pytest.warns(UserWarning, match="its requests are sent again"):
        run.train()
    lines = rows_of(tmp_path)
    assert len(killed) == 1 and server.restarts == restarts + 1
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["inference/restarts"] for line in lines] == [0, 0, 1, 0]
    for line in lines:
        assert line["default/updates"] >= 1
        assert 0 < errors_of(line)[0] < 1e-5, f"step {line['step']}"
        assert (line["episodes/failed"], line["episodes/retried"]) == (0, 0)
        assert (line["episodes"], line["samples"]) == (lines[0]["episodes"], lines[0]["samples"])
        assert line["inference/running"] >= 1 and "inference/kv_cache_use" in line
    answered = run.arena.client.stats()["generated_tokens"]
    assert answered == sum(line["sampled_tokens"] for line in lines), "no answer is lost, and none comes twice"
    assert run.arena.client.version("default") == 4
    asyncio.run(run.arena.client.close())
    assert evaluate_from_config(run.config).episodes == 3


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("lent_servers")
@pytest.mark.parametrize("loop", [{"max_staleness": 1}, {"max_staleness": 1, "in_flight_updates": True}])
def test_adapters_train_beside_sampling(tmp_path, loop):
    lora = {"path": "tiny", "lora": {"rank": 4, "alpha": 8}}
    config = config_of(
        tmp_path,
        loop=loop,
        policies={"one": lora, "two": lora},
        actors={"proposer": "one", "reviser": "two"},
        warm_start={"steps": 0},
    )
    run = train_from_config(config)
    assert run.trainer.progress.step == 4
    assert {policy.version for policy in run.trainer.policies.values()} == {4}
    assert len(run.arena.client.servers) == 1
    assert max(errors_of(rows_of(tmp_path)[0])) < 1e-5, "the first batch is of the first weights"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("lent_servers")
def test_each_family_has_its_server(tmp_path):
    """Two models with other tokens, templates and ends: each server gets its own weights, which the trainer repeats."""
    policies = dict(zip(("proposer", "reviser"), ({"path": path} for path in save_families(tmp_path)), strict=True))
    changes = {"policy_sharing": "model_per_actor", "policies": policies, "steps": 3, "update": {"lr": 1e-2}}
    run = train_from_config(config_of(tmp_path / "run", **changes))
    client = run.arena.client
    assert len(client.servers) == 2 and client.clients["proposer"] is not client.clients["reviser"]
    assert {policy.version for policy in run.trainer.policies.values()} == {3}
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 3 and max(value for row in rows for value in errors_of(row)) < 1e-4
    for row in rows_of(tmp_path / "run", "rollouts.jsonl"):
        for step in row["steps"]:
            text = run.arena.own_tokenizers[step["policy"]].decode(step["completion_token_ids"])
            assert "".join(step["completion_tokens"]) == text


def test_servers_that_can_not_be(tmp_path):
    rollout, url = SMALL["rollout"], {"url": "http://127.0.0.1:9"}
    for server, said in {
        "url='nowhere'": {"url": "nowhere"},
        "http://127.0.0.1:9 can't be reached; is it started": url,
        "can't be reached, for 0.3 seconds": {**url, "wait": 0.3},
        "NO_SUCH_KEY": {**url, "api_key_env": "NO_SUCH_KEY"},
    }.items():
        with pytest.raises(ConfigError, match=rf"'rollout.server'.*{server}"):
            build_run(config_of(tmp_path, rollout={**rollout, "server": said}))


@pytest.mark.vllm
@pytest.mark.slow
def test_settings_that_vllm_refuses(tmp_path):
    rollout = SMALL["rollout"]
    for key, said in {"blocks": "unrecognized arguments: --blocks", "host": "the server sets this one itself"}.items():
        with pytest.raises(ConfigError, match=rf"(?s)'rollout.client' = 'vllm'.*{said}"):
            build_run(config_of(tmp_path, rollout={**rollout, "vllm": {"engine_args": {key: 1}}}))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_the_extra_is_named(tmp_path):
    with pytest.raises(ImportError, match=r"pip install 'turnwise\[vllm\]'"):
        build_run(config_of(tmp_path))


def test_no_bit_for_bit_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"'loop.deterministic'.*rollout.client"):
        config_of(tmp_path, loop={"max_staleness": 1, "deterministic": True})
