"""An agent behind the gateway, sampled by real vLLM: what the trainer computes is what the sampler told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.run.build import train_from_config
from turnwise.train.validate import config_from_dict

from .vllm_servers import lent_servers  # noqa: F401

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.usefixtures("lent_servers"),
    pytest.mark.xdist_group("vllm_runs"),
]

AGENT = """
from openai import AsyncOpenAI

actors = ["solver", "checker"]
questions = [f"{a} + {b} = ?" for a in range(20) for b in range(20)]


async def agent(question, models):
    async def ask(actor, messages):
        model = models[actor]
        async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            answer = await client.chat.completions.create(model=model.name, messages=messages, stop=["e"], seed=1)
        return {"role": "assistant", "content": answer.choices[0].message.content}

    chat = [{"role": "user", "content": question}]
    chat += [await ask("solver", chat), {"role": "user", "content": "Sure?"}]
    last = await ask("solver", chat)
    verdict = await ask("checker", [{"role": "user", "content": question}])
    return {"solver": float(len(last["content"])), "checker": float(len(verdict["content"]))}
"""


def test_the_trainer_computes_what_vllm_sampled_for_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "task": "gateway:vllm_agent:agent",
        "task_options": {"max_tokens": 12},
        "gateway": {"renderer": "template"},
        "run_dir": str(tmp_path / "run"),
        "steps": 3,
        "threads": 1,
        "health": {"start_questions": 0},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "client": "vllm", "vllm": {"kv_cache_gb": 0.0625}},
        "update": {"lr": 1e-3},
        "eval": {"num_prompts": 3},
    }
    train_from_config(config_from_dict(settings))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "sampler_trainer_logprob_max_diff" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert 0 < line["sampler_trainer_logprob_max_diff"] < 1e-5
        assert line["metric/gateway/calls/solver"] == 2 and line["metric/gateway/calls/checker"] == 1
        assert line["metric/gateway/extended_rows/solver"] == 1 and line["metric/gateway/rewritten_rows/solver"] == 0
