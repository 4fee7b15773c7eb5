"""Each extra alone, in a clean environment: what it declares is enough for its example to run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from .installed import closure, link

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

PLAY = """
import asyncio
from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.tasks import build_task

task = build_task("{task}")
player = task.random_player(0)
arena = Arena(ScriptedClient(lambda request: player(task.actors[0].id, request.messages)))
for actor in task.actors:
    arena.add_actor(actor)
for episode in task.episodes().values():
    arena.add_episode(episode)
[result] = asyncio.run(arena.generate_rollouts(task.requests(1, 1, 1)))
assert result.rollout.error is None, result.rollout.error
assert result.rollout.steps, "nobody made a move"
"""
GATEWAY = """
import asyncio, json, urllib.request
from turnwise.arena import Arena
from turnwise.chat.known_formats import families
from turnwise.inference import ScriptedClient
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.types import Actor, EpisodeRequest

def agent(question, models):
    model = models["solver"]
    body = json.dumps({"model": model.name, "messages": [{"role": "user", "content": question}]}).encode()
    headers = {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{model.base_url}/chat/completions", body, headers)
    return float(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] == "4")

assert "qwen3" in families()
arena = Arena(ScriptedClient(["4"]))
arena.add_actor(Actor("solver"))
arena.add_episode(AgentEpisode(agent, Gateway(), actors=["solver"]))
[result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("agent", "2 + 2 = ?")]))
assert result.rewards == {"solver": 1.0}, result.rollout.error
"""
MCP = """
import sys
from turnwise.integrations.mcp import MCPServer

program = "from mcp.server.fastmcp import FastMCP; s = FastMCP('a'); s.add_tool(lambda text: 4, 'size'); s.run()"
[tool] = MCPServer([sys.executable, "-c", program]).schemas()
assert tool["function"]["name"] == "size", tool
"""
EXAMPLES = {
    "gateway": GATEWAY,
    "gymnasium": PLAY.format(task="gymnasium:FrozenLake-v1"),
    "mcp": MCP,
    "openspiel": PLAY.format(task="openspiel:kuhn_poker"),
    "pettingzoo": PLAY.format(task="pettingzoo:tictactoe_v3"),
    "reasoning_gym": PLAY.format(task="reasoning_gym:countdown"),
    "textarena": PLAY.format(task="textarena:TicTacToe-v0"),
}
"""A program for each extra, with nothing installed but turnwise's own requirements and those of the extra."""


def pip(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with turnwise and its own requirements, linked from where they are installed, for all environments."""
    folder = tmp_path_factory.mktemp("core")
    for name in closure(("turnwise",)):
        link(name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXAMPLES)
def test_an_extra_alone_is_enough(extra: str, core: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "core.pth").write_text(f"{core}\n")
    wanted = PROJECT["optional-dependencies"][extra]
    pip("--python", str(python), "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt"), *wanted)
    done = subprocess.run(
        [python, "-I", "-c", EXAMPLES[extra]], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
