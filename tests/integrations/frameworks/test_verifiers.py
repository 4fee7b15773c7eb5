"""verifiers: an environment whose agent has a tool, with verifiers' own client at the gateway's address."""

from __future__ import annotations

import os

import verifiers.v1 as vf

from ..verifiers.helpers import use_modules
from .helpers import ADDS, Case, cases, check


async def environment(question, models):
    from tool_env import ToolTask, load_env

    model, env = models["agent"], load_env()
    key = f"KEY_{question['answer']}"
    os.environ[key] = model.api_key
    client = vf.EvalClientConfig(base_url=model.base_url, api_key_var=key)
    task = ToolTask(vf.TaskData(prompt=question["text"]), env.taskset.config.task)
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model=model.name, client=client))
    [trace] = episode.traces
    return float(question["answer"] in trace.last_reply)


SHOWN = "<tool_response>\n$sum\n</tool_response>"


@cases(Case(environment, ADDS, {"agent": "`Env.run_episode`", "tool": "function"}, shown=SHOWN))
def test_runs(case, record_property, monkeypatch):
    use_modules(monkeypatch)
    for answer in ("13", "42"):
        monkeypatch.setenv(f"KEY_{answer}", "")
    check(case, "verifiers", record_property)
