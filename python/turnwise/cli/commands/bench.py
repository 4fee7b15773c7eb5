"""``turnwise bench``: time the ops, in a source checkout. The benches need other trainers and are not in the wheel."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import turnwise


def find_benches() -> Path | None:
    """Return ``bench/run.py`` of the checkout that this package belongs to, or of the working folder."""
    for root in (Path(turnwise.__file__).resolve().parents[2], Path.cwd()):
        if (root / "bench" / "bench_policy_loss.py").is_file():
            return root / "bench" / "run.py"
    return None


def run(options: argparse.Namespace) -> int:
    words = [*options.names, *(["--json"] if options.json else []), *(["--quick"] if options.quick else [])]
    return subprocess.run([sys.executable, str(find_benches()), *words], check=False).returncode
