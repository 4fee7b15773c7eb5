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
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from kill_loop import COMMON, Process, check_trained, differences, fresh, run_to_end, steps_logged, wait

from turnwise.cluster.members import events_file
from turnwise.train.config.toml import to_toml
from turnwise.train.validate import config_from_dict

ENGINE = {"count": 2, "cpus": 0, "engine": "transformers", "options": {"max_batch_size": 1}}
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


def start(folder: Path, name: str, steps: int, **others: Any) -> Process:
    """Start ``turnwise train``."""
    rollout = {"prompts_per_step": 4, "max_batch_rows": 1}
    config = {**COMMON, "device": "cpu", "rollout": rollout, "steps": steps, "run_dir": str(folder / name), **others}
    file = folder / f"{name}.toml"
    file.write_text(to_toml(config_from_dict(config)))
    os.environ["OMP_NUM_THREADS"] = "1"
    return fresh(file, folder / f"{name}.log")


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

    def __init__(self, process: Process, run_dir: Path, rng: random.Random) -> None:
        self.process, self.run_dir, self.rng, self.longest = process, run_dir, rng, 0.0

    def until_next_step(self) -> None:
        before, began = steps_logged(self.run_dir), time.monotonic()
        wait(self.process, lambda: steps_logged(self.run_dir) > before)
        self.longest = max(self.longest, time.monotonic() - began)

    def kill(self, kind: str) -> None:
        """Kill a process of ``kind`` at a random moment of a step."""
        time.sleep(self.rng.uniform(0, 3))
        while True:
            wait(self.process, lambda: any(role.startswith(kind) for role in processes(self.run_dir)))
            found = processes(self.run_dir)
            roles = [role for role in found if role.startswith(kind)]
            with suppress(IndexError, ProcessLookupError):  # it has just died
                os.kill(found[self.rng.choice(roles)], signal.SIGKILL)
                return


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
        run_to_end(start(folder, "whole", steps))
        print(f"one process, left alone: {time.monotonic() - began:.0f} s", flush=True)
        with three_nodes() as cluster:
            began = time.monotonic()
            process = start(folder, "killed", steps, cluster={**CLUSTER, "address": cluster.address})
            run = Disturbed(process, folder / "killed", rng)
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
                run_to_end(process)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
            print(f"cluster: {time.monotonic() - began:.0f} s; longest wait {run.longest:.0f} s", flush=True)
        check_trained(folder / "whole", steps)
        found = [line for line in differences(folder / "whole", folder / "killed") if "checkpoints" not in line]
    print("\n".join(found) or "equal: weights, metrics and rollouts, each step once")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
