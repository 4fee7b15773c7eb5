"""Tools of MCP servers: real servers as processes and over HTTP, one per episode or shared, and how each fails."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnwise.arena import Arena, BatchFailedError, EpisodeCheckpoints, TreeSampler
from turnwise.integrations.gateway.process.output import Tail
from turnwise.integrations.mcp import MCPServer, OpenServer, text_of
from turnwise.replay.replay import replay
from turnwise.run.build import train_from_config
from turnwise.run.checks import dry_run
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict
from turnwise.types import EpisodeRequest, GenerateResult, ModelRequest, ToolSourceError

from ..arena.replaying import play as replayed
from ..arena.replaying import record
from ..arena.test_episode_checkpoints import kill
from ..arena.test_tools import Chat, add, arena_of, call, prompts
from ..trained import SMALL, rows_of

pytestmark = [pytest.mark.needs("mcp"), pytest.mark.filterwarnings("ignore:MCP server|tool ':RuntimeWarning")]

PATHS = {"PYTHONPATH": os.pathsep.join(sys.path)}
SQLITE = MCPServer(
    [sys.executable, "-c", "import mcp_server_sqlite; mcp_server_sqlite.main()", "--db-path", "{folder}/state.db"],
    env=PATHS,
    name="sqlite",
)


def own(*words: Any, **options: Any) -> MCPServer:
    file = str(Path(__file__).with_name("mcp_server.py"))
    return MCPServer([sys.executable, file, *map(str, words or ["stdio"])], **{"name": "own", **options})


def generate(arena: Arena, *questions: Any, **options: Any) -> list[GenerateResult]:
    arena.failure_threshold = 1.0
    return asyncio.run(arena.generate_rollouts([EpisodeRequest("sum", each, **options) for each in questions]))


def answers(result: GenerateResult) -> list[str]:
    """What the tools of an episode answered."""
    return [message["content"] for message in result.rollout.steps[-1].prompt if message["role"] == "tool"]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(pids: Path) -> list[int]:
    """The processes of the servers that wrote their ids, and of their children."""
    return [int(word) for word in pids.read_text().split()] if pids.exists() else []


# -- a server of PyPI --------------------------------------------------------------------------------------------------
def query(request: ModelRequest) -> str:
    """A model that keeps the number of its question in a table, and answers with what is in the table then."""
    *_, question = [message["content"] for message in request.messages if message["role"] == "user"]
    results = [message["content"] for message in request.messages if message["role"] == "tool"]
    calls = [
        call("create_table", query="CREATE TABLE kept (number)"),
        call("write_query", query=f"INSERT INTO kept VALUES ({question})"),
        call("read_query", query="SELECT number FROM kept"),
    ]
    return calls[len(results)] if len(results) < len(calls) else str(re.findall(r"\d+", results[-1]))


@pytest.mark.needs("mcp_server_sqlite")
def test_each_episode_has_a_server_of_its_own_and_a_replay_needs_none() -> None:
    arena = arena_of(query, SQLITE)
    before = set(os.listdir(tempfile.gettempdir()))
    row, other = record(arena, [EpisodeRequest("sum", number) for number in ("4", "5")])
    assert [each["steps"][-1]["completion"] for each in (row, other)] == ["['4']", "['5']"]
    assert '"name": "read_query"' in prompts(arena)[0], "the model sees the schemas"
    assert not {name for name in set(os.listdir(tempfile.gettempdir())) - before if "turnwise-mcp" in name}
    gone = replace(SQLITE, command=["no-such-server"])
    result, divergence, _ = replayed(arena_of(query, gone), row)
    assert divergence is None and result.rollout.steps[-1].completion == "['4']"


# -- what servers answer -----------------------------------------------------------------------------------------------
def test_errors_parts_schemas_names_and_limits() -> None:
    first = call("far", way={"stops": [{"x": 3}]}) + call("parts") + call("fail", text="no") + call("look_up")
    arena = arena_of([first + call("hang") + call("add", a=1, b=2), "4"], add, own(), tool_timeout=2.0, max_tokens=600)
    [result] = generate(arena, "2 + 2 = ?")
    assert result.rollout.error is None
    assert answers(result) == [
        "Way to 3",
        "one\n[image: image/png, not shown]\nof a file\ntwo",
        "error: MCPToolError: Error executing tool fail: no",
        "found",
        "error: TimeoutError: no answer within 2 s",
        "3",
    ]
    assert result.rollout.facts.mishaps == {"tool_parts_not_shown": 1, "tool_errors/fail": 1, "tool_errors/hang": 1}
    shown = prompts(arena)[0]
    assert "look.up" not in shown and "$defs" not in shown and '"stops"' in shown, "references are resolved"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("a.b", "a b"), "the tools 'a.b' and 'a b' would both be 'a_b'"),
        (("a" * 65,), "expected at most 64 characters"),
    ],
)
def test_names_that_become_one_or_are_too_long(names: tuple[str, ...], told: str) -> None:
    with pytest.raises(ToolSourceError, match=told):
        OpenServer(MCPServer(url="http://a"), None, Tail(), [{"name": name} for name in names])


def test_an_answer_without_text_is_its_data() -> None:
    assert text_of({"content": [], "structuredContent": {"a": ["é"]}}) == '{"a": ["é"]}'
    blob = {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "application/pdf", "blob": "AA=="}}
    link = {"type": "resource_link", "uri": "file:///b", "name": "b"}
    assert text_of({"content": [blob, link]}) == "[resource: application/pdf, not shown]\n[resource_link: file:///b]"


def test_equal_names_are_refused_and_a_prefix_makes_them_differ() -> None:
    def count() -> int:
        """Count."""
        return 7

    one, other = own(only=["count"], shared=True), own(name="other", only=["count"], shared=True)
    prefixed, wrong = replace(other, prefix="b_"), own(only=["cuont"])
    cases: dict[tuple[Any, ...], str] = {
        (one, other): "tools of actor 'solver': 'own' and 'other' both have 'count'",
        (count, one): "tools of actor 'solver': the actor and 'own' both have 'count'",
        (wrong,): "MCP server 'own' has no tool 'cuont' of only: it has ['count', 'far',",
        (one, prefixed): "",
    }
    arenas = [arena_of([call("count") + call("b_count"), "4"], *tools) for tools in cases]

    async def main() -> list[list[GenerateResult]]:
        for arena in arenas:
            arena.failure_threshold = 1.0
        return await asyncio.gather(*[arena.generate_rollouts([EpisodeRequest("sum", "")]) for arena in arenas])

    results = [result for [result] in asyncio.run(main())]
    assert answers(results.pop()) == ["1", "1"]
    for result, told in zip(results, cases.values(), strict=False):
        assert told in str(result.rollout.error)


# -- servers that fail -------------------------------------------------------------------------------------------------
def test_a_server_that_dies_fails_the_episode_and_a_retry_gets_a_new_one(tmp_path: Path) -> None:
    lived: list[str] = []

    def script(request: ModelRequest) -> str:
        if request.messages[-1]["role"] == "tool":
            return "4"
        lived.append("")
        return call("die") if len(lived) == 1 else call("count")

    server = own("stdio", tmp_path / "pids")
    [result] = generate(arena_of(lambda request: call("die"), server), "2 + 2 = ?")
    assert "ToolSourceError: MCP server 'own' ended; its last output:\n" in str(result.rollout.error)
    assert "no more tea" in str(result.rollout.error) and result.rollout.rewards == {}
    arena = arena_of(script, server)
    arena.retries = 1
    [result] = generate(arena, "2 + 2 = ?")
    assert result.rewards == {"solver": 1.0} and answers(result) == ["1"]
    assert len(started(tmp_path / "pids")) == 6 and not any(map(is_running, started(tmp_path / "pids")))


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (MCPServer(["no-such-server"]), "MCP server 'no-such-server': there is no program 'no-such-server' on PATH"),
        (MCPServer([sys.executable, "-c", "exit('wants a key')"], name="bare"), "did not start.*\n.*\n?wants a key"),
        (own("slow", "PIDS", start_timeout=2.0), "MCP server 'own' did not start within start_timeout=2 s"),
        (MCPServer(url="http://127.0.0.1:9/mcp"), r"'127.0.0.1:9' did not start \(ConnectError: "),
    ],
    ids=["no program", "no server", "slow", "no host"],
)
def test_a_server_that_can_not_start_fails_the_episode(server: MCPServer, told: str, tmp_path: Path) -> None:
    pids = str(tmp_path / "pids")
    server = replace(server, command=[pids if word == "PIDS" else word for word in server.command])
    [result] = generate(arena_of(["4"], server), "2 + 2 = ?")
    assert re.search(told, str(result.rollout.error)), result.rollout.error
    assert not any(map(is_running, started(Path(pids))))


async def test_a_cancellation_ends_a_server_that_starts(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    running = asyncio.create_task(arena_of(["4"], own("slow", pids)).generate_rollouts([EpisodeRequest("sum", "")]))
    while len(started(pids)) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(map(is_running, started(pids)))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, r"MCPServer\(command=\(\), url=''\): expected one of them"),
        ({"command": "my-server"}, "expected a list of texts"),
        ({"url": "my-server"}, "expected the http:// or https:// URL"),
        ({"url": "http://a", "only": "a"}, "expected a list of names of tools"),
        ({"url": "http://a", "start_timeout": 0}, "expected seconds > 0"),
        ({"url": "http://a", "prefix": "a b"}, "expected letters, digits"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MCPServer(**options)


# -- shared servers, and servers behind a URL --------------------------------------------------------------------------
def counting(request: ModelRequest) -> str:
    return "4" if request.messages[-1]["role"] == "tool" else call("count")


def test_a_shared_server_serves_all_episodes_until_the_loop_ends(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def script(request: ModelRequest) -> str:
        *_, question = [message["content"] for message in request.messages if message["role"] == "user"]
        return call("die") if question == "die" else counting(request)

    arena = arena_of(script, own("stdio", pids, shared=True), own("stdio", pids, shared=True, prefix="b_"))
    arena.failure_threshold = 1.0

    async def steps() -> list[Any]:
        found: list[Any] = []
        for question in ("a", "b", "die", "c"):
            [result] = await arena.generate_rollouts([EpisodeRequest("sum", question)])
            found.append(answers(result) if result.rollout.error is None else "failed")
        assert all(map(is_running, started(pids)[-2:]))
        return found

    assert asyncio.run(steps()) == [["1"], ["2"], "failed", ["1"]]
    assert len(started(pids)) == 6 and not any(map(is_running, started(pids)))


@pytest.fixture
def served() -> Iterator[Callable[..., MCPServer]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(own(port).command, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield lambda **options: MCPServer(url=f"http://127.0.0.1:{port}/mcp", **options)
    finally:
        process.kill()
        process.wait()


def test_a_server_behind_a_url(served: Callable[..., MCPServer]) -> None:
    results = generate(arena_of(counting, served()), "a", "b")
    assert sorted(answers(result)[0] for result in results) == ["1", "2"], "the sessions are of one process"
    [result] = generate(arena_of(counting, served(shared=True, headers={"x-key": "a"})), "a")
    assert answers(result) == ["3"]


# -- trees, checkpoints, workers ---------------------------------------------------------------------------------------
def test_a_tree_takes_shared_servers_alone() -> None:
    tree = Chat(sampler=TreeSampler(branches=2), max_turns=1)
    request = [EpisodeRequest("chat", "2 + 2 = ?")]
    with pytest.raises(BatchFailedError, match="the tools of actor 'solver' are those of 'own', which has a state of"):
        asyncio.run(arena_of(["4"], own(), episode=tree).generate_rollouts(request))
    script = lambda request: "4" if request.messages[-1]["role"] == "tool" else call("count")  # noqa: E731
    arena = arena_of(script, own(shared=True), episode=tree)
    rows = record(arena, request)
    assert {step["branch"] for step in rows[0]["steps"]} == {0, 1}
    assert replayed(arena_of(script, replace(own(shared=True), command=["gone"]), episode=tree), rows[0])[1] is None


@pytest.mark.parametrize(("shared", "asked"), [(False, 4), (True, 2)])
def test_an_episode_with_a_server_of_its_own_is_played_again_after_a_kill(
    shared: bool, asked: int, tmp_path: Path
) -> None:
    def play(script: Any) -> tuple[Arena, list[GenerateResult]]:
        arena = arena_of(script, own(shared=shared), episode=Chat())
        arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
        return arena, asyncio.run(arena.generate_rollouts([EpisodeRequest("chat", "2 + 2 = ?")]))

    def ends(request: ModelRequest) -> str:
        if request.messages[-1]["role"] == "assistant":  # the second turn
            kill()
        return counting(request)

    with warnings.catch_warnings(record=True) as warned, pytest.raises(asyncio.CancelledError):
        play(ends)
    assert any("(own) are not saved" in str(one.message) for one in warned) != shared
    arena, [result] = play(counting)
    assert len(result.rollout.steps) == 4 and len(prompts(arena)) == asked


TASK = """
import os, sys
from dataclasses import replace
from turnwise import Rubric, SingleTurnEpisode
from turnwise.integrations.mcp import MCPServer
from turnwise.tasks import OwnTask

