"""Kill a training run with SIGKILL at random moments, resume it each time, and compare it with an undisturbed run.

    python tests/kill_loop.py --kills 50                    # a synchronous run, some minutes
    python tests/kill_loop.py --kills 50 --mode tree        # AT-GRPO over branches
    python tests/kill_loop.py --kills 50 --mode lora        # two adapters over one base
    python tests/kill_loop.py --kills 50 --mode full        # a model per actor
    python tests/kill_loop.py --kills 50 --mode async       # sampling ahead of training, deterministic
    python tests/kill_loop.py --kills 50 --mode curriculum  # questions by their solve rates, two batches ahead
    python tests/kill_loop.py --kills 50 --mode league      # games against past policies, some of which leave the pool
    python tests/kill_loop.py --kills 20 --ranks 2          # sharded over two ranks, of which torchrun restarts both

A run is ``turnwise train`` in its own process. It is forked from this process, which has imported turnwise but has not
run it, as importing torch would take most of the time. ``--fresh`` starts a new interpreter each time instead. With
``--ranks`` a run is one torchrun, and a kill takes one of its ranks.
A kill comes a random time after the start, or after the first new line in ``metrics.jsonl`` (while the run samples,
updates, validates or saves), or after the next temporary folder of a checkpoint appears.
Both runs must be equal bit for bit: the exported weights, the newest checkpoint (optimizers, generators, credit), and
every line of ``metrics.jsonl`` and ``rollouts.jsonl``, each step once. Only timings may differ. The exit code is 1 if
anything else differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.cli import main as cli
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import to_toml
from turnwise.train.validate import config_from_dict

COMMON: dict[str, Any] = {
    "threads": 1,
    "health": {"start_questions": 0},
    "task_options": {"blanks": [4, 6]},
    "warm_start": {"steps": 3, "batch_size": 8},
    "rollout": {"prompts_per_step": 4},
    # RAE's running baselines give every row an advantage, even if the model knows little.
    "credit": {"rule": "rae"},
    "update": {"lr": 1e-4, "warmup": 5, "min_lr_ratio": 0.1, "num_minibatches": 2},
    "eval": {"num_prompts": 2, "every": 7},
    "checkpoint": {"every": 1, "keep_last": 2, "keep_best": True},
}
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "tree": {
        "warm_start": {"steps": 60, "batch_size": 32},  # until branches earn different rewards
        "rollout": {"prompts_per_step": 4, "branches": 3, "tree": {"select": "mixed", "best_share": [1.0, 0.0]}},
        "credit": {"rule": "at_grpo"},
    },
    "lora": {"policy_sharing": "lora_per_actor"},
    "full": {"policy_sharing": "model_per_actor"},
    "async": {"loop": {"max_staleness": 2, "deterministic": True}},
    "curriculum": {
        "curriculum": {"sampling": "learnability", "pool": 12, "window": 4, "gate": 0.01},
        "loop": {"max_staleness": 2, "deterministic": True},
    },
    "league": {
        "task": "kuhn_poker",
        "task_options": {"max_tokens": 4},
        "rollout": {"prompts_per_step": 8},
        "league": {"share": 0.5, "every": 2, "size": 3, "opponents_per_step": 2},
        "loop": {"max_staleness": 1, "deterministic": True},
    },
}
INDEX = ".metadata"
TIMEOUT = 300.0
"""Seconds in which a run must write its next step, or end."""


@dataclass(slots=True)
class Process:
    """One start of the run. ``log`` holds its output."""

    pid: int
    log: Path

    def returned(self) -> int | None:
        """Return the exit code, negative for a signal; ``None`` while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def forked(config: Path, log: Path) -> Process:
    """Start the run in a copy of this process."""
    pid = os.fork()
    if pid:
        return Process(pid, log)
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = cli.main(["train", str(config), "--traceback"])
        sys.stdout.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def fresh(config: Path, log: Path) -> Process:
    """Start the run in a new interpreter."""
    command = [sys.executable, "-P", "-m", "turnwise", "train", str(config), "--traceback"]
    with log.open("w") as stream:
        return Process(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT).pid, log)


@dataclass(slots=True)
class Ranks(Process):
    """A run in several ranks under one torchrun, which restarts all of them if one dies."""

    count: int
    rng: random.Random

    def kill(self) -> None:
        """Kill one rank, and wait until torchrun has started another one for each."""
        wait(self, lambda: len(self.ranks()) == self.count)
        before = self.ranks()
        os.kill(self.rng.choice(before), signal.SIGKILL)
        wait(self, lambda: len(now := self.ranks()) == len(before) and not set(now) & set(before))

    def ranks(self) -> list[int]:
        threads = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [int(pid) for thread in threads for pid in thread.read_text().split()]


def launched(config: Path, log: Path, ranks: int, rng: random.Random, restarts: int) -> Process:
    """Start the run in ``ranks`` ranks, each of which may die."""
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, "--max-restarts", str(restarts), "-m", "turnwise", "train", str(config), "--traceback"]
    with log.open("w") as stream:
        return Ranks(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT).pid, log, ranks, rng)


def steps_logged(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def writes_checkpoint(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".step_*"))


def wait(process: Process, reached: Callable[[], bool]) -> None:
    """Wait until ``reached``. A run that ends before that, or hangs, is an error."""
    deadline = time.monotonic() + TIMEOUT
    while not reached():
        code = process.returned()
        if code is not None or time.monotonic() > deadline:
            state = "hangs" if code is None else f"ended with exit code {code}"
            raise SystemExit(f"the run {state} before it was killed:\n{process.log.read_text()}")
        time.sleep(0.001)


