"""From a run folder to the report's data: everything that was logged, within limits, whatever is half written."""

from __future__ import annotations

import json
import math
import re
import tracemalloc

import pytest

from turnwise.report import ReportLimits, read_rollouts, read_run
from turnwise.report.curves import most_changed, spread
from turnwise.report.read import choose
from turnwise.train.log.run_log import RunLog
from turnwise.types import GenerateResult, Rollout

from ..trained import rows_of
from .hand_made import HOSTILE, chat_run


def test_limits_are_counts(tmp_path):
    for name in ("points", "episodes", "episode_bytes"):
        with pytest.raises(ValueError, match=f"{name}=0: expected a count"):
            ReportLimits(**{name: 0})
    with pytest.raises(ValueError, match=r"run_dir=.*no run folder"):
        read_run(tmp_path)


def test_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "config.toml").write_text("steps = 7\n")
    run = read_run(tmp_path)
    assert (run["planned"], run["curves"]["step"], run["episodes"], run["recorded"]) == (7, [], [], 0)


def test_what_the_run_was_warned_of_is_there(made_run):
    assert read_run(made_run)["warnings"] == []
    RunLog(made_run, 1).warn(1, "no sample trains: <i>4 alone</i>")
    assert read_run(made_run)["warnings"] == [{"step": 1, "warning": "no sample trains: <i>4 alone</i>"}]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (made_run / name).open("a") as stream:
            stream.write('{"step": 2, "rew')
    run = read_run(made_run)
    assert (run["curves"]["step"], run["recorded"], len(run["episodes"])) == ([1], 1, 1)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "config.toml"])
def test_a_bad_byte_is_named_with_its_file(made_run, name):
    """It was told as `'utf-8' codec can't decode byte 0xff in position 9`, of no file."""
    with (made_run / name).open("ab") as stream:
        stream.write(b'{"step": "\xff"}\n')
    lines = (made_run / name).read_bytes().count(b"\n")
    place = re.escape(str(made_run / name)) + ("" if name == "config.toml" else f", line {lines}")
    with pytest.raises(ValueError, match=f"{place}: expected .*(can't decode byte 0xff|not UTF-8)"):
        read_run(made_run)


def test_the_whole_episode_is_there(made_run):
    run = read_run(made_run)
    (top,) = run["episodes"]
    assert [(step["actor"], step["turn"], step["branch"], step["selected"]) for step in top["steps"]] == [
        ("alice", 0, 0, True),
        ("alice", 0, 1, False),
        ("alice", 0, 2, False),
        ("bob", 0, 0, True),
        (None, 1, 0, True),
    ]
    first = top["steps"][0]
    assert (first["text"], "".join(first["tokens"])) == (HOSTILE, HOSTILE)
    assert len(first["tokens"]) == len(first["ids"]) == len(first["logprobs"]) == sum(n for n, _ in first["versions"])
    assert (first["reward"], first["advantage"], first["node"]) == (1.0, 0.5, str(2**47))
    assert (top["children"][0]["error"], top["children"][0]["steps"][0]["text"]) == ("Boom: <i>line 3</i>", "half done")
    assert run["actors"] == ["alice", "bob"]
    # Siblings share one prompt and its private part is marked.
    alice = run["episodes"][0]["steps"][:3]
    assert len({step["prompt"] for step in alice}) == 1
    assert run["prompts"][alice[0]["prompt"]] == {
        "after": None,
        "kept": 0,
        "messages": [{"role": "user", "content": "the board. Your card: ace", "private": ["Your card: ace"]}],
    }
    bob = run["prompts"][run["episodes"][0]["steps"][3]["prompt"]]["messages"]
    assert [message["private"] for message in bob] == [False, False]
    assert run["curves"]["series"] == {"reward": [None], "default/loss": [0.5]}
    assert run["episodes"][0]["rewards"] == {"alice": 1.0, "bob": "nan"}
    assert run["episodes"][0]["seed"] == str(2**62 + 1)
    json.dumps(run, allow_nan=False)
    assert run["contributions"] is None


