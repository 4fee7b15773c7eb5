"""A client's totals and peaks as metrics of a step."""

from __future__ import annotations

import json

import pytest

from turnwise.train.log.client_metrics import ClientMetrics


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


def test_engines_of_a_pool_are_told_one_by_one():
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


def test_a_client_that_tells_nothing():
    assert ClientMetrics(object()).take() == {}


async def test_a_run_writes_them_down(make_trainer):
    trainer = make_trainer(steps=2, eval={"every": 1, "num_prompts": 4})
    await trainer.run()
    lines = [json.loads(line) for line in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        told = {name.partition("/")[2]: value for name, value in line.items() if name.startswith("inference/")}
        if line["step"] == 0:
            assert told == {}
            continue
        assert told.keys() == {"tokens_per_second", "prefix_cache_hit_rate", "decoded_share"}
        assert 0 < told["decoded_share"] <= 1
        assert 0 < told["prefix_cache_hit_rate"] < 1 < told["tokens_per_second"]
