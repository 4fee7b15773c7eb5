"""The processes of a run on a cluster: their lanes in the report."""

from __future__ import annotations

import json

import pytest

from turnwise.report import ReportLimits, read_run
from turnwise.report.cluster import StepTimes, lanes, parts_of_step, read_events, read_members
from turnwise.train.log.lines import TIME
from turnwise.train.log.metrics import EVENTS

from .hand_made import cluster_run

START = 1_700_000_000.0


def test_lanes_by_hand(tmp_path):
    cluster_run(tmp_path, START)
    newest = read_run(tmp_path, ReportLimits(points=1))["lanes"]
    assert [step[0] for step in newest["steps"]] == [3] and newest["left_out"] == 2
    run = read_run(tmp_path)
    assert TIME not in run["curves"]["series"] and "cluster/sync_seconds" in run["curves"]["series"]
    found = run["lanes"]
    roles = {role.pop("name"): role for role in found.pop("roles")}
    assert found == {
        "start": START,
        "end": START + 110.0,
        "steps": [[1, 10.0, 6.0, 3.0, 1.0], [2, 22.0, 30.0, 3.5, 0.5], [3, 60.0, 8.0, 2.0, 0.0]],
        "left_out": 0,
    }
    assert roles["rank-0"]["spans"] == [[0.0, 110.0, "n1"]]
    assert roles["engine-main-0"] == {
        "spans": [[2.0, 30.0, "n1"], [45.0, 110.0, "n2"]],
        "events": [[2.0, "started", ""], [30.0, "died", "exit code -9"], [45.0, "restarted", ""]],
    }
    assert roles["engine-main-1"]["spans"] == [[50.0, 90.0, "n2"], [100.0, 105.0, "n2"]]


def test_a_restart_without_a_death_ends_the_span_before(tmp_path):
    (tmp_path / "cluster").mkdir()
    events = [(0.0, "started"), (5.0, "restarted"), (9.0, "ended")]
    lines = [json.dumps({"time": START + at, "event": event, "role": "rank-0"}) for at, event in events]
    (tmp_path / EVENTS).write_text("\n".join(lines) + "\n")
    assert lanes(tmp_path, StepTimes(10))["roles"][0]["spans"] == [[0.0, 5.0, ""], [5.0, 9.0, ""]]


def test_a_run_without_a_cluster_has_no_lanes(made_run):
    assert read_run(made_run)["lanes"] is None
    assert (read_events(made_run), read_members(made_run)) == ([], {})
    assert parts_of_step({"seconds_rollout": 2.0, "seconds_update": 3.0}) == {"rollout": 2.0, "update": 3.0}
    row = {"seconds_rollout": 2.0, "seconds_update": 3.0, "cluster/sync_seconds": 1.0}
    assert parts_of_step(row) == {"rollout": 2.0, "update": 2.0, "sync": 1.0}
    assert parts_of_step({"validation": 0.5}) == {}


def test_an_unfinished_line_is_left_out_and_a_bad_one_is_named(tmp_path):
    cluster_run(tmp_path, START)
    count = len(read_events(tmp_path))
    with (tmp_path / EVENTS).open("a") as stream:
        stream.write('{"time": 1, "ev')
    assert len(read_events(tmp_path)) == count
    with (tmp_path / EVENTS).open("a") as stream:
        stream.write("\n")
    with pytest.raises(ValueError, match=rf"events.jsonl, line {count + 1}: expected a JSON object with time, event"):
        read_events(tmp_path)
    (tmp_path / "cluster" / "members.json").write_text("{")
    with pytest.raises(ValueError, match=r"members.json: expected JSON"):
        read_members(tmp_path)
