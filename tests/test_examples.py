"""The examples run, and say what they claim."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_drop_in(tmp_path: Path) -> None:
    """Both ways of one training step give the same losses and gradients, and the model learns."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "drop_in.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "losses and gradients alike both ways" in done.stdout
