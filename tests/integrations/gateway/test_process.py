"""Agents as processes: what they see, what they give back, how they fail, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from turnwise.arena import Rubric
from turnwise.integrations.gateway import Gateway, ProcessEpisode
from turnwise.integrations.gateway.process.output import FREE_BYTES, OUTPUT_BYTES, SLICE, Tail
from turnwise.integrations.gateway.process.program import link_packages, packages_beside
from turnwise.types import EpisodeRequest

from .helpers import LOGPROBS, arena_of, scripted
from .processes import HEAD, SLEEPER, STUBBORN, appears, noted_processes, play_process, runs

TRIAL = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
CONTAINED = shutil.which("bwrap") and not subprocess.run(TRIAL, check=False, capture_output=True).returncode
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc, and Linux alone has subreapers")


# -- what a process sees -----------------------------------------------------------------------------------------------
def test_process_sees_the_listed_variables_alone_and_no_key_is_on_a_command_line(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "CUDA_VISIBLE_DEVICES", "OPENAI_ORG_ID", "PYTHONPATH", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, "secret")
    code = """
note("env", json.dumps(dict(os.environ)))
note("cwd", json.dumps([os.getcwd(), sorted(os.listdir(".")), sys.argv]))
lines = [open(f"/proc/{pid}/cmdline").read() for pid in (os.getpid(), os.getppid())]
assert not any(os.environ["OPENAI_API_KEY"] in line for line in lines)
result(1)
"""
    [rollout], _ = play_process(tmp_path, code, env={"OWN": "x"})
    assert rollout.error is None, rollout.error
    seen = json.loads((tmp_path / "env").read_text())
    assert seen.keys() - {"LC_CTYPE"} == {  # Python sets this one where LANG is C
        *("PATH", "HOME", "LANG", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
        "OPENAI_AGENTS_DISABLE_TRACING",
        *("TURNWISE_QUESTION", "TURNWISE_MODELS", "TURNWISE_RESULT", "OWN", "NOTES"),
    }
    assert "secret" not in seen.values()
    folder, files, _ = json.loads((tmp_path / "cwd").read_text())
    assert folder == seen["HOME"] and files == ["agent.py"]
    assert not Path(folder).parent.exists()


SDKS = {
    "openai": """from openai import OpenAI
answer = OpenAI().chat.completions.create(model="solver", messages=[{"role": "user", "content": question}])
result(float(answer.choices[0].message.content))
""",
    "anthropic": """from anthropic import Anthropic
messages = [{"role": "user", "content": question}]
result(float(Anthropic().messages.create(model="solver", max_tokens=9, messages=messages).content[0].text))
""",
}


@pytest.mark.parametrize("sdk", ["openai", pytest.param("anthropic", marks=pytest.mark.slow)])
def test_sdk_needs_no_configuration(tmp_path, sdk):
    """The program of the documentation, with the SDK's own environment variables."""
    (tmp_path / "sdk.py").write_text(HEAD + SDKS[sdk])
    # Run without -S, so that the SDK is found.
    code = f"os.execv({sys.executable!r}, [{sys.executable!r}, '-I', {str(tmp_path / 'sdk.py')!r}])"
    [rollout], _ = play_process(tmp_path, code)
    assert rollout.error is None, rollout.error
    assert rollout.rewards == {"solver": 4.0}
    [step] = rollout.steps
    assert step.completion_logprobs == list(LOGPROBS[: len(step.completion_token_ids)])


def test_model_name_selects_the_actor(tmp_path):
    code = """
models = json.load(open(os.environ["TURNWISE_MODELS"]))
assert sorted(models) == ["checker", "solver"] and models["checker"]["name"] == "checker"
for name in ("solver", "checker", "solver"):
    ask(question["text"], name)
result({"solver": 1, "checker": 0})
"""
    [rollout], _ = play_process(tmp_path, code, questions=[{"text": "hm"}], actors=("solver", "checker"))
    assert rollout.error is None, rollout.error
    assert [(step.actor_id, step.turn) for step in rollout.steps] == [("solver", 0), ("checker", 0), ("solver", 1)]
    assert rollout.rewards == {"solver": 1.0, "checker": 0.0}
    assert "hm" in rollout.steps[0].prompt[0]["content"]


# -- results -----------------------------------------------------------------------------------------------------------
def test_result_is_the_reward(tmp_path):
    given = {"1": 1.0, "0.25": 0.25, "True": 1.0, '{"solver": -1}': -1.0}
    rollouts, _ = play_process(tmp_path, "ask('x'); result(eval(question))", questions=list(given))
    assert [rollout.error for rollout in rollouts] == [None] * len(given)
    assert [rollout.rewards for rollout in rollouts] == [{"solver": reward} for reward in given.values()]


