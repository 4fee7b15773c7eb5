"""An agent as a task of the command line: questions, splits, settings, their errors, and evaluation elsewhere."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from turnwise.cli import main as cli
from turnwise.integrations.gateway.settings import MAX_TOKENS
from turnwise.run.checks import dry_run, task_of
from turnwise.tasks import build_task
from turnwise.tasks.base import held_out
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

AGENT = """
import json
from openai import AsyncOpenAI
from turnwise import Rubric

actors = ["solver", "checker"]
questions = [{"text": f"{a} + {b}", "answer": a + b} for a in range(20) for b in range(20)]


def few():
    return ["a", "b", "a"]


def long_enough(extras):
    return {"solver": float(len(extras["said"]) > 1)}


rubric = Rubric([long_enough])


async def agent(question, models):
    model = models["solver"]
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        found = await client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": json.dumps(question)}]
        )
    return {"solver": float(found.choices[0].message.content == "42"), "checker": 0.5}


async def talker(question, models):
    return {"said": str(question)}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"agent_of_{zlib.crc32(request.node.name.encode())}"  # equal in each run, as the questions' order follows it
    (tmp_path / f"{name}.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_questions_and_actors_come_from_the_module(module: str) -> None:
    task: Any = build_task(f"gateway:{module}:agent", {"max_tokens": 7})
    assert [actor.id for actor in task.actors] == ["solver", "checker"] and task.actors[0].max_tokens == 7
    assert task.success_metric == "reported_reward"
    splits = [{json.dumps(r.artifact) for r in held_out(task, split, None)} for split in ("validation", "eval")]
    trained = {json.dumps(request.artifact) for step in range(20) for request in task.requests(step, 16, 1)}
    assert not splits[0] & splits[1] and not trained & (splits[0] | splits[1])
    assert task.requests(0, 1, 2)[0].artifact.keys() == {"text", "answer"}


def test_questions_from_a_file_and_from_a_function(module: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"b": 1, "a": 2}\n\n"text"\n{"a": 2, "b": 1}\n')
    task: Any = build_task(f"gateway:{module}:agent", {"questions": str(path)})
    assert task.questions() == ['{"a": 2, "b": 1}', '"text"'], "each once, in one form"
    assert build_task(f"gateway:{module}:agent", {"questions": f"{module}:few"}).questions() == ['"a"', '"b"']
    path.write_text("{no json\n")
    with pytest.raises(ValueError, match=":1: not JSON"):
        build_task(f"gateway:{module}:agent", {"questions": str(path)})


def test_an_answer_has_what_the_context_leaves_up_to_a_bound(module: str) -> None:
    task: Any = build_task(f"gateway:{module}:agent", {})
    assert {actor.max_tokens for actor in task.actors} == {MAX_TOKENS}


def test_a_rubric_scores_what_the_agent_returns(module: str) -> None:
    task: Any = build_task(f"gateway:{module}:talker", {"rubric": f"{module}:rubric"})
    assert task.success_metric == "long_enough"


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("gateway:nowhere:agent", {}, "No module named 'nowhere'"),
        ("gateway:{module}:agnet", {}, "no 'agnet' in it; did you mean 'agent'"),
        ("gateway:{module}:agent", {"questions": "none.jsonl"}, "no such file"),
        ("gateway:{module}:agent", {"rubric": "{module}:agent"}, "expected a Rubric"),
        (
            "gateway:{module}:agent",
            {"gateway": {"rendrer": "qwen3"}},
            "'gateway.rendrer' = 'qwen3': unknown; did you mean",
        ),
        ("gateway:{module}:agent", {"gateway": {"command": ["python"]}}, "expected 'gateway:process' with a command"),
        ("gateway:process", {}, "expected 'gateway:process' with a command"),
        ("gateway:process", {"gateway": {"command": ["python"]}}, "task_options.questions: expected"),
        ("gateway:{module}:agent", {"gateway": {"sampling": "mine"}}, "sampling='mine': expected one of"),
        ("gateway:{module}:agent", {"timeout": 0}, "timeout=0"),
    ],
)
def test_wrong_settings_name_what_was_expected(module: str, name: str, options: dict[str, Any], problem: str) -> None:
    named = json.loads(json.dumps(options).replace("{module}", module))
    with pytest.raises(ValueError, match=problem.replace("(", r"\(")):
        build_task(name.replace("{module}", module), named)


def test_the_table_of_the_config(module: str) -> None:
    settings = {
        "task": f"gateway:{module}:agent",
        "gateway": {"max_calls": 3},
        "policies": {"default": {"path": "tiny"}},
        "rollout": {"group_size": 2},
    }
    config = config_from_dict(settings)
    task: Any = task_of(config)
    assert task.gateway.settings.max_calls == 3
    assert "hierarchy" in dry_run(config), "each actor gets one advantage per attempt"
    with pytest.raises(ConfigError, match="config section 'gateway': has no effect on task 'sudoku'"):
        dry_run(config_from_dict({"task": "sudoku", "gateway": {"max_calls": 3}}))


class Elsewhere(BaseHTTPRequestHandler):
    """Another server of the OpenAI API, which knows one answer."""

    asked: list[tuple[str, str | None, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        right = json.loads(body["messages"][0]["content"])["answer"] % 2
        message = {"role": "assistant", "content": "42" if right else "41"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        found = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    Elsewhere.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_same_agent_is_evaluated_elsewhere(
    module: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THE_KEY", "sesame")
    words = ["eval", "--task", f"gateway:{module}:agent", "--base-url", elsewhere, "--model", "their-model"]
    assert cli.main([*words, "--api-key-env", "THE_KEY", "--eval.num_prompts", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    right = [json.loads(body["messages"][0]["content"])["answer"] % 2 for _, _, body in Elsewhere.asked]
    assert found["success"] == pytest.approx((sum(right) / 10 + 0.5) / 2), "the mean of both actors"
    assert len(right) == 10 and 0 < sum(right) < 10
    assert {(path, key, body["model"]) for path, key, body in Elsewhere.asked} == {
        ("/v1/chat/completions", "Bearer sesame", "their-model")
    }
    assert found["sampled_tokens"] == 0


def test_what_an_evaluation_elsewhere_needs(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert cli.main(["eval", *words]) != 0
        return capsys.readouterr().err

    agent = ("--task", f"gateway:{module}:agent")
    assert "expected a config file or a run folder" in refused()
    assert "--base-url: expected --model" in refused(*agent, "--base-url", "http://127.0.0.1:1/v1")
    assert "expected a URL that begins with http" in refused(*agent, "--base-url", "127.0.0.1:1", "--model", "m")
    assert "no such environment variable" in refused(
        *agent, "--base-url", "http://127.0.0.1:1", "--model", "m", "--api-key-env", "NOT_SET"
    )
    assert "--base-url plays agents" in refused("--task", "sudoku", "--base-url", "http://127.0.0.1:1", "--model", "m")
