"""Programs that know nothing of turnwise: the question in their arguments, and what they leave as the result."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys

import pytest

from turnwise.arena import Rubric
from turnwise.inference.scripted import Reply
from turnwise.integrations.gateway import Gateway, ProcessEpisode
from turnwise.integrations.gateway.process.program import FILE_BYTES, check_arguments, collect, render
from turnwise.integrations.gateway.remote import RemoteGateway
from turnwise.types import EpisodeRequest

from .helpers import arena_of, scripted

PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "solver", "messages": [{"role": "user", "content": "hm"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
open("answer.txt", "w").write("4")
open("seen.json", "w").write(json.dumps([sys.argv[1:], sys.stdin.read(), sorted(os.environ)]))
print("progress", file=sys.stderr)
print("done")
"""


def play_program(tmp_path, question, script=PROGRAM, arguments=("--task={question[text]}",), answer="4", **options):
    """Play one episode of ``script``; return its rollout, and what the rubric found in ``extras``."""
    (tmp_path / "program.py").write_text(script)
    seen = []
    arena = arena_of(scripted(answer))
    episode = ProcessEpisode(
        [sys.executable, "-I", "-S", "program.py", *arguments],
        Gateway(renderer="template"),
        actors=["solver"],
        rubric=Rubric([lambda extras: seen.append(extras) or float(extras["files"].get("answer.txt") == "4")]),
        files={"program.py": tmp_path / "program.py"},
        **{"collect": ["answer.txt", "*.json"], **options},
    )
    arena.add_episode(episode)
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("process", question)]))
    return result.rollout, seen


LATE = """
import time
agent = os.getpid()
if os.fork() == 0:
    os.setsid()
    open("late", "w").close()
    while os.path.exists(f"/proc/{agent}"):
        time.sleep(0.001)
    time.sleep(0.2)
    print("late", flush=True)
    open("answer.txt", "w").write("5")
    open("late.json", "w").write("5")
    os._exit(0)
while not os.path.exists("late"):
    time.sleep(0.001)
"""
"""A process of the program that changes its files and its output once the program has ended."""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_nothing_changes_the_files_and_the_output_after_the_program_has_ended(tmp_path):
    rollout, [extras] = play_program(tmp_path, {"text": "x"}, PROGRAM + LATE)
    assert rollout.error is None, rollout.error
    assert extras["output"] == "done" and extras["files"].keys() == {"answer.txt", "seen.json"}
    assert extras["files"]["answer.txt"] == "4"


def test_rubric_scores_the_output_and_files_of_a_program(tmp_path):
    question = {"text": "-rf {question[answer]} $(id)\n'\"", "answer": 4}
    rollout, [extras] = play_program(tmp_path, question, stdin="{question[text]} is {question[answer]}, {x}")
    assert rollout.error is None, rollout.error
    assert rollout.rewards == {"solver": 1.0} and len(rollout.steps) == 1
    assert extras["output"] == "done" and sorted(extras["files"]) == ["answer.txt", "seen.json"]
    arguments, given, variables = json.loads(extras["files"]["seen.json"])
    assert arguments == [f"--task={question['text']}"], "one argument, no shell, and rendered once"
    assert given == f"{question['text']} is 4, {{x}}"
    assert not [name for name in variables if name.startswith("TURNWISE_")], "the answer stays hidden"


def test_failed_program_shows_both_outputs_and_gets_no_reward(tmp_path):
    script = "import sys; print('out', flush=True); print('bad', file=sys.stderr); sys.exit(2)"
    rollout, seen = play_program(tmp_path, {"text": "x"}, script)
    assert "exited with code 2" in rollout.error and not seen and rollout.rewards == {}
    assert {"out", "bad"} <= set(rollout.error.splitlines())
    rollout, _ = play_program(tmp_path, {"txt": "x"})
    assert "{question[text]}: the question has no 'text'" in rollout.error