def test_rubric_scores_any_result(tmp_path):
    rubric = Rubric([lambda extras: float(extras["result"] == ["a", {"b": None}])])
    [rollout], _ = play_process(tmp_path, "ask('x'); result(['a', {'b': None}])", rubric=rubric)
    assert rollout.error is None, rollout.error
    assert rollout.rewards == {"solver": 1.0}


FAILURES = {
    "code": ("print('so'); sys.exit(3)", "exited with code 3; its last output:\nso"),
    "exception": ("raise RuntimeError('oh no')", "RuntimeError: oh no"),
    "high code": ("sys.exit(255)", "exited with code 255"),
    "signal": (
        "print('so', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
        "was killed by SIGKILL; its last output:\nso",
    ),
    "fault": ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    "no result": ("print('so')", "wrote no TURNWISE_RESULT; its last output:\nso"),
    "half a result": ("open(os.environ['TURNWISE_RESULT'], 'w').write('{')", "a TURNWISE_RESULT that is no JSON"),
    "bytes": ("open(os.environ['TURNWISE_RESULT'], 'wb').write(b'\\xff\\xfe')", "a TURNWISE_RESULT that is no JSON"),
    "nest": ("open(os.environ['TURNWISE_RESULT'], 'w').write('[' * 100000)", "a TURNWISE_RESULT that is no JSON"),
    "folder": ("os.mkdir(os.environ['TURNWISE_RESULT'])", "TURNWISE_RESULT"),
    "link": (
        "os.symlink(os.environ['TURNWISE_QUESTION'], os.environ['TURNWISE_RESULT'])",
        "a TURNWISE_RESULT that is no",
    ),
    "pipe": ("os.mkfifo(os.environ['TURNWISE_RESULT'])", "a TURNWISE_RESULT that is no JSON (it is no regular file)"),
    "endless": ("open(os.environ['TURNWISE_RESULT'], 'w').truncate(1 << 40)", "more than 16777216 bytes"),
    "not a number": ("result(float('nan'))", "expected a finite number"),
    "text": ("result('right')", "expected a finite number"),
    "unknown actor": ("result({'judge': 1})", "has 'judge'"),
}


def test_failures_are_errors_and_never_rewards(tmp_path):
    codes = [code for code, _ in FAILURES.values()]
    rollouts, _ = play_process(tmp_path, "ask('x')\nexec(question)", questions=codes)
    for (name, (_, message)), rollout in zip(FAILURES.items(), rollouts, strict=True):
        assert message in str(rollout.error), name
        assert rollout.rewards == {}, name


def test_program_that_does_not_exist(tmp_path):
    [rollout], _ = play_process(tmp_path, f"os.execv({str(tmp_path / 'none')!r}, ['x'])")
    assert "No such file" in str(rollout.error)
    arena = arena_of(scripted("4"))
    arena.add_episode(ProcessEpisode(["no-such-program"], Gateway(renderer="template"), actors=["solver"]))
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("process", "x")]))
    assert "exited with code 127" in result.rollout.error and "no-such-program: No such file" in result.rollout.error


