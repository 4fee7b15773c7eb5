"""Agents of JavaScript frameworks, each a script that Node runs in a folder of the episode."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from turnwise.integrations.gateway import ProcessEpisode

from .helpers import CALL, Case, call_of, check

PACKAGES = Path(sys.prefix) / "javascript/node_modules"
SCRIPTS = Path(__file__).parent / "javascript"
pytestmark = pytest.mark.skipif(
    not PACKAGES.exists() or shutil.which("node") is None, reason="npm is needed to install the packages"
)
THINKS = ["<think>\nHm.\n</think>\n\nI add." + CALL, "It is $sum."]
"""Reasoning, text and a call: items that some clients name by their ids."""
HANDS_OFF = [call_of("transfer_to_adder", "{}"), *THINKS]


@dataclass(frozen=True)
class Script:
    """One way to run a script, and the cells of the table in docs/agents.md that it fills."""

    name: str
    package: str
    words: str
    agent: str
    lines: tuple[str, ...] = tuple(THINKS)
    rewritten: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.name, *self.words.split()])


@pytest.mark.parametrize(
    "script",
    [
        Script("ai_sdk", "ai", "responses", "`generateText`, Responses"),
        Script("ai_sdk", "ai", "responses streamed", "`streamText`"),
        Script("ai_sdk", "ai", "chat", "Chat Completions"),
        Script("ai_sdk", "ai", "messages", "Messages"),
        Script("ai_sdk", "ai", "messages streamed", "Messages"),
        Script("langchain", "langchain", "chat", "`createAgent`, Chat Completions"),
        Script("langchain", "langchain", "chat streamed", "streamed"),
        Script("langchain", "langchain", "responses", "Responses"),
        Script("langchain", "langchain", "messages", "Messages"),
        Script("openai_agents", "@openai/agents", "responses", "`run`, Responses"),
        Script("openai_agents", "@openai/agents", "responses streamed", "streamed"),
        Script("openai_agents", "@openai/agents", "chat", "Chat Completions"),
        Script("openai_agents", "@openai/agents", "responses handoff", "hand-off", tuple(HANDS_OFF), ("history",)),
        Script("mastra", "@mastra/core", "generate", "`Agent.generate`"),
        Script("mastra", "@mastra/core", "streamed", "`Agent.stream`"),
    ],
    ids=str,
)
def test_runs(script, tmp_path, record_property):
    source = tmp_path / "agent.mjs"
    shutil.copyfile(SCRIPTS / f"{script.name}.mjs", source)
    (tmp_path / "node_modules").symlink_to(PACKAGES)

    def episode(agent, gateway, **options):
        command = ["node", "agent.mjs", *script.words.split()]
        return ProcessEpisode(command, gateway, files={"agent.mjs": source}, **options)

    version = json.loads((PACKAGES / script.package / "package.json").read_text())["version"]
    case = Case(
        None,
        script.lines,
        {"agent": script.agent, "tool": "function"},
        rewritten=dict.fromkeys(script.rewritten, 2),
        shown="sum is $sum",
    )
    name = f"{script.package} (npm)"
    rollouts = check(case, name, record_property, version, episode)
    for rollout in rollouts:
        extends = [step.info.get("extends") for step in rollout.steps]
        assert extends[-2:] == [None, len(extends) - 2], "a tool's result goes on from its call"