ENDS = {
    "a code": ("sys.exit(3)", "exited with code 3", "exited"),
    "its own signal": ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", "killed"),
    "a signal of what it started": ("os.system('kill -9 $PPID'); time.sleep(60)", "was killed by SIGKILL", "killed"),
    "an exception": ("raise MemoryError", "exited with code 1", "exited"),
    "sleep": ("time.sleep(60)", "took longer than timeout=2 s", "late"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("answer", ["4", "5"])
def test_an_agent_that_fails_after_a_call_is_scored_by_what_it_left(tmp_path, end, answer):
    code, failure, cause = ENDS[end]
    script = PROGRAM.replace('write("4")', f'write("{answer}")') + f"sys.stdout.flush()\nimport time\n{code}\n"
    rollout, [extras] = play_program(tmp_path, {"text": "x"}, script, timeout=2.0 if cause == "late" else 60.0)
    assert rollout.error is None, rollout.error
    assert rollout.rewards == {"solver": float(answer == "4")} and len(rollout.steps) == 1
    assert extras["failure"] == failure and extras["output"].strip() == "done"
    assert rollout.facts.mishaps == {f"episodes/agent_{cause}": 1}


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "import time; time.sleep(60)"], ids=["code", "sleep"])
def test_a_program_that_fails_before_any_call_fails_its_episode(tmp_path, code):
    """No model can have ended it: it is not installed, say."""
    rollout, seen = play_program(tmp_path, {"text": "x"}, code, timeout=1.0)
    assert rollout.error and not seen and rollout.rewards == {}


def test_a_model_that_is_slow_or_fails_costs_the_agent_nothing(tmp_path):
    slow, broken = Reply("4", delay=math.inf), RuntimeError("the engine is gone")
    for answer, problem in ((slow, "longer than timeout=1 s"), (broken, "the engine is gone")):
        rollout, seen = play_program(tmp_path, {"text": "x"}, answer=answer, timeout=1.0)
        assert problem in rollout.error and not seen and rollout.rewards == {}


def test_program_at_another_server(monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "k")
    arena = arena_of(scripted("4"))
    command = ["sh", "-c", "echo $OPENAI_BASE_URL $ANTHROPIC_BASE_URL $OPENAI_API_KEY"]
    seen = []
    rubric = Rubric([lambda extras: seen.append(extras["output"]) or 1.0])
    gateway = RemoteGateway("http://model.test/v1", "m", key_variable="OTHER_KEY")
    arena.add_episode(ProcessEpisode(command, gateway, actors=["solver"], rubric=rubric, collect=[]))
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("process", "x")]))
    assert result.rollout.error is None, result.rollout.error
    assert seen == ["http://model.test/v1 http://model.test k"]


def test_render():
    assert render("{question}", "-x {question}") == "-x {question}"
    assert render('{"a": {question[b][c]}}', {"b": {"c": [1, "é"]}}) == '{"a": [1, "\\u00e9"]}'
    assert render("{question}", {"a": 1}) == '{"a": 1}'
    with pytest.raises(ValueError, match="has no 'a'"):
        render("{question[a]}", "a")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["agent", "-p", "{question[text]}"], "a question may begin with '-'"),
        (["--", "{question}"], "a question may begin with '-'"),
        (["sh", "-c", "agent {question}"], "a question is no code"),
        (["bash", "-lc", "agent {question}"], "a question is no code"),
        (["./{question}"], "a question is no code"),
    ],
)
def test_questions_are_no_options_and_no_code(command, problem):
    with pytest.raises(ValueError, match=problem):
        check_arguments(command)
    check_arguments(["agent", "--task={question}", "--json={}", "--", "{question}"])


def test_links_special_files_and_large_files_are_left_out(tmp_path):
    folder, secret = tmp_path / "work", tmp_path / "answers.txt"
    (folder / "sub").mkdir(parents=True)
    secret.write_text("42")
    (folder / "link.txt").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.txt")
    (folder / "large.txt").write_bytes(b"x" * (FILE_BYTES + 1))
    (folder / "sub" / "own.txt").write_bytes(b"\xff")
    found = collect(folder, ["*.txt", "up/*.txt", "sub/**/*.txt", "none.txt", "sub"], "")
    assert found["files"].keys() == {"large.txt", "sub/own.txt"}
    assert len(found["files"]["large.txt"]) == FILE_BYTES and found["files"]["sub/own.txt"] == "\ufffd"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"collect": ["a"]}, "expected a rubric"),
        ({"collect": "a"}, "expected a list of names"),
        ({"collect": ["../a"]}, "expected a list of names"),
        ({"collect": ["/etc/passwd"]}, "expected a list of names"),
    ],
)
def test_wrong_options(options, problem):
    with pytest.raises(ValueError, match=problem):
        ProcessEpisode(["true"], Gateway(), **options)
