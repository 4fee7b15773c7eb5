"""Whole runs of several tasks: metrics by task, shares, resumes, the loss by task, evaluation, and errors."""

from __future__ import annotations

import json

import pytest

from turnwise.arena.stages.task_labels import TaskLabels
from turnwise.replay.replay import replay
from turnwise.report.credit import compare_credit
from turnwise.report.read import read_run
from turnwise.run.build import build_run, train_from_config
from turnwise.run.checks import resolve_config, task_of
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.validate import config_from_dict, load_config
from turnwise.types import GenerateResult, Rollout, RolloutFacts, Sample, Step

from .trained import SMALL, equal, lines_of, rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")

TASKS = {
    "easy": {"task": "sudoku", "options": {"blanks": [1, 1]}},
    "hard": {"task": "sudoku", "options": {"blanks": [3, 4]}, "weight": 2, "credit": {"rule": "at_grpo"}},
    "split_clues": {"reward": {"alpha": 0.5}, "credit": {"rule": "episodic"}},
}


def config_of(run_dir, **changes):
    rollout = {"prompts_per_step": 4, "branches": 2}
    log = {"rollouts_per_step": 99, "progress": False}
    base = {**SMALL, "rollout": rollout, "log": log, "tasks": TASKS, "credit": {"rule": "constant"}}
    return config_from_dict({**base, "run_dir": str(run_dir), **changes})


def test_a_run_of_three_tasks_resumes_with_the_same_bits(tmp_path):
    """Also with a rule with state, and with questions that a curriculum draws."""
    tasks = {**TASKS, "easy": {**TASKS["easy"], "credit": {"rule": "rae"}}}
    changes = {
        "tasks": tasks,
        "curriculum": {"sampling": "learnability", "pool": 6},
        "eval": {"every": 1, "num_prompts": 3},
    }
    whole = train_from_config(config_of(tmp_path / "whole", steps=4, **changes))
    train_from_config(config_of(tmp_path / "parts", steps=2, **changes))
    parts = train_from_config(config_of(tmp_path / "parts", steps=4, **changes))
    lines = lines_of(tmp_path / "whole")
    assert lines == lines_of(tmp_path / "parts")
    first, second = (dict(run.trainer.policies["default"].all_weights()) for run in (whole, parts))
    assert equal(first, second) and whole.arena.state_dict()["stages"] == parts.arena.state_dict()["stages"]
    assert set(whole.arena.state_dict()["credit"]) == {"easy"}
    # Shares of 4 questions by weights 1, 2 and 1, in each step; metrics by task, which add up.
    for line in lines[1:]:
        assert [line[f"{task}/episodes"] for task in TASKS] == [1, 2, 1]
        assert sum(line[f"{task}/samples"] for task in TASKS) == line["samples"]
        assert sum(line[f"{task}/sampled_tokens"] for task in TASKS) == line["sampled_tokens"]
        assert {f"metric/{task}/success" for task in TASKS} <= line.keys() and "easy/curriculum/seen" in line
    assert {f"validation/{task}" for task in TASKS} <= lines[0].keys()
    shares = [lines[0][f"validation/{task}"] for task in TASKS]
    assert lines[0]["validation"] == pytest.approx(sum(shares) / 3)
    # Each row says its task, and plays with that task's prompts; the record replays.
    recorded = rows_of(tmp_path / "whole", "rollouts.jsonl")
    assert {(row["meta"]["task"], row["episode_type"]) for row in recorded} == {
        ("easy", "easy/sudoku"), ("hard", "hard/sudoku"), ("split_clues", "split_clues")
    }  # fmt: skip
    for row in recorded:
        assert row["metrics"]["success"] == row["metrics"][f"{row['meta']['task']}/success"]
    for row in (recorded[0], recorded[-1]):
        assert replay(tmp_path / "whole", row["id"]).divergence is None
    own = compare_credit(tmp_path / "whole")
    assert own.rule == own.own_rule == "easy: rae, hard: at_grpo, split_clues: episodic"
    assert own.own_exact == len(own.calls) == compare_credit(tmp_path / "whole", "grpo").own_exact
    with pytest.raises(ValueError, match="expected none, as each task has its own rule; name one by --rule"):
        compare_credit(tmp_path / "whole", options={"decay": 0.5})
    assert read_run(tmp_path / "whole")["tasks"] == list(TASKS)
    evaluated = whole.evaluate()
    assert list(evaluated.by_task) == list(TASKS) and evaluated.episodes == 9