ASK = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
SERVER = MCPServer(os.environ["SERVER"].split(), only=["count"], name="own")

def once(completion):
    return float(completion == "1")

class Once(SingleTurnEpisode):
    episode_type = "once"
    rubric = Rubric([once])

    def get_prompt(self, artifact):
        return artifact["question"]

class Counting(OwnTask):
    name, success_metric, system_prompts = "once", "once/solver", {"solver": "Count."}

    @property
    def actors(self):
        return [replace(actor, tools=[SERVER], max_tool_rounds=1) for actor in super().actors]

    def questions(self):
        return [f"Count {n}" for n in range(40)]

    def episodes(self, tree=None):
        return {"once": Once()}

    def demonstrations(self, n, seed):
        return [("solver", [{"role": "user", "content": f"Count {k % 40}"}], ASK) for k in range(n)]

    def texts(self):
        return [*super().texts(), ASK, "1"]
"""


@pytest.mark.slow
@pytest.mark.representative
def test_a_run_with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, narrow_model: None) -> None:
    """Warm start with the server's schemas, training, evaluation, and a replay where the server is gone."""
    (tmp_path / "counting_by_mcp.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SERVER", shlex.join(own("stdio", tmp_path / "pids").command))
    changes = {
        "task": "counting_by_mcp:Counting",
        "task_options": {"max_tokens": 40},
        "rollout": {"prompts_per_step": 2, "group_size": 2},
    }
    changes |= {"warm_start": {"steps": 150, "batch_size": 8, "lr": 1e-2}, "steps": 1}
    config = config_from_dict({**SMALL, "run_dir": str(tmp_path / "run"), **changes})
    run = train_from_config(config)
    assert run.evaluate().failed == 0
    run.close()
    rows = rows_of(config.run_dir, "rollouts.jsonl")
    called = [row for row in rows if any("ok" in step["info"].get("tool_calls", ()) for step in row["steps"])]
    assert called, "the warm start taught the call"
    assert not any(map(is_running, started(tmp_path / "pids")))

    monkeypatch.setenv("SERVER", "no-such-server")
    monkeypatch.delitem(sys.modules, "counting_by_mcp")
    before = len(started(tmp_path / "pids"))
    assert "equals the record, bit for bit" in str(replay(config.run_dir, called[0]["id"]))
    assert len(started(tmp_path / "pids")) == before
    with pytest.raises(ConfigError, match="MCP server 'own': there is no program 'no-such-server' on PATH"):
        dry_run(config)
    branching = config.model_copy(update={"rollout": config.rollout.model_copy(update={"branches": 2})})
    with pytest.raises(ConfigError, match=r"'rollout.branches' = 2: the tools of actor 'solver' are those of 'own'.*"):
        dry_run(branching)
