"""Many runs in one process, or on two ranks: each is asked of ``--dry-run``, and trains if that accepts it.

The processes serve one run after another, as their start takes longer than a tiny run. They start again after a run
that fails, which may leave one of them in the middle of a call.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SILENCE = 120.0
"""Seconds without a result after which the processes count as stuck."""
FIRST, LAST = "step_00000001", "step_00000002"


@dataclass
class Job:
    """A run of ``config``. With ``begun`` it goes on in a copy of that folder, as if its last step had been killed."""

    config: dict[str, Any]
    begun: str = ""


@dataclass
class Result:
    """A run either was ``refused`` by ``--dry-run``, or ``failed`` after it was accepted, or ended."""

    refused: str = ""
    failed: str = ""


def killed(folder: Path) -> None:
    """Leave of a run of two steps what a kill before the second checkpoint leaves."""
    shutil.rmtree(folder / "checkpoints" / LAST)
    for name in ("policies", "held_out.json", "report.html"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """The environments of ``ranks`` processes, as torchrun sets them; none for one process."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **address} for rank in range(ranks)]


def runs_of(python: str, jobs: Sequence[Job], folder: Path, *, ranks: int, modules: Path) -> list[Result]:
    """Run the jobs on ``ranks`` processes, and return their results. ``modules`` is a folder with modules they name."""
    results: dict[int, Result] = {}
    while len(results) < len(jobs):
        first = len(results)
        started = _start(python, jobs, folder, first, ranks, modules)
        _attend(started, results)
        if len(results) == first:  # it ended without a word
            codes = [process.returncode for process in started]
            results[first] = Result(failed=f"exit codes {codes}: {(folder / 'log').read_text()[-2000:]}")
    return [results[number] for number in range(len(jobs))]


def kill_in_step_2(python: str, job: Job, folder: Path, *, ranks: int, modules: Path, after: float) -> None:
    """Run a job, and kill its last process ``after`` so many seconds after the first checkpoint."""
    processes = _start(python, [job], folder, 0, ranks, modules)
    while not Path(job.config["run_dir"], "checkpoints", FIRST, "manifest.json").exists():
        if any(process.poll() is not None for process in processes):
            break
        time.sleep(0.01)
    time.sleep(after)
    processes[-1].kill()
    for process in processes:  # the other rank ends by itself
        process.communicate(timeout=SILENCE)


def _start(
    python: str, jobs: Sequence[Job], folder: Path, first: int, ranks: int, modules: Path
) -> list[subprocess.Popen[bytes]]:
    from ..conftest import NARROW  # not in the processes, whose script this is

    folder.mkdir(parents=True, exist_ok=True)
    given = {"jobs": [asdict(job) for job in jobs], "narrow": NARROW, "modules": str(modules)}
    (folder / "jobs.json").write_text(json.dumps(given))
    words = [python, "-P", __file__, str(folder / "jobs.json"), str(first)]
    with open(folder / "log", "ab") as log:
        return [
            subprocess.Popen(words, env={**os.environ, **own}, cwd=folder, stdout=subprocess.PIPE, stderr=log)
            for own in rank_variables(ranks)
        ]


def _attend(processes: list[subprocess.Popen[bytes]], results: dict[int, Result]) -> None:
    """Read results until all processes have ended."""
    with selectors.DefaultSelector() as selector:
        for rank, process in enumerate(processes):
            selector.register(process.stdout, selectors.EVENT_READ, rank)  # type: ignore[arg-type]
        while selector.get_map():
            ready = selector.select(SILENCE)
            if not ready:
                results.setdefault(len(results), Result(failed=f"no word within {SILENCE:.0f} s"))
                for process in processes:
                    process.kill()
            for key, _ in ready:
                line = processes[key.data].stdout.readline()  # type: ignore[union-attr]
                if not line:
                    selector.unregister(key.fileobj)
                    continue
                told = json.loads(line)
                one = results.setdefault(told.pop("number"), Result())
                if told["failed"]:  # of the first rank that tells: others fail because it is gone
                    one.failed = one.failed or f"rank {key.data}: {told['failed']}"
                one.refused = told["refused"]
    for process in processes:
        process.wait()


# ---- in the processes ------------------------------------------------------------------------------------------------
def serve(file: Path, first: int) -> None:
    """Train the jobs from ``first`` on, and write a line for each."""
    from torch.distributed.device_mesh import init_device_mesh

    from turnwise.run.build import follow_config, train_from_config
    from turnwise.run.checks import dry_run
    from turnwise.run.ranks import announcer, join_ranks
    from turnwise.tasks import tiny
    from turnwise.train.config.toml import ConfigError
    from turnwise.train.validate import config_from_dict
    from turnwise.utils import memory

    given = json.loads(file.read_text())
    sys.path.insert(0, given["modules"])
    # As tests in pytest's process: models have one narrow layer, and nothing waits for the disk or counts the heap.
    tiny.build_model = functools.partial(tiny.build_model, **given["narrow"])  # type: ignore[assignment]
    os.fsync, memory._frozen = os.fstat, True  # type: ignore[assignment]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(number: int, refused: str = "", failed: str = "") -> None:
        out.write(json.dumps({"number": number, "refused": refused, "failed": failed}) + "\n")
        out.flush()

    mesh = join_ranks(config_from_dict({"device": "cpu"}))
    rank, announce = (0, lambda value: value) if mesh is None else (mesh.get_rank(), announcer(mesh))
    copies = mesh and init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("copies", "shards"))
    jobs = [Job(**job) for job in given["jobs"]]
    for number, job in list(enumerate(jobs))[first:]:
        refused: str | None = None
        try:
            if not rank:
                if job.begun and Path(job.begun, "checkpoints", LAST).is_dir():
                    shutil.copytree(job.begun, job.config["run_dir"])
                    killed(Path(job.config["run_dir"]))
                try:
                    refused = ""
                    dry_run(config_from_dict(job.config))
                except ConfigError as error:
                    refused = str(error)
            refused = announce(refused)
            if not refused:
                config = config_from_dict(job.config)
                own = mesh if config.sharding.replicas == 1 else copies
                follow_config(config, own) if rank else train_from_config(config, own).close()
        except BaseException as error:
            tell(number, failed=f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
            os._exit(1)
        if not rank:
            tell(number, refused or "")
    os._exit(0)  # gloo's threads now and then abort the interpreter's last moments


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