def kill_once(process: Process, run_dir: Path, rng: random.Random, step_seconds: float) -> str:
    """Kill ``process`` at a moment drawn from ``rng``. Returns where it was, as the disk shows after the kill."""
    before = steps_logged(run_dir)
    kind = rng.choice(["start", "between", "saving", "saving"])
    if kind != "start":
        wait(process, lambda: steps_logged(run_dir) > before)
    if kind == "saving":
        wait(process, lambda: writes_checkpoint(run_dir))
        time.sleep(rng.uniform(0, 0.02))
    else:
        time.sleep(rng.uniform(0, 2 * step_seconds))
    process.kill()
    if writes_checkpoint(run_dir):
        return "while saving"
    return "before a new step" if steps_logged(run_dir) <= before else "between two steps"


def run_to_end(process: Process) -> None:
    deadline = time.monotonic() + 4 * TIMEOUT
    while (code := process.returned()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if code != 0:
        raise SystemExit(f"the run ended with {code}:\n{process.log.read_text()}")


def differences(whole: Path, killed: Path) -> Iterator[str]:
    """Yield the differences between two run folders, except timings and the folders' own names."""
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        a, b = (
            [untimed(json.loads(line)) for line in (run / name).read_text().splitlines()] for run in (whole, killed)
        )
        steps = [[row["step"] for row in rows] for rows in (a, b)]
        if steps[0] != steps[1]:
            yield f"{name}: steps {steps[1]}, expected {steps[0]}"
        else:
            yield from (f"{name}, step {x['step']}:\n  {x}\n  {y}" for x, y in zip(a, b, strict=True) if x != y)
    for pattern in ("policies/**/*.safetensors", "checkpoints/step_*/*"):
        a, b = ({file.relative_to(run): digest(file, run) for file in run.glob(pattern)} for run in (whole, killed))
        assert a, f"{whole} holds no {pattern}"
        yield from (f"{file} differs" for file in sorted(a.keys() | b.keys()) if a.get(file) != b.get(file))


def untimed(value: Any) -> Any:
    """Return ``value`` without timings."""
    if isinstance(value, list):
        return [untimed(item) for item in value]
    if not isinstance(value, dict):
        return value
    timed = ("second", "inference/", "cluster/", "user_code/")
    return {key: untimed(item) for key, item in value.items() if not any(part in key for part in timed)}


def digest(file: Path, run: Path) -> str:
    """Return a file's SHA-256. For a manifest, return its text without timings, the run's folder, which is among its
    settings, and the digest over them.

    Shards have an index with a random name in it, of which nothing is compared.
    """
    if file.name == INDEX:
        return ""
    if file.suffix == ".json":
        said = untimed(json.loads(file.read_text().replace(str(run), "")))
        said.get("files", {}).pop(INDEX, None)
        return json.dumps({key: value for key, value in said.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def config_in(folder: Path, name: str, mode: str, steps: int) -> Path:
    settings = {**COMMON, **MODES[mode], "steps": steps, "run_dir": str(folder / name)}
    config: TrainConfig = config_from_dict(settings)
    path = folder / f"{name}.toml"
    path.write_text(to_toml(config))
    return path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--seed", type=int, help="of the moments (default: drawn, and printed)")
    parser.add_argument("--folder", type=Path, help="empty or new, to look into afterwards (default: a temporary one)")
    parser.add_argument("--ranks", type=int, default=1, help="processes that hold the models' shards")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for each start")
    return parser.parse_args(arguments)


def kill_loop(options: argparse.Namespace, folder: Path) -> list[str]:
    """Make both runs under ``folder``. Returns the differences between them."""
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"{options.mode}: {options.kills} kills, seed {seed}", flush=True)
    rng = random.Random(seed)
    start = fresh if options.fresh else forked
    if options.ranks > 1:
        start = partial(launched, ranks=options.ranks, rng=rng, restarts=options.kills)
    # One start may finish the step that this waits for, the one whose checkpoint it waits for, and two more.
    steps = 3 * options.kills + 4
    began = time.monotonic()
    run_to_end(start(config_in(folder, "whole", options.mode, steps), folder / "whole.log"))
    seconds = time.monotonic() - began
    print(f"left alone: {steps} steps in {seconds:.0f} s", flush=True)
    config, run_dir = config_in(folder, "killed", options.mode, steps), folder / "killed"
    # Kill and resume the second run, and let it end.
    moments: Counter[str] = Counter()
    began = time.monotonic()
    process = start(config, folder / "killed_0.log")
    for kill in range(1, options.kills + 1):
        moments[kill_once(process, run_dir, rng, seconds / steps)] += 1
        if options.ranks == 1:  # torchrun starts the ranks anew by itself
            process = start(config, folder / f"killed_{kill}.log")
    run_to_end(process)
    places = ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items()))
    print(f"killed: {places}; {time.monotonic() - began:.0f} s", flush=True)
    check_trained(folder / "whole", steps)
    return list(differences(folder / "whole", run_dir))


def check_trained(run_dir: Path, steps: int) -> None:
    """Raise unless most steps updated a policy. Runs that train nothing would be equal whatever a kill lost."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    trained = sum(any(key.endswith("updates") and value for key, value in row.items()) for row in rows)
    if trained < steps / 2:
        raise SystemExit(f"only {trained} of {steps} steps updated a policy: this shows nothing")


def main() -> int:
    options = parse()
    import transformers  # noqa: F401  forked runs find it imported

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SystemExit(f"--folder {folder}: expected an empty folder")
        found = kill_loop(options, folder)
    print("\n".join(found) or "equal: weights, checkpoint, metrics and rollouts, each step once")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
