from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict

import pytest

from turnwise.train.checkpoint.files import CheckpointError
from turnwise.train.checkpoint.progress import RunProgress, find_checkpoint
from turnwise.train.validate import config_from_dict


def config_of(**changes):
    return config_from_dict({"steps": 100, **changes})


def validated(*successes, **counters):
    """Validations at steps 0, 10, 20, …"""
    evaluations = {str(10 * i): success for i, success in enumerate(successes)}
    return RunProgress(step=10 * max(0, len(successes) - 1), evaluations=evaluations, **counters)


def test_which_steps_are_best_and_kept():
    assert RunProgress().best_step is None
    assert validated(0.1, 0.5, 0.3, 0.5).best_step == 10
    # Steps are numbers: "9" is before "10", whatever the order that they came in.
    assert RunProgress(evaluations={"10": 0.5, "9": 0.5}).best_step == 9
    # Survives JSON.
    progress = validated(0.1, 0.5, sampled_tokens=7)
    assert RunProgress(**json.loads(json.dumps(asdict(progress)))) == progress
    # Which steps are kept.
    every = config_of(checkpoint={"every": 5})
    assert [step for step in range(1, 12) if RunProgress(step=step).checkpoint_due(every)] == [5, 10]
    never = config_of()
    assert not any(RunProgress(step=step).checkpoint_due(never) for step in range(12))
    best = config_of(eval={"every": 10}, checkpoint={"keep_best": True})
    assert validated(0.1, 0.5).checkpoint_due(best) and validated(0.1, 0.5).best_kept(best) == 10
    assert not validated(0.5, 0.5).checkpoint_due(best)
    assert validated(0.5, 0.5).best_kept(every) is None


@pytest.mark.parametrize(
    ("progress", "changes", "reason"),
    [
        (RunProgress(step=99), {}, None),
        (RunProgress(step=100), {}, "steps = 100"),
        (RunProgress(seconds=7.0), {"max_seconds": 7}, "max_seconds = 7.0"),
        (RunProgress(sampled_tokens=49), {"max_sampled_tokens": 50}, None),
        (RunProgress(sampled_tokens=50), {"max_sampled_tokens": 50}, "max_sampled_tokens = 50"),
        (validated(0.2, 0.6), {"eval": {"every": 10, "target_success": 0.61}}, None),
        (validated(0.6, 0.2), {"eval": {"every": 10, "target_success": 0.6}}, None),
        (validated(0.6, 0.2, 0.6), {"eval": {"every": 10, "target_success": 0.6}}, None),
        (validated(0.6), {"eval": {"every": 10, "target_success": 0.6}}, None),
        (
            validated(0.6),
            {"eval": {"every": 10, "target_success": 0.6, "hold": 1}},
            "eval.target_success = 0.6: .* 60.0%",
        ),
        (
            validated(0.2, 0.6, 0.7),
            {"eval": {"every": 10, "target_success": 0.6}},
            "eval.target_success = 0.6: .* 60.0% and 70.0%",
        ),
        (validated(0.7, 0.8, 0.5), {"eval": {"every": 10, "target_success": 0.6, "hold": 2}}, None),
        (validated(0.7, 0.5, 0.8, 0.9), {"eval": {"every": 10, "target_success": 0.6, "hold": 3}}, None),
        (RunProgress(), {"eval": {"every": 10, "target_success": 0.1, "patience": 1}}, None),
        (validated(0.5), {"eval": {"every": 10, "patience": 1}}, None),
        (validated(0.2, 0.5, 0.4), {"eval": {"every": 10, "patience": 2}}, None),
        (validated(0.2, 0.5, 0.4, 0.5), {"eval": {"every": 10, "patience": 2}}, "eval.patience = 2: .* step 10 "),
        (validated(0.2, 0.5, 0.4, 0.6), {"eval": {"every": 10, "patience": 2}}, None),
    ],
)
def test_what_ends_a_run(progress, changes, reason):
    got = progress.finished(config_of(**changes))
    assert (got is None) if reason is None else re.match(reason, got or ""), got


def test_checkpoints_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint 'best': .* has none"):
        find_checkpoint(tmp_path, "best")
    for step, evaluations in ((10, {}), (20, {"10": 0.5, "20": 0.4})):
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        state = {"progress": {"step": step, "evaluations": evaluations}}
        (folder / "manifest.json").write_text(json.dumps({"state": state}))
        if step == 10:
            with pytest.raises(CheckpointError, match=r"nothing was validated up to .*step_00000010"):
                find_checkpoint(tmp_path, "best")
    assert find_checkpoint(tmp_path, "best") == tmp_path / "step_00000010"
    assert find_checkpoint(tmp_path, "newest") == tmp_path / "step_00000020"
    assert find_checkpoint(tmp_path, "step_00000010") == tmp_path / "step_00000010"
    assert find_checkpoint(tmp_path, tmp_path / "elsewhere") == tmp_path / "elsewhere"
    shutil.rmtree(tmp_path / "step_00000010")
    with pytest.raises(CheckpointError, match=r"that of step 10 is gone; checkpoint.keep_best = true keeps it"):
        find_checkpoint(tmp_path, "best")
