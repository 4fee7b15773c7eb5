"""``turnwise credit RUN --trace``: the way of a reward through a run in which much changes it."""

from __future__ import annotations

import json

import pytest

from turnwise.cli.main import main
from turnwise.report.credit import compare_credit
from turnwise.report.trace import trace_rewards
from turnwise.run.build import train_from_config
from turnwise.train.validate import config_from_dict


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A run with turn factors, overlong answers, and a KL in the reward after the first step."""
    folder = tmp_path_factory.mktemp("changed") / "run"
    settings = {
        "task": "sudoku", "run_dir": str(folder), "steps": 2, "seed": 1,
        "rollout": {"prompts_per_step": 2, "group_size": 3},
        "credit": {"rule": "at_grpo"},
        "reward": {"turn_shaping": "ramp", "overlong_buffer": 23},
        "loss": {"kl": {"coef": 0.5, "apply_to": "reward"}},
        "update": {"lr": 1e-2},
        "eval": {"every": 0, "num_prompts": 1},
        "filter": {"drop_zero_advantage": False}, "health": {"start_questions": 0},
        "log": {"rollouts_per_step": 1000},
    }  # fmt: skip
    train_from_config(config_from_dict(settings)).close()
    return folder


def test_each_call_has_the_chain_that_its_advantage_came_from(changed):
    rows = [json.loads(line) for line in (changed / "rollouts.jsonl").read_text().splitlines()]
    names = set()
    for row in rows:
        trace = trace_rewards(changed, row["id"], step=row["step"])
        assert [call.index for call in trace.calls] == [
            index for index, step in enumerate(row["steps"]) if step["actor_id"] is not None
        ]
        for call in trace.calls:
            step, value = row["steps"][call.index], call.reward
            for change in call.rewards:
                names.add(change.name)
                assert change.before in (value, None)
                value = change.after
            assert call.credited == step["advantage"]
            penalties = [change for change in call.rewards if change.name == "kl"]
            own = [change for change in call.rewards if change.name != "kl"]
            assert not own or own[-1].after == step["reward"], "steps keep the reward before the KL"
            assert not penalties or call.rewards[-1] is penalties[0]
    assert names == {"turn_shaping", "overlong", "kl"}
    found = compare_credit(changed)
    assert found.own_exact == len(found.calls) and not any("KL penalty" in note for note in found.notes)


def test_the_command_prints_it(changed, capsys):
    assert main(["credit", str(changed), "--trace", "--step", "1"]) == 0
    text = capsys.readouterr().out
    for part in (" of step 1 (sudoku)", "> turn_shaping (scales) > overlong (adds) >",
                 "> kl (adds) > the credit rule >",
                 "reward functions  ", "  turn_shaping ", "  overlong ", "  kl ", "  advantage by at_grpo ",
                 "the update: policy_loss (computes)\n"):  # fmt: skip
        assert part in text, part
    assert main(["credit", str(changed), "--trace", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"]
    assert main(["credit", str(changed), "--trace", "e99"]) != 0
    assert "episode='e99', step=None: not recorded in" in capsys.readouterr().err