async def test_a_flood_of_output_is_read_slowly():
    class Pipe:
        said: ClassVar[list[str]] = []

        def is_closing(self):
            return False

        def __getattr__(self, name):
            return lambda: self.said.append(name)

    tail = Tail()
    tail.connection_made(Pipe())
    for _ in range(FREE_BYTES // SLICE):
        tail.data_received(bytes(SLICE))
    assert Pipe.said == []
    tail.data_received(b"x" * SLICE)
    assert Pipe.said == ["pause_reading"] and tail.output == b"x" * OUTPUT_BYTES
    while len(Pipe.said) < 2:
        await asyncio.sleep(0.001)
    assert Pipe.said == ["pause_reading", "resume_reading"]


def test_error_has_the_last_50_lines_and_no_keys(tmp_path):
    code = """
for line in range(3000):
    print(f"line {line} " + "x" * 50)
sys.stdout.flush()
print(os.environ["OPENAI_API_KEY"], file=sys.stderr)
print(json.load(open(os.environ["TURNWISE_MODELS"]))["checker"]["api_key"], file=sys.stderr)
print("\\xff".encode("latin-1"), flush=True)
sys.exit(1)
"""
    [rollout], _ = play_process(tmp_path, code, actors=("solver", "checker"))
    shown = rollout.error.partition("its last output:\n")[2].strip().splitlines()
    assert len(shown) == 50
    assert shown.count("***") == 2
    assert any("line 2999 " in line for line in shown) and not any("line 2000 " in line for line in shown)


def test_processes_that_hang_are_ended_at_their_deadline(tmp_path):
    """Also one that ignores the signal to end."""
    code = """
if question:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('so far', flush=True)
ask('x')
note('pid%d' % os.getpid(), os.getpid())
time.sleep(300)
"""
    began = time.monotonic()
    rollouts, _ = play_process(tmp_path, code, questions=[0, 1], timeout=2.0, grace=0.5)
    for rollout in rollouts:
        assert "longer than timeout=2 s" in rollout.error and "so far" in rollout.error
        assert rollout.rewards == {} and time.monotonic() - began < 60
    pids = noted_processes(tmp_path)
    assert len(pids) == 2 and not any(map(runs, pids))


def test_process_gets_time_to_end(tmp_path):
    code = """
signal.signal(signal.SIGTERM, lambda *_: (note("ended", "well"), sys.exit(0)))
note("pid", os.getpid())
time.sleep(300)
"""
    [rollout], _ = play_process(tmp_path, code, timeout=2.0, grace=20.0)
    assert "longer than timeout" in rollout.error
    assert (tmp_path / "ended").read_text() == "well"


# -- nothing is left ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["result(1)", "sys.exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(300)"])
def test_detached_processes_are_dead_after_the_episode(tmp_path, end):
    code = f"""
for _ in range(2):
    detached({SLEEPER!r})
subprocess.Popen(["sleep", "301"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
detached({STUBBORN!r})
while len([name for name in os.listdir(os.environ["NOTES"]) if name.startswith("pid")]) < 4:
    time.sleep(0.01)
{end}
"""
    [rollout], _ = play_process(tmp_path, code, timeout=5.0 if "300" in end else 60.0, grace=0.2)
    assert (rollout.error is None) == (end == "result(1)"), rollout.error
    pids = noted_processes(tmp_path)
    assert len(pids) == 4
    assert [pid for pid in pids if runs(pid)] == []


CHANGES = {
    "written again": "result(1)",
    "written beside it": "json.dump(1, open('other', 'w')); os.replace('other', os.environ['TURNWISE_RESULT'])",
    "removed": "os.remove(os.environ['TURNWISE_RESULT'])",
    "a link": "os.remove(os.environ['TURNWISE_RESULT']); os.symlink('/etc/hostname', os.environ['TURNWISE_RESULT'])",
}
LATE = """
note("pid%d" % os.getpid(), os.getpid())
while os.path.exists("/proc/%d" % agent):
    time.sleep(0.001)
time.sleep(0.2)
CHANGE
note("changed", "yes")
"""
"""A process that waits for the end of its agent, and then changes what it left. An episode's grace is longer."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_changes_the_result_after_the_agent_has_ended(tmp_path, change):
    code = f"""
agent = os.getpid()
detached({LATE.replace("CHANGE", change)!r})
while not [name for name in os.listdir(os.environ["NOTES"]) if name.startswith("pid")]:
    time.sleep(0.001)
ask("x")
result(0)
"""
    [rollout], _ = play_process(tmp_path, code)
    assert rollout.error is None, rollout.error
    assert rollout.rewards == {"solver": 0.0} and not (tmp_path / "changed").exists()
    assert not any(map(runs, noted_processes(tmp_path)))


@pytest.mark.parametrize("who", ["agent", "supervisor"])
def test_killed_from_outside(tmp_path, who):
    code = f"""
detached({SLEEPER!r})
print("so far", flush=True)
ask("x")
note("agent", os.getpid())
note("supervisor", os.getppid())
time.sleep(300)
"""

    async def killer():
        await appears(tmp_path / "supervisor")
        os.kill(int((tmp_path / who).read_text()), signal.SIGKILL)

    [rollout], _ = play_process(tmp_path, code, beside=killer, grace=0.2)
    assert "was killed by SIGKILL" in rollout.error and "so far" in rollout.error
    assert rollout.rewards == {}
    left = [*noted_processes(tmp_path), *(int((tmp_path / name).read_text()) for name in ("agent", "supervisor"))]
    deadline = time.monotonic() + 5
    while any(map(runs, left)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in left if runs(pid)] == []


def test_at_most_so_many_at_once(tmp_path):
    code = """
note("runs%d" % os.getpid(), "x")
count = len([name for name in os.listdir(os.environ["NOTES"]) if name.startswith("runs")])
ask("x")
os.remove(os.path.join(os.environ["NOTES"], "runs%d" % os.getpid()))
result(count)
"""
    rollouts, _ = play_process(tmp_path, code, questions=range(6), processes=2)
    assert [rollout.error for rollout in rollouts] == [None] * 6
    assert max(rollout.rewards["solver"] for rollout in rollouts) <= 2


# -- arguments ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"command": "python agent.py"}, TypeError, "expected a list of arguments"),
        ({"command": []}, TypeError, "expected a list of arguments"),
        ({"files": {"../x": __file__}}, ValueError, "a name inside the process's folder"),
        ({"files": {"/x": __file__}}, ValueError, "a name inside the process's folder"),
        ({"files": {"x": "/no/such/file"}}, ValueError, "no file"),
        ({"timeout": 0}, ValueError, "expected seconds > 0"),
        ({"env": {"A=B": "x"}}, ValueError, "expected names without '='"),
        ({"env": {"": "x"}}, ValueError, "expected names without '='"),
        ({"env": {"A": "x\0"}}, ValueError, "values without a null character"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        ProcessEpisode(**{"command": ["true"], "gateway": Gateway(), **options})


# -- several actors, and scripts with packages -------------------------------------------------------------------------
def test_each_of_several_actors_has_a_url_and_a_key_of_its_own(tmp_path):
    code = """
import re
for name in ("THE_BOSS", "WORKER_2"):
    url = os.environ["OPENAI_BASE_URL_" + name]
    os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": os.environ["OPENAI_API_KEY_" + name]}
    assert os.environ["ANTHROPIC_BASE_URL_" + name] + "/v1" == url
    assert os.environ["ANTHROPIC_API_KEY_" + name] == os.environ["OPENAI_API_KEY"]
    ask("x", model="any name")
assert not [name for name in os.environ if name.endswith("A_B")]
result({"the-boss": 1.0, "worker 2": 0.5})
"""
    actors = ("the-boss", "worker 2", "a.b", "a-b")
    [rollout], _ = play_process(tmp_path, code, actors=actors)
    assert rollout.error is None, rollout.error
    assert rollout.rewards == {"the-boss": 1.0, "worker 2": 0.5}


@pytest.mark.parametrize("suffix", [".mjs", ".cjs", ".ts"])
def test_a_script_finds_the_packages_beside_it(tmp_path, suffix):
    """Also those of a folder above, and never in place of packages that are copied too."""
    (tmp_path / "node_modules/words").mkdir(parents=True)
    (tmp_path / "node_modules/words/index.js").write_text("module.exports = 4")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / f"agent{suffix}").write_text("x")
    (tmp_path / "agent.py").write_text("x")
    found = tmp_path / "node_modules"
    assert packages_beside(tmp_path / "src" / f"agent{suffix}") == found.resolve()
    assert packages_beside(tmp_path / "agent.py") is None
    root = tmp_path / "work"
    (root / "own/node_modules").mkdir(parents=True)
    script = tmp_path / "src" / f"agent{suffix}"
    link_packages(root, {"agent.mjs": script, "own/agent.mjs": script, "agent.py": tmp_path / "agent.py"})
    assert (root / "node_modules").resolve() == found.resolve() and not (root / "own/node_modules").is_symlink()


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.parametrize("contained", [False, *([True] if CONTAINED else [])])
def test_a_module_imports_its_packages(tmp_path, contained):
    tmp_path.chmod(0o755)
    (tmp_path / "node_modules/words").mkdir(parents=True)
    (tmp_path / "node_modules/words/package.json").write_text('{"name": "words", "exports": "./index.mjs"}')
    (tmp_path / "node_modules/words/index.mjs").write_text("export const right = 0.25;")
    (tmp_path / "agent.mjs").write_text(
        "import { writeFileSync } from 'node:fs';\nimport { right } from 'words';\n"
        "writeFileSync(process.env.TURNWISE_RESULT, JSON.stringify(right));"
    )
    arena = arena_of(scripted("4"))
    files = {"agent.mjs": tmp_path / "agent.mjs"}
    options = {"container": "bwrap"} if contained else {}
    arena.add_episode(ProcessEpisode(["node", "agent.mjs"], Gateway(), actors=["solver"], files=files, **options))
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("process", "x")]))
    assert result.rollout.error is None, result.rollout.error
    assert result.rollout.metrics["reported_reward"] == 0.25
    assert (tmp_path / "node_modules/words/index.mjs").exists(), "the folder's end removes the link alone"
