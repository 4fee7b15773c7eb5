"""Train on a Ray cluster of three nodes, kill its processes and nodes at random moments, and compare with one process.

    python tests/kill_cluster.py --kills 20 --nodes 5       # 20 kills of each role, and 5 nodes that vanish

The nodes are raylets on this machine (``ray.cluster_utils.Cluster``) with an invented resource. The run has one rank,
two engines and two arena workers. Its weights, and every line of ``metrics.jsonl`` and ``rollouts.jsonl``, must be
those of a run in one process, bit for bit, each step once; only timings may differ. The exit code is 1 otherwise. No
kill may keep the run from its next step for longer than a minute; the longest wait is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from kill_loop import COMMON, check_trained, differences, steps_logged

from turnwise.cluster.members import events_file
from turnwise.train.config.toml import to_toml
from turnwise.train.validate import config_from_dict

ENGINE = {"count": 2, "cpus": 0, "engine": "transformers", "options": {"max_batch_rows": 1}}
CLUSTER: dict[str, Any] = {
    "backend": "ray",
    "trust_network": True,
    "learner": {"cpus": 0, "resources": {"learner": 1}},
    "engines": {"main": {**ENGINE, "resources": {"sim_gpu": 1}}},
    "arena": {"count": 2, "cpus": 0},
    "faults": {"engine_restarts": 1000, "learner_restarts": 1000, "worker_restarts": 1000, "dead_after": 10.0},
}
HAS = {"sim_gpu": 2.0, "learner": 1.0}
"""What each node beside the head has: enough for the whole run."""

PATIENCE = 300.0
"""Seconds in which a run must make its next step."""


@contextmanager
def three_nodes() -> Iterator[Any]:
    """Start a head and two nodes with :data:`HAS`; yield the cluster."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 100 * 2**20, "num_cpus": 2}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(**small, resources=HAS)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def settings(folder: Path, name: str, steps: int, **others: Any) -> dict[str, Any]:
    return {**COMMON, "device": "cpu", "rollout": {"prompts_per_step": 4, "max_batch_rows": 1}, "steps": steps,
            "run_dir": str(folder / name), **others}  # fmt: skip


def start(config: dict[str, Any], log: Path) -> subprocess.Popen[bytes]:
    """Start ``turnwise train`` on ``config``."""
    file = Path(config["run_dir"]).with_suffix(".toml")
    file.write_text(to_toml(config_from_dict(config)))
    with log.open("w") as stream:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "turnwise", "train", str(file), "--traceback"],
            stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def processes(run_dir: Path) -> dict[str, int]:
    """The ids of the run's processes by role, as its supervisor has noted them. Those that died are not there."""
    found: dict[str, int] = {}
    path = events_file(run_dir)
    for line in path.read_text().splitlines() if path.exists() else ():
        event = json.loads(line)
        if event["event"] in ("started", "restarted"):
            found[event["role"]] = event["pid"]
        else:
            found.pop(event["role"], None)
    return found


class Disturbed:
    """The run that is disturbed. ``longest`` is the longest time to the next step after a disturbance, in seconds."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path, rng: random.Random) -> None:
        self.process, self.run_dir, self.log, self.rng, self.longest = process, run_dir, log, rng, 0.0

    def until_next_step(self) -> None:
        before, began = steps_logged(self.run_dir), time.monotonic()
        while steps_logged(self.run_dir) <= before:
            self.check(began)
            time.sleep(0.01)
        self.longest = max(self.longest, time.monotonic() - began)

    def check(self, began: float) -> None:
        if self.process.poll() is not None or time.monotonic() - began > PATIENCE:
            raise SystemExit(f"the run ended ({self.process.poll()}) or hangs:\n{self.log.read_text()[-6000:]}")

    def kill(self, kind: str) -> None:
        """Kill a process of ``kind`` at a random moment of a step."""
        time.sleep(self.rng.uniform(0, 3))
        began = time.monotonic()
        while not (roles := [role for role in processes(self.run_dir) if role.startswith(kind)]):
            self.check(began)
            time.sleep(0.01)
        role = self.rng.choice(roles)
        try:
            os.kill(processes(self.run_dir)[role], signal.SIGKILL)
        except (KeyError, ProcessLookupError):
            return self.kill(kind)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each role: rank, engine, worker")
    parser.add_argument("--nodes", type=int, default=5, help="nodes that vanish with all that runs there")
    parser.add_argument("--roles", nargs="+", default=["rank", "engine", "worker"])
    parser.add_argument("--seed", type=int, help="of the moments (default: drawn, and printed)")
    parser.add_argument("--folder", type=Path, help="empty or new, to look into afterwards (default: a temporary one)")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    rng = random.Random(seed)
    acts = [role for role in options.roles for _ in range(options.kills)] + ["node"] * options.nodes
    rng.shuffle(acts)
    # Each disturbance waits for one step, and a rank's death may take one back.
    steps = 2 * len(acts) + 4
    print(f"{len(acts)} disturbances, {steps} steps, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        whole = start(settings(folder, "whole", steps), folder / "whole.log")
        if whole.wait():
            raise SystemExit((folder / "whole.log").read_text())
        print(f"one process, left alone: {time.monotonic() - began:.0f} s", flush=True)
        with three_nodes() as cluster:
            began = time.monotonic()
            on_cluster = settings(folder, "killed", steps, cluster={**CLUSTER, "address": cluster.address})
            process = start(on_cluster, folder / "killed.log")
            run = Disturbed(process, folder / "killed", folder / "killed.log", rng)
            try:
                run.until_next_step()
                run.longest = 0.0
                for number, act in enumerate(acts, 1):
                    if act == "node":
                        node = rng.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id))
                        cluster.remove_node(node, allow_graceful=False)
                        cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20, resources=HAS)
                    else:
                        run.kill(act)
                    run.until_next_step()
                    print(f"{number}: {act}, step {steps_logged(run.run_dir)}", flush=True)
                while process.poll() is None:
                    time.sleep(0.1)
            finally:
                process.terminate()
            print(f"cluster: {time.monotonic() - began:.0f} s; longest wait {run.longest:.0f} s", flush=True)
            if process.returncode:
                raise SystemExit((folder / "killed.log").read_text()[-6000:])
        check_trained(folder / "whole", steps)
        found = [line for line in differences(folder / "whole", folder / "killed") if "checkpoints" not in line]
    print("\n".join(found) or "equal: weights, metrics and rollouts, each step once")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