def test_each_task_has_its_own_rule_rewards_and_rounds(tmp_path):
    run = build_run(config_of(tmp_path, warm_start={"steps": 0}))
    rules = {name: type(rule).__name__ for name, rule in run.arena.credit.rules.items()}
    assert rules == {"easy": "ConstantCredit", "hard": "ATGRPOCredit", "split_clues": "EpisodicCredit"}
    assert run.arena.mix_of("split_clues").alpha == 0.5 != run.arena.mix_of("hard/sudoku").alpha
    assert {actor.id for actor in run.arena.teams["split_clues"].values()} == {"reader", "writer"}
    run.close()


def played(task, *lengths):
    steps = [
        Step(
            actor_id="solver", turn=0, prompt=[], completion="", policy="default", finish_reason="stop",
            prompt_token_ids=[1], completion_token_ids=[2] * length, completion_logprobs=[-1.0] * length,
            policy_versions=[(length, 0)],
        )
        for length in lengths
    ]  # fmt: skip
    return GenerateResult(Rollout("r", task, "q", facts=RolloutFacts(task=task), steps=steps))


def sample(top, tokens, advantage, **more):
    return Sample(
        "q", top.rollout.episode_type, "solver", 0, 0, None, "r", 0, "default", [1], [2] * tokens, [-1.0] * tokens,
        [(tokens, 0)], 1.0, 1.0, advantage, root_result=top, **more,
    )  # fmt: skip


def test_what_is_sampled_and_what_trains_is_counted_by_task():
    labels = TaskLabels({"a": "x", "b": "x"}, {"a": 0.25, "b": 0.75})
    a, b = played("a", 4, 5, 3), played("b", 2, 2)
    masked = sample(a, 5, -1.0, loss_mask=[1, 1, 0, 0, 0])
    assert labels.selected(None, [a, b], [sample(a, 4, 1.0), masked, sample(b, 2, 2.0)]) == {
        "a/episodes": 1, "a/sampled_tokens": 12, "a/samples": 2, "a/tokens": 6,
        "b/episodes": 1, "b/sampled_tokens": 4, "b/samples": 1, "b/tokens": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"task": "split_clues"}, r"task = 'split_clues': expected none beside \[tasks.<name>\]"),
        ({"gateway": {"max_calls": 3}}, r"section 'gateway': has no effect: expected one of \[tasks.<name>\]"),
        ({"tasks": {"a": {"task": "sudokuu"}}}, r"section 'tasks.a': .*sudoku"),
        ({"tasks": {"a": {"task": "sudoku", "options": {"blank": 1}}}}, r"section 'tasks.a': .*unknown option 'blank'"),
        ({"tasks": {"sudoku": {"credit": {"rule": "nope"}}}}, r"section 'tasks.sudoku': .*'nope'"),
        ({"tasks": {"sudoku": {"weight": 0}}}, r"tasks.sudoku.weight"),
        ({"tasks": {"sudoku": {"reward": {"overlong_buffer": 4}}}}, r"reward.overlong_buffer: has no effect"),
        ({"eval": {"every": 1, "ablate": True}}, r"eval.ablate"),
        ({"league": {"share": 0.5}}, r"league"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_with_several_tasks(tmp_path, changes, error):
    with pytest.raises(ConfigError, match=error):
        config = config_of(tmp_path, **changes)
        problems = Problems()
        resolve_config(config, task_of(config), problems)
        problems.raise_any()


def test_the_written_config_reads_back(tmp_path):
    run = build_run(config_of(tmp_path, warm_start={"steps": 0}))
    assert config_from_dict(json.loads(run.config.model_dump_json())) == run.config
    run.close()


def test_options_of_a_task_are_read_by_their_types():
    """``none`` is a way to scale here, and no value elsewhere."""
    given = {"tasks.hard.task": "sudoku", "tasks.hard.options.blanks": "[4, 6]", "tasks.hard.weight": "2"}
    given |= {"tasks.hard.credit.rule": "grpo", "tasks.hard.credit.options.scale": "none"}
    one = load_config(None, given).tasks["hard"]
    assert (one.task, one.weight, one.options) == ("sudoku", 2.0, {"blanks": [4, 6]})
    assert one.credit is not None and one.credit.options == {"scale": "none"}


def test_the_gateway_serves_the_tasks_that_call_it(tmp_path):
    tasks = {**TASKS, "agents": {"task": "gateway:module:agent"}}
    config = config_of(tmp_path, tasks=tasks, gateway={"max_calls": 3})
    assert config.of_task("agents").gateway == {"max_calls": 3} and config.of_task("easy").gateway == {}