def test_a_page_holds_each_message_of_a_chat_once(tmp_path):
    steps = chat_run(tmp_path)
    run = read_run(tmp_path)
    assert [(one["after"], one["kept"], len(one["messages"])) for one in run["prompts"]] == [
        (None, 0, 1),
        (0, 1, 2),
        (1, 3, 2),
    ]
    assert run["prompts"][2]["messages"][0] == {"role": "assistant", "content": "two", "private": False}
    assert [step["prompt_tokens"] for step in run["episodes"][0]["steps"]] == [len(s.prompt_token_ids) for s in steps]


def test_recorded_episodes_are_read_with_whole_prompts(tmp_path):
    steps = chat_run(tmp_path)
    [row] = read_rollouts(tmp_path)
    for step, whole in zip(steps, row["steps"], strict=True):
        assert (list(whole["prompt"]), list(whole["prompt_token_ids"])) == (step.prompt, step.prompt_token_ids)
    with pytest.raises(ValueError, match=r"run_dir=.*expected rollouts\.jsonl"):
        next(read_rollouts(tmp_path / "none"))
    line = json.loads((tmp_path / "rollouts.jsonl").read_text())
    line["steps"][1]["follows"]["step"] = 7
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 1: .*expected one of the 1 earlier steps"):
        next(read_rollouts(tmp_path))
    with pytest.raises(ValueError, match="damaged records"):
        read_run(tmp_path)


def test_token_ids_stand_for_texts_that_were_not_recorded(tmp_path, made_run):
    line = json.loads((made_run / "rollouts.jsonl").read_text())
    del line["steps"][3]["completion_tokens"]
    (made_run / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    step = read_run(made_run)["episodes"][0]["steps"][3]
    assert step["tokens"] == [f"⟨{token}⟩" for token in step["ids"]]


def test_a_real_run(real_run):
    run = read_run(real_run)
    assert (run["actors"][:2], run["policies"], run["planned"]) == (["proposer", "reviser"], ["default"], 3)
    assert run["curves"]["step"] == [0, 1, 2, 3, 4]
    series = run["curves"]["series"]
    assert all(math.isfinite(value) for value in series["validation"][:4])
    assert {"default/loss", "default/proposer/entropy", "reward/proposer", "step_reward/reviser"} <= series.keys()
    added = run["contributions"]
    assert added["step"] == 3 and list(added["actors"]) == ["proposer", "reviser"]
    assert {"handed", "changed", "wrong", "fixed", "right"} <= added["actors"]["reviser"].keys()
    step = run["episodes"][0]["steps"][0]
    assert "".join(step["tokens"]).removesuffix("<|end|>") == step["text"]


def test_what_was_learned_and_what_it_cost(real_run, team):
    run = read_run(real_run)
    (first, _), (last, end) = run["learned"]["validations"]
    assert (first, last, end) == (0, 3, run["curves"]["series"]["validation"][3])
    assert run["learned"]["held_out"]["success"] == team.evaluation.success and run["cost"]["seconds"] > 0
    assert run["cost"]["tokens"] == sum(row["sampled_tokens"] for row in rows_of(real_run) if "sampled_tokens" in row)


def test_the_episodes_between_which_most_was_gained():
    def played(step, reward, question="q", error=None):
        return {"step": step, "rewards": {"a": reward}, "artifact": question, "error": error}

    episodes = [played(1, 0.5), played(1, 0.0, "other"), played(5, 1.0), played(9, 0.75), played(9, 9.0, error="boom")]
    assert most_changed(episodes) == [0, 3], "of one question, the newest third"
    assert most_changed(episodes[1:4]) == [0, 2] and most_changed(episodes[2:3]) is most_changed([]) is None


def test_a_run_whose_metrics_had_no_policy_continues_in_the_same_curves(tmp_path):
    old = {"updates": 2.0, "loss": 0.5, "solver/entropy": 1.0, "masked/drift": 0.1, "metric/tokens": 3.0}
    old |= {"solver/masked/drift": 0.2, "reward/solver": 0.25, "completion_tokens/solver": 7.0, "inference/tokens": 9.0}
    log = RunLog(tmp_path, 2)
    log.step(1, old)
    log.step(2, {"default/updates": 1.0, "default/loss": 0.25, "default/solver/entropy": 0.5, "reward/solver": 0.5})
    (tmp_path / "config.toml").write_text('task = "sudoku"\n')
    series = read_run(tmp_path)["curves"]["series"]
    assert series["default/loss"] == [0.5, 0.25] and series["default/solver/entropy"] == [1.0, 0.5]
    assert series["default/masked/drift"] == [0.1, None] and series["default/solver/masked/drift"] == [0.2, None]
    assert {"reward/solver", "inference/tokens", "metric/tokens"} <= series.keys() and "loss" not in series


# ---- limits ---------------------------------------------------------------------------------------------------------
def test_long_curves_are_thinned_but_for_rare_metrics(tmp_path):
    log = RunLog(tmp_path, 1000)
    for step in range(1000):
        log.step(step, {"reward": step, **({"validation": 0.5} if step % 97 == 0 else {})})
    curves = read_run(tmp_path, ReportLimits(points=100))["curves"]
    assert curves["rows"] == 1000
    assert 100 <= len(curves["step"]) <= 111
    assert curves["step"] == curves["series"]["reward"]
    assert sum(value is not None for value in curves["series"]["validation"]) == 11
    assert (curves["step"][0], curves["step"][-1]) == (0, 999)


def test_a_page_holds_what_it_shows_of_a_run_of_any_length(tmp_path):
    def peak(steps):
        log = RunLog(tmp_path / str(steps), steps)
        episodes = [GenerateResult(Rollout("r", "x", None))]
        for step in range(steps):
            log.step(step, {f"metric_{number}": 0.5 for number in range(40)}, episodes)
        tracemalloc.start()
        try:
            read_run(tmp_path / str(steps), ReportLimits(points=20, episodes=5))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100)
    assert peak(3000) < 1.5 * peak(300)


