"""The growing files of a run: what is newest is found from their ends, however long they are."""

from __future__ import annotations

import json
import os
import random

import pytest

from turnwise.replay.replay import find_episode
from turnwise.report.status import read_status
from turnwise.report.trace import trace_rewards
from turnwise.run.export import _validation
from turnwise.train.log.lines import add_to_step, append_lines, count_lines, keep_steps, newest_lines, read_rows
from turnwise.train.log.run_log import RunLog
from turnwise.types import GenerateResult, Rollout
from turnwise.utils import files


@pytest.mark.parametrize("block", [1, 2, 7, 64])
@pytest.mark.parametrize("seed", range(4))
def test_lines_from_the_end_are_the_lines(tmp_path, monkeypatch, seed, block):
    draw = random.Random(seed)
    path = tmp_path / "lines"
    monkeypatch.setattr(files, "_BLOCK", block)
    for _ in range(20):
        content = "".join(draw.choice("ab\n\n") for _ in range(draw.randrange(30))).encode()
        path.write_bytes(content)
        with path.open("rb") as stream:
            expected = list(files.bounded_lines(stream, path))
            found = list(files.lines_from_end(stream, path))
        assert [line for _, line in reversed(found)] == expected
        assert all(content[start : start + len(line)] == line for start, line in found)


def test_a_line_from_the_end_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK", 4)
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 30 + b"\nshort\n")
    with path.open("rb") as stream:
        lines = files.lines_from_end(stream, path, most=10)
        assert next(lines) == (31, b"short\n")
        with pytest.raises(ValueError, match=rf"{path}, before byte \d+: expected at most 10 bytes in a line"):
            next(lines)


def test_the_newest_lines_by_hand(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert list(newest_lines(path)) == []
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert [(line.start, line.end, line.row) for line in newest_lines(path)] == [
        (12, 24, {"step": 2}),
        (0, 12, {"step": 1}),
    ]
    assert count_lines(path) == 2 and [row["step"] for row in read_rows(path)] == [1, 2]


@pytest.mark.parametrize(
    ("last", "kept"), [(-1, b""), (1, b'{"step": 1}\n'), (2, b'{"step": 1}\n{"step": 2}\n{"step": 2}\n'), (9, None)]
)
@pytest.mark.parametrize("cut", [b"", b'{"step": 3, "rew', b'{"step": 4}'])
def test_steps_are_kept_by_hand(tmp_path, last, kept, cut):
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3}\n'
    path.write_bytes(whole + cut)
    keep_steps(path, last)
    all_of_them = whole + (cut + b"\n" if cut.endswith(b"}") else b"")
    assert path.read_bytes() == (all_of_them if kept is None else kept)


def test_what_already_fits_is_not_touched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": 1}, {"step": 2}])
    os.utime(path, ns=(1, 1))
    keep_steps(path, 2)
    assert path.stat().st_mtime_ns == 1, "status shows the age of the last step"


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, '{"step": 1}\n{"step": 2, "a": 1}\n{"step": 3}\n{"step": 0, "v": 5}\n'),
        (1, '{"step": 1, "v": 5}\n{"step": 2, "a": 1}\n{"step": 3}\n'),
        (2, '{"step": 1}\n{"step": 2, "a": 1, "v": 5}\n{"step": 3}\n'),
        (4, '{"step": 1}\n{"step": 2, "a": 1}\n{"step": 3}\n{"step": 4, "v": 5}\n'),
    ],
)
def test_metrics_are_added_to_a_step_by_hand(tmp_path, step, expected):
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": 1}, {"step": 2, "a": 1}, {"step": 3}])
    add_to_step(path, step, {"v": 5})
    assert path.read_text() == expected


# -- a run of any length -----------------------------------------------------------------------------------------------
def recorded(folder, steps):
    log = RunLog(folder, steps)
    for step in range(1, steps + 1):
        metrics = {"reward": 0.5, **({"validation": 0.5, "validation/exact": step} if step % 10 == 0 else {})}
        log.step(step, metrics, [GenerateResult(Rollout(f"e{step}", "x", None))])
        log.warn(step, "a ratio of 30")
    return folder


def resume(folder, steps):
    assert RunLog(folder, steps).rewind(steps - 3, 0.5) == 3
    assert next(newest_lines(folder / "metrics.jsonl")).row["step"] == steps - 3
    add_to_step(folder / "metrics.jsonl", steps - 3, {"more": 1})


def look(folder, steps):
    assert read_status(folder).step == steps
    assert find_episode(folder / "rollouts.jsonl", None, None)["id"] == f"e{steps}"
    assert find_episode(folder / "rollouts.jsonl", f"e{steps - 3}", None)["step"] == steps - 3
    assert trace_rewards(folder).episode == f"e{steps}"
    progress = {"evaluations": {str(steps // 10 * 10): 0.5}}
    assert list(_validation(folder, progress).values()) == ["50.0%", f"{steps // 10 * 10}"]


@pytest.mark.parametrize("act", [resume, look])
def test_what_reads_the_newest_parses_as_many_lines_of_a_long_run(tmp_path, monkeypatch, act):
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda *arguments, **options: parsed.append(1) or loads(*arguments, **options))
    counts = []
    for steps in (45, 405):
        folder = recorded(tmp_path / str(steps), steps)
        parsed.clear()
        act(folder, steps)
        counts.append(len(parsed))
    assert counts[0] == counts[1] > 0
