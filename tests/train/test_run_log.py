from __future__ import annotations

import json
import threading

from turnwise.train.run_log import RunLog, read_metrics
from turnwise.types import Actor, GenerateResult, Rollout


def test_a_line_a_step_and_a_few_rollouts(tmp_path):
    log = RunLog(tmp_path, 3, rollouts_per_step=1)
    results = [GenerateResult(Rollout(f"r{i}", "x", {"q": i}, error="boom" if i == 2 else None)) for i in range(3)]
    with log:
        log.step(1, {"reward": 0.5}, results)
        log.step(2, {"reward": 0.75})
    assert read_metrics(tmp_path) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75}]
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["step"], line["id"], line["error"]) for line in rollouts] == [(1, "r0", None), (1, "r2", "boom")]


def test_extras_that_json_cannot_hold_do_not_end_a_run(tmp_path):
    extras = {(0, 1): {"seat": 2}, "lock": threading.Lock(), "moves": (1, 2)}
    RunLog(tmp_path, 1).step(1, {}, [GenerateResult(Rollout("r0", "x", Actor("solver"), extras=extras))])
    line = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert (line["extras"]["(0, 1)"], line["extras"]["moves"]) == ({"seat": 2}, [1, 2])
    assert "lock" in line["extras"]["lock"] and line["artifact"]["id"] == "solver"


def test_rewind_drops_later_and_broken_lines(tmp_path):
    log = RunLog(tmp_path, 3)
    for step in (1, 2, 3):
        log.step(step, {"reward": step})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 1, "rew')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    log.rewind(2)
    log.step(3, {"reward": 9})
    assert [line["reward"] for line in read_metrics(tmp_path)] == [1, 2, 9]
