"""Half of a team misbehaves (:mod:`tests.hostile_team`): the other half plays as if it were alone, and the run ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("hostile_team.py")


@pytest.mark.slow
@pytest.mark.representative
def test_healthy_episodes_play_as_if_they_were_alone(tmp_path: Path) -> None:
    started = {
        name: subprocess.Popen(
            [sys.executable, SCRIPT, tmp_path / name, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )
        for name, options in (("alone", ["--healthy"]), ("together", []))
    }  # fmt: skip
    told = {}
    for name, process in started.items():
        out, said = process.communicate(timeout=300)
        ended = time.time()
        assert process.returncode == 0, said
        told[name] = json.loads(out.splitlines()[-1])
    assert told["together"]["healthy"] == told["alone"]["healthy"] and len(told["alone"]["healthy"]) == 100
    assert all(error is None for *_, error in told["alone"]["healthy"])
    assert ended - told["together"]["ended"] < 10 + 5, (
        "it ends 10 s after its last step, on a machine that does nothing else"
    )
    assert told["together"]["open"] == 0
    metrics = told["together"]["metrics"]
    assert metrics["episodes/failed"] == 30, "of hooks, agents that hang, and agents that ignore their cancellation"
    counted = {name: value for name, value in metrics.items() if "_errors/" in name or name == "tool_calls_not_run"}
    assert counted == {
        **{f"tool_errors/{tool}": 20 for tool in ("hang", "leave", "fail")},
        "reward_errors/scored": 10,
        "tool_calls_not_run": 2 * 10 * (300 - 32),
    }
    assert metrics["user_code/abandoned"] == 40
    assert "left behind what still runs: agent 'agent' (10), tool 'hang' (20)" in said
