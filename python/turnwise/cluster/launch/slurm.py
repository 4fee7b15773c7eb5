"""Writes the batch script of a Slurm job that starts a Ray cluster and trains on it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from turnwise.cluster.launch.checks import FAILED_FOR_NOW, check_size, job_name
from turnwise.train.config.schema import TrainConfig

TIME = r"\d+|(\d+-)?\d+(:\d\d){1,2}|\d+-\d+"
"""Time limits as Slurm reads them: minutes, minutes:seconds, hours:minutes:seconds, each with days in front."""

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
@OPTIONAL@#SBATCH --time=@TIME@
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
# Starts a Ray cluster on the nodes of this job and trains on it. All nodes need these folders.
set -uo pipefail
set -m  # background processes then obey SIGINT, and none gets a signal that is meant for another one

cd @FOLDER@ || exit 1
export PATH=@BIN@:"$PATH"
config=@CONFIG@
run_dir=@RUN_DIR@
overrides=(@OVERRIDES@)

# Ray checks a token, which is made here. Only this user can read its file, in the folder that all nodes share.
mkdir -p -- "$run_dir" || exit 1
unset RAY_AUTH_TOKEN RAY_ADDRESS
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$run_dir/.ray-token-$SLURM_JOB_ID"
rm -f -- "$RAY_AUTH_TOKEN_PATH"
(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$RAY_AUTH_TOKEN_PATH") || exit 1
export RAY_DEDUP_LOGS=0 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0

started=()
finish() {
  trap - EXIT
  for process in "${started[@]}"; do kill -TERM "$process" 2>/dev/null; done
  wait
  rm -f -- "$RAY_AUTH_TOKEN_PATH"
}
trap finish EXIT

# One Ray node per node of the job. This script runs on the first of them, which is the head.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ip=$(python -c 'import ray.util; print(ray.util.get_node_ip_address())') || exit 1
address="$ip:$((20000 + SLURM_JOB_ID % 10000))"
step=(srun --overlap --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE")
ray=(ray start --block --disable-usage-stats)
"${step[@]}" --nodes=1 --ntasks=1 --nodelist="$head" \\
  "${ray[@]}" --head --node-ip-address="$ip" --port="${address##*:}" --dashboard-host=127.0.0.1 &
started+=($!)
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
  "${step[@]}" --nodes="$others" --ntasks="$others" --exclude="$head" "${ray[@]}" --address="$address" &
  started+=($!)
fi

# Wait for all nodes. Ray itself waits for ever.
python - "$address" "$SLURM_JOB_NUM_NODES" <<'PYTHON' || exit 1
import sys, time
import ray

address, wanted, deadline = sys.argv[1], int(sys.argv[2]), time.monotonic() + @WAIT@
there, error = 0, None
while time.monotonic() < deadline:
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        there = sum(node["Alive"] for node in ray.nodes())
        if there >= wanted:
            sys.exit(0)
    except Exception as failed:
        error = failed
    time.sleep(1)
sys.exit(f"turnwise: {there} of {wanted} nodes joined the Ray cluster in @WAIT@ s" + (f" ({error})" if error else ""))
PYTHON

# Train. Slurm sends USR1 before the time limit: the run then saves and ends.
RAY_ADDRESS="$address" turnwise train "$config" --cluster auto "${overrides[@]}" &
train=$!
started+=("$train")
heard=0 ending=0
trap 'heard=1 ending=1; kill -INT "$train" 2>/dev/null' USR1
while :; do
  heard=0 code=0
  wait "$train" || code=$?
  [ "$heard" -eq 0 ] && break  # else a signal ended the wait, and not the run
done
finish

# @RETRY@: the run can go on when its cluster starts again. 130: it saved before the time limit.
if [ "$code" -eq @RETRY@ ] || { [ "$ending" -eq 1 ] && [ "$code" -eq 130 ]; }; then
  if [ "${SLURM_RESTART_COUNT:-0}" -lt @REQUEUES@ ]; then
    echo "turnwise: exit code $code, requeued to go on from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
  else
    echo "turnwise: exit code $code, not requeued again after @REQUEUES@ times" >&2
  fi
fi
exit "$code"
"""


def slurm_script(
    config: TrainConfig,
    file: Path,
    *,
    nodes: int = 1,
    gpus_per_node: int = 8,
    time: str = "24:00:00",
    partition: str | None = None,
    overrides: Mapping[str, str] | None = None,
    wait: int = 600,
    requeues: int = 50,
) -> str:
    """Return the script that trains ``file``, whose ``config`` includes ``overrides``, on ``nodes`` nodes.

    It works in the present folder, with the present Python. ``wait`` is the most seconds until all nodes have joined,
    ``requeues`` the most times that the job is queued again. Raises ``ValueError`` for settings that Slurm would not
    read, and for nodes without room for the run.
    """
    check_size(config, nodes, gpus_per_node)
    if not re.fullmatch(TIME, time):
        raise ValueError(f"time={time!r}: expected a limit as Slurm has it, such as 24:00:00 or 2-12:00:00")
    if partition is not None and not re.fullmatch(r"[\w.,+-]+", partition):
        raise ValueError(f"partition={partition!r}: expected names of letters, digits, '_', '-' and '.'")
    for path in (Path.cwd(), file.absolute(), config.run_dir):
        if "\n" in str(path):
            raise ValueError(f"{str(path)!r}: expected a path on one line")
    optional = [f"#SBATCH --gpus-per-node={gpus_per_node}\n"] if gpus_per_node else []
    optional += [] if partition is None else [f"#SBATCH --partition={partition}\n"]
    words = [word for key, value in (overrides or {}).items() for word in (f"--{key}={value}",)]
    parts = {
        "NAME": job_name(config, 63),
        "NODES": str(nodes),
        "OPTIONAL": "".join(optional),
        "TIME": time,
        "FOLDER": shlex.quote(str(Path.cwd())),
        "BIN": shlex.quote(str(Path(sys.executable).parent)),
        "CONFIG": shlex.quote(str(file.absolute())),
        "RUN_DIR": shlex.quote(str(config.run_dir.absolute())),
        "OVERRIDES": shlex.join(words),
        "WAIT": str(wait),
        "RETRY": str(FAILED_FOR_NOW),
        "REQUEUES": str(requeues),
    }
    return re.sub("@([A-Z_]+)@", lambda match: parts[match[1]], SCRIPT)
