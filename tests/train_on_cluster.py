"""Train a config on a Ray cluster of three nodes on this machine, and print how long it took and the most memory.

    python tests/train_on_cluster.py examples/cluster.toml --run_dir /tmp/sudoku

The nodes are those of ``kill_cluster.py``: raylets with an invented resource, so engines and the rank are on two of
them. The memory is the sum over all processes of the run and of Ray, with pages that they share counted once (PSS).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from kill_cluster import three_nodes


def group_memory(parents: set[int]) -> float:
    """MiB of the processes ``parents`` and all that descend from them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
            except OSError:
                continue  # it has just ended
    found, left = 0, list(parents)
    while left:
        process = left.pop()
        left += children.get(process, [])
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found / 1024


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 2
    with three_nodes() as cluster:
        words = {
            "cluster.address": cluster.address, "cluster.trust_network": "true", "cluster.learner.cpus": "0",
            "cluster.learner.resources": '{"learner": 1}', "cluster.engines.main.resources": '{"sim_gpu": 1}',
        }  # fmt: skip
        settings = [word for key, value in words.items() for word in (f"--{key}", value)]
        began, most = time.monotonic(), 0.0
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "turnwise", "train", *sys.argv[1:], *settings],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while process.poll() is None:
            most = max(most, group_memory({os.getpid()}))
            time.sleep(2)
        print(f"exit code {process.returncode}; {time.monotonic() - began:.0f} s; at most {most:.0f} MiB", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
