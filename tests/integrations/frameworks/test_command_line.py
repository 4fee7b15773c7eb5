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
from turnwise.samples.collect import collect_samples
from turnwise.types import Actor, EpisodeRequest, Sampling

from .helpers import QUESTIONS, Model, call_of, own_prompt

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
PROGRAMS = Path(sys.prefix) / "claude/node_modules/.bin"
TRIAL = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
CONTAINED = shutil.which("bwrap") and not subprocess.run(TRIAL, check=False, capture_output=True).returncode
SUBMIT = call_of("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}')
AGENTS = {
    "claude": [call_of("Bash", '{"command": "echo $sum > answer.txt", "description": "Add"}'), "Done."],
    "mini": [call_of("bash", '{"command": "echo $sum > answer.txt"}'), SUBMIT],
    "codex": [call_of("exec_command", '{"cmd": "echo $sum > answer.txt"}'), "Done."],
    "opencode": [call_of("bash", '{"command": "echo $sum > answer.txt", "description": "Add"}'), "Done."],
    "qwen": [
        call_of("run_shell_command", '{"command": "echo $sum > answer.txt", "is_background": false}'),
        "Done.",
    ],
}
"""The model's lines for each program."""
CELLS = {
    "claude": ("claude-code", "`claude -p`"),
    "mini": ("mini-swe-agent", "`mini`"),
    "codex": ("codex", "`codex exec`"),
    "opencode": ("opencode", "`opencode run`"),
    "qwen": ("qwen-code", "`qwen --prompt`"),
}
"""Its row and cell in the table of docs/agents.md."""


def recipe(program: str, folder: Path) -> tuple[dict, list[str]]:
    """Return the settings of a program in the page, whose further files are in ``folder``, and its untrained actors."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in re.findall(r"```text\n(?:#|//) (\S+)\n(.*?)```", page, flags=re.DOTALL):
        (folder / name).write_text(text)
    tables = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)]
    whole = next(one for one in tables if program in " ".join(one.get("gateway", {}).get("command", ())).split())
    table, untrained = whole["gateway"], whole.get("task_options", {}).get("untrained", [])
    table["files"] = {name: folder / file for name, file in table.get("files", {}).items()}
    if CONTAINED:
        table["container"] = {"tool": "bwrap", "mounts": [str(Path(shutil.which(program)).parents[1])]}
    else:
        del table["container"]
    return table, untrained


def right(artifact, extras):
    return float(extras["files"].get("answer.txt", "").strip() == artifact["answer"])


@pytest.mark.parametrize("program", AGENTS)
def test_recipe(program, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("PATH", os.pathsep.join((str(PROGRAMS), str(Path(sys.executable).parent), os.environ["PATH"])))
    if shutil.which(program) is None and program != "mini":  # the registry of npm may be out of reach
        pytest.skip(f"no program {program!r}")
    model = Model(AGENTS[program])
    options, untrained = recipe(program, tmp_path)

    def script(request):
        titles = "Generate a title for this conversation" in model.tokenizer.decode(list(request.prompt_token_ids))
        return "A sum" if titles and untrained else model(request)

    client = ScriptedClient(script, tokenizer=model.tokenizer)
    arena = Arena(client, sampling=Sampling(max_tokens=4096), failure_threshold=1.0)
    actors = ["agent", *untrained]
    for actor in actors:
        arena.add_actor(Actor(actor))
    options |= {"actors": actors, "untrained": untrained, "rubric": Rubric([right]), "timeout": 120.0}
    arena.add_episode(ProcessEpisode(options.pop("command"), Gateway(), **options))
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
    assert [rollout.rewards["agent"] for rollout in rollouts] == [1.0] * 2
    rows = [
        (list(step.prompt_token_ids), list(step.completion_token_ids), list(step.completion_logprobs))
        for rollout in rollouts
        for step in rollout.steps
    ]
    steps = [step for rollout in rollouts for step in rollout.steps]
    assert len(rows) == 4 + 2 * len(untrained) and sorted(rows) == sorted(sampled)
    assert not any("rewritten" in step.info for step in steps)
    assert {step.actor_id for step in steps if step.trainable} == {"agent"} and len(collect_samples(results)) == 4
    assert not any("gateway/unrelated_rows/agent" in rollout.metrics for rollout in rollouts)
    record_property("prompt", own_prompt(rollouts))
    framework, agent = CELLS[program]
    shown = [] if program == "mini" else subprocess.check_output([program, "--version"], text=True).split()
    version = next((word for word in shown if word[0].isdigit()), "") or metadata.version(framework)
    for column, cell in {"framework": framework, "version": version, "agent": agent, "tool": "bash"}.items():
        record_property(column, cell)
