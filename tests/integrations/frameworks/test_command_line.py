"""Command-line agents by the recipes in docs/agents.md, in a container and with their own tools."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from turnwise.arena import Arena, Rubric
from turnwise.inference import ScriptedClient
from turnwise.integrations.gateway import Gateway, ProcessEpisode
from turnwise.integrations.gateway.service.server import GatewayServer
from turnwise.types import Actor, EpisodeRequest, Sampling

from .helpers import QUESTIONS, Model, call_of

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
PROGRAMS = Path(sys.prefix) / "claude/node_modules/.bin"
TRIAL = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
CONTAINED = shutil.which("bwrap") and not subprocess.run(TRIAL, check=False, capture_output=True).returncode
SUBMIT = call_of("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}')
AGENTS = {
    "claude": [call_of("Bash", '{"command": "echo $sum > answer.txt", "description": "Add"}'), "Done."],
    "mini": [call_of("bash", '{"command": "echo $sum > answer.txt"}'), SUBMIT],
    "codex": [call_of("exec_command", '{"cmd": "echo $sum > answer.txt"}'), "Done."],
}
"""The model's lines for each program."""
CELLS = {
    "claude": ("claude-code", "`claude -p`"),
    "mini": ("mini-swe-agent", "`mini`"),
    "codex": ("codex", "`codex exec`"),
}
"""Its row and cell in the table of docs/agents.md."""


def recipe(program: str, folder: Path) -> dict:
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (folder / "codex.toml").write_text(page.partition("```text\n# codex.toml\n")[2].partition("```")[0])
    tables = [tomllib.loads(block).get("gateway", {}) for block in blocks]
    table = next(table for table in tables if program in " ".join(table.get("command", ())).split())
    table["files"] = {name: folder / file for name, file in table.get("files", {}).items()}
    if CONTAINED:
        table["container"] = {"tool": "bwrap", "mounts": [str(Path(shutil.which(program)).parents[1])]}
    else:
        del table["container"]
    return table


def right(artifact, extras):
    return float(extras["files"].get("answer.txt", "").strip() == artifact["answer"])


@pytest.mark.parametrize("program", AGENTS)
def test_recipe(program, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("PATH", os.pathsep.join((str(PROGRAMS), str(Path(sys.executable).parent), os.environ["PATH"])))
    if shutil.which(program) is None and program != "mini":  # the registry of npm may be out of reach
        pytest.skip(f"no program {program!r}")
    model = Model(AGENTS[program])
    client = ScriptedClient(model, tokenizer=model.tokenizer)
    arena = Arena(client, sampling=Sampling(max_tokens=4096), failure_threshold=1.0)
    arena.add_actor(Actor("agent"))
    options = recipe(program, tmp_path)
    arena.add_episode(
        ProcessEpisode(options.pop("command"), Gateway(), rubric=Rubric([right]), timeout=120.0, **options)
    )
    refused, sampled, generate, reject = [], [], client.generate, GatewayServer._reject

    def rejected(self, dialect, error, seat):
        refused.append(f"{error.status} {error.param}: {error}")
        return reject(self, dialect, error, seat)

    async def generated(requests):
        responses = await generate(requests)
        sampled.extend((r.prompt_token_ids, r.completion_token_ids, r.logprobs) for r in responses)
        return responses

    client.generate = generated
    monkeypatch.setattr(GatewayServer, "_reject", rejected)
    questions = [{**question, "text": f"-{question['text']}"} for question in QUESTIONS]
    results = asyncio.run(arena.generate_rollouts([EpisodeRequest("process", question) for question in questions]))
    rollouts = [result.rollout for result in results]
    errors = [rollout.error for rollout in rollouts if rollout.error]
    assert not errors and not refused, "".join([*errors, *refused])
    assert [rollout.rewards for rollout in rollouts] == [{"agent": 1.0}] * 2
    rows = [
        (list(step.prompt_token_ids), list(step.completion_token_ids), list(step.completion_logprobs))
        for rollout in rollouts
        for step in rollout.steps
    ]
    assert len(rows) == 4 and sorted(rows) == sorted(sampled)
    assert not any("rewritten" in step.info for rollout in rollouts for step in rollout.steps)
    framework, agent = CELLS[program]
    shown = [] if program == "mini" else subprocess.check_output([program, "--version"], text=True).split()
    version = next((word for word in shown if word[0].isdigit()), "") or metadata.version(framework)
    for column, cell in {"framework": framework, "version": version, "agent": agent, "tool": "bash"}.items():
        record_property(column, cell)
