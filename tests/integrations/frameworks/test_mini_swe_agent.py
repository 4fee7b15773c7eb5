"""mini-swe-agent: its agent in a local shell, with bash as a function and as text."""

from __future__ import annotations

import pytest
import yaml

from .helpers import Case, call_of, cases, check


def run(question, models, kind, config):
    from minisweagent import package_dir
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment

    model = models["agent"]
    settings = yaml.safe_load((package_dir / "config" / config).read_text())
    llm = kind(
        model_name=f"openai/{model.name}",
        model_kwargs={"api_base": model.base_url, "api_key": model.api_key},
        cost_tracking="ignore_errors",  # the model has no price
    )
    agent = DefaultAgent(
        llm, LocalEnvironment(), **{k: v for k, v in settings["agent"].items() if k.endswith("template")}
    )
    result = agent.run(question["text"])
    return float(question["answer"] in result["submission"])


def bash_tool(question, models):
    from minisweagent.models.litellm_model import LitellmModel

    return run(question, models, LitellmModel, "mini.yaml")


def text(question, models):
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    return run(question, models, LitellmTextbasedModel, "mini_textbased.yaml")


ADD = "echo sum=$(($a + $b))"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo $sum"


def bash(command):
    return "I run it.\n" + call_of("bash", f'{{"command": "{command}"}}')


def block(command):
    return f"I run it.\n```mswea_bash_command\n{command}\n```"


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """Keep its settings out of the home folder, which it reads when it is imported."""
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")


@cases(
    Case(bash_tool, [bash(ADD), bash(SUBMIT)], {"agent": "`DefaultAgent`", "tool": "bash"}, shown="sum=$sum"),
    Case(text, [block(ADD), block(SUBMIT)], {"agent": "text", "tool": "bash"}, shown="sum=$sum"),
)
def test_runs(case, record_property):
    check(case, "mini-swe-agent", record_property)
