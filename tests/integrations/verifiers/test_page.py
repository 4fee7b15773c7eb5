"""The examples of docs/verifiers.md, of which tests/test_documents.py can't run those that import verifiers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import verifiers.v1 as vf

from turnwise.tasks import build_task

from .helpers import use_modules

PAGE = (Path(__file__).parents[3] / "docs" / "verifiers.md").read_text(encoding="utf-8")


def block(language):
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return found


def test_run_builds_the_task(monkeypatch):
    use_modules(monkeypatch)
    config = tomllib.loads(block("toml").replace("my_taskset", "tool_env"))
    task = build_task(config["task"], config["task_options"])
    assert task.env.config.agent.harness.id == "null"
    assert [actor.id for actor in task.actors] == ["agent"]


def test_module_is_an_environment(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "split_clues_env.py").write_text(block("py"))
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "split_clues_env", "size": 2}}))
    assert len(list(env.taskset)) == 2
    assert set(env.config.agent_harnesses()) == {"reader", "writer"}
