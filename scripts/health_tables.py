"""Records the metrics of short healthy runs, by which the tests of the diagnoses check that none fires.

    PYTHONPATH=python .venv/bin/python scripts/health_tables.py            # all runs, about half an hour on one core
    PYTHONPATH=python .venv/bin/python scripts/health_tables.py sudoku     # one of them

Each run is a shipped config with fewer steps. Its table is a line per step in tests/train/health/tables.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "tests" / "train" / "health" / "tables"

RUNS = {
    "split_clues": ("python/turnwise/cli/run/demo_split_clues.toml", 12),
    "sudoku": ("python/turnwise/cli/run/demo_sudoku.toml", 12),
    "lookup": ("examples/lookup.toml", 12),
    "sub_agents": ("examples/sub_agents.toml", 24),
    "code_duel": ("examples/code_duel.toml", 12),
    "kuhn_poker": ("examples/kuhn_poker.toml", 15),
    "plan_path": ("examples/plan_path.toml", 12),
    "two_tasks": ("examples/two_tasks.toml", 10),
}
"""Config and number of steps of each run."""

LEFT_OUT = (
    *("seconds", "tokens_per_second", "inference/", "validation", "learning_rate", "rss", "total_", "staleness"),
    *("hook_seconds", "user_code", "metric/gateway/"),
)
"""Beginnings of the metrics that no diagnosis reads."""


def record(name: str) -> None:
    config, steps = RUNS[name]
    settings = {"steps": steps, "eval.num_prompts": 20, "threads": 1, "log.progress": "false"}
    with TemporaryDirectory() as folder:
        words = [f"--{key}={value}" for key, value in {**settings, "run_dir": f"{folder}/run"}.items()]
        subprocess.run([sys.executable, "-m", "turnwise", "train", str(ROOT / config), *words], check=True, cwd=ROOT)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        lines = [Path(folder, "run", "diagnosis.json").read_text().strip()]
    kept = [{key: value for key, value in row.items() if not key.startswith(LEFT_OUT)} for row in rows if row["step"]]
    lines += [json.dumps({key: float(f"{value:.4g}") for key, value in row.items()}) for row in kept]
    TABLES.mkdir(exist_ok=True)
    (TABLES / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or RUNS:
        record(name)