@pytest.mark.parametrize(
    ("count", "wanted", "expected"), [(0, 3, []), (3, 5, [0, 1, 2]), (9, 1, [8]), (11, 3, [0, 5, 10]), (1, 1, [0])]
)
def test_spread(count, wanted, expected):
    assert spread(count, wanted) == expected


def test_of_many_episodes_the_newest_and_some_from_everywhere(tmp_path):
    log = RunLog(tmp_path, 90)
    for step in range(90):
        log.step(step, {}, [GenerateResult(Rollout(f"r{step}", "x", None))])
    run = read_run(tmp_path, ReportLimits(episodes=9))
    assert [top["step"] for top in run["episodes"]] == [0, 17, 34, 52, 69, 86, 87, 88, 89]
    assert run["recorded"] == 90


def test_long_episodes_leave_room_for_fewer():
    assert len(choose([10] * 90, ReportLimits(episodes=60))) == 60
    assert sum([10] * len(choose([10] * 90, ReportLimits(episodes=60, episode_bytes=200)))) <= 200
    assert choose([10] * 90, ReportLimits(episodes=60, episode_bytes=5)) == [89], "the newest one is always there"
    assert choose([], ReportLimits()) == []


# ---- what each actor adds -------------------------------------------------------------------------------------------
def test_the_last_validation_that_measured_actors_is_taken(tmp_path):
    log = RunLog(tmp_path, 3)
    log.step(1, {"validation": 0.4, "validation/a/b/changed": 0.9, "validation/editor/fixed": 0.1})
    log.step(2, {"validation": 0.5, "validation/a/b/changed": 0.25, "validation/a/b/handed": 8, "metric/x": 1.0})
    log.step(3, {"validation": 0.6})
    assert read_run(tmp_path)["contributions"] == {"step": 2, "actors": {"a/b": {"changed": 0.25, "handed": 8.0}}}
