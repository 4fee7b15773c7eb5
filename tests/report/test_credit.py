"""Recorded runs under other credit rules: the own rule must give back what was recorded, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from turnwise.arena import DropRolloutError, Rubric
from turnwise.arena.recording.rollouts_jsonl import group_text, json_line, plain_result
from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.credit import RAECredit
from turnwise.report.credit import (
    ComparedCall,
    Comparison,
    compare_credit,
    differences,
    recorded_steps,
    render,
    result_of,
)
from turnwise.run.build import train_from_config
from turnwise.samples.collect import collect_samples
from turnwise.tasks import TASKS
from turnwise.tasks.proposer_solver import ProposerSolverTask
from turnwise.tasks.proposer_solver.episodes import correct, worth
from turnwise.train.validate import config_from_dict
from turnwise.types import GenerateResult, Rollout, Step

from ..trained import BOTH, Trained, rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> Path:
    """Three steps of a tiny model that knows next to nothing, all episodes written down."""
    folder = tmp_path_factory.mktemp("runs") / "groups"
    settings = {
        **BOTH,
        "task": "grouped",
        "run_dir": str(folder),
        "steps": 3,
        "rollout": {"prompts_per_step": 4, "group_size": 3, "failure_threshold": 1.0},
        "credit": {"rule": "hierarchy"},
        "task_options": {"attempts": 3, "numbers": 2, "largest": 9},
        "warm_start": {"steps": 80, "batch_size": 16, "lr": 1e-2},
        "update": {"lr": 1e-4},
        "eval": {"num_prompts": 1},
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(TASKS, "grouped", f"{__name__}:Grouped")
        train_from_config(config_from_dict(settings)).close()
    return folder


@pytest.fixture(params=["team", "games", "groups"])
def any_run(request) -> Path:
    """Trees, games with a league, and nested episodes that group functions pay."""
    made = request.getfixturevalue(request.param)
    return getattr(made, "folder", made)


@pytest.fixture
def played(games: Trained) -> Path:
    return games.folder


@pytest.fixture
def copied(games: Trained, tmp_path: Path) -> Path:
    """The games' run with a config and a record to change."""
    copied = tmp_path / "copied"
    return shutil.copytree(games.folder, copied, ignore=shutil.ignore_patterns("checkpoints", "policies", "league"))


def recorded(folder: Path) -> dict[tuple[int, str, int], float]:
    """Every advantage that stands in the file, read without any of the code that is tested."""

    def walk(row):
        return [row, *(below for child in row["children"] for below in walk(child))]

    calls = [
        (line["step"], row["id"], place, call["advantage"])
        for line in rows_of(folder, "rollouts.jsonl")
        for row in walk(line)
        for place, call in enumerate(row["steps"])
    ]
    return {(step, rollout, place): value for step, rollout, place, value in calls if value is not None}


class Grouped(ProposerSolverTask):
    """Proposers and solvers who are also paid by what others of their group said. Some fail, some are dropped."""

    def episodes(self, tree=None):
        episodes = super().episodes(tree)
        episodes["proposer_solver"].rubric = Rubric([worth, unlike_others, length], [1.0, 0.5, 0.0])
        episodes["solve"].rubric = Rubric([correct, unlike_others, place])
        return episodes


def unlike_others(rollouts):
    said = [rollout.steps[0].completion for rollout in rollouts]
    return [1.0 / said.count(text) for text in said]


def length(rollouts):
    if "7" in rollouts[0].artifact["example"]:
        raise RuntimeError("a seven")
    if "3" in rollouts[0].artifact["example"]:
        raise DropRolloutError("a three")
    return [float(len(rollout.steps[0].completion)) for rollout in rollouts]


def place(rollouts):
    return [float(place) for place, _ in enumerate(rollouts)]


def test_a_program_with_a_rule_of_its_own_has_no_rule_in_its_config(played, copied):
    text = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(text.replace('rule = "rae"', 'rule = "task"'))
    with pytest.raises(ValueError, match=r"no config.toml that names its own"):
        compare_credit(copied)
    found, known = (compare_credit(folder, "episodic") for folder in (copied, played))
    assert found.own_rule is None and found.own_exact is None and found.calls == known.calls
    assert "own rule" not in render(found)
    text = (played / "config.toml").read_text()
    assert text.count("[loss.kl]\ncoef = 0.0\n") == 1 and text.count('apply_to = "loss"') == 1
    text = text.replace("[loss.kl]\ncoef = 0.0", "[loss.kl]\ncoef = 0.1")
    (copied / "config.toml").write_text(text.replace('apply_to = "loss"', 'apply_to = "reward"'))
    assert ["KL penalty" in note for note in compare_credit(copied).notes].count(True) == 1
    assert not any("KL penalty" in note for note in compare_credit(played).notes)


def test_the_runs_own_rule_gives_back_what_was_recorded(any_run):
    found = compare_credit(any_run)
    there = recorded(any_run)
    assert {(c.step, c.rollout, c.index): c.before for c in found.calls} == there
    assert all(call.after == call.before for call in found.calls)
    assert found.own_exact == len(found.calls) == len(there) > 10 and not found.incomplete
    assert len(set(there.values())) > 2, "a record in which all is 0 would prove nothing"
    assert all(row.sign_changes == 0 and not row.biggest for row in differences(found))
    # Another rule is that rule.
    found = compare_credit(any_run, "episodic")
    rewards = {
        (step, s.rollout_id, s.step_index): s.trajectory_reward
        for step, results in recorded_steps(any_run / "rollouts.jsonl")
        for s in collect_samples(results)
    }
    assert {(c.step, c.rollout, c.index): c.after for c in found.calls} == pytest.approx(rewards)
    assert found.own_exact == len(found.calls), "what the record holds does not depend on the rule that is asked for"


def test_what_groups_were_paid_failed_or_dropped_by_stays_so(groups):
    """Nothing of a group function is computed again: an episode's record has its part of what the group got."""
    steps = recorded_steps(groups / "rollouts.jsonl")
    nodes = [node.rollout for _, results in steps for top in results for node in top.walk()]
    failed = [rollout.id for rollout in nodes if "RuntimeError: a seven" in (rollout.error or "")]
    dropped = [rollout.id for rollout in nodes if rollout.facts.dropped]
    paid = [rollout for rollout in nodes if rollout.error is None and rollout.id not in dropped]
    assert failed and dropped and len({rollout.rewards.get("solver") for rollout in paid}) > 3
    for rollout in paid:
        [(actor, reward)] = rollout.rewards.items()
        alone = rollout.metrics[f"{'worth' if actor == 'proposer' else 'correct'}/{actor}"]
        assert reward == pytest.approx(alone + rollout.meta["group"]["rewards"][actor])
    found = compare_credit(groups, "episodic")
    assert {call.rollout for call in found.calls}.isdisjoint({*failed, *dropped})
    worth_of = {rollout.id: next(iter(rollout.rewards.values())) for rollout in paid}
    assert all(call.after == pytest.approx(worth_of[call.rollout]) for call in found.calls)


class ByMetric:
    """A rule with ``compute`` alone, that looks at what a group function measured."""

    def compute(self, results):
        nodes = [node.rollout for top in results for node in top.walk() if node.is_trainable]
        return {
            (rollout.id, place): sum(value for name, value in rollout.metrics.items() if name in MEASURED)
            for rollout in nodes
            for place, _ in enumerate(rollout.steps)
        }

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


MEASURED = ("length/proposer", "place/solver")


def test_a_rule_with_compute_alone_sees_results_and_their_metrics(groups):
    found = compare_credit(groups, f"{__name__}:ByMetric")
    rows = rows_of(groups, "rollouts.jsonl")
    metrics = {node["id"]: node["metrics"] for row in rows for node in [row, *row["children"]]}
    assert len({call.after for call in found.calls}) > 3
    for call in found.calls:
        assert call.after == sum(value for name, value in metrics[call.rollout].items() if name in MEASURED)


def test_a_rule_with_a_state_goes_through_all_steps(played):
    rule, expected = RAECredit(decay=0.5), {}
    for step, results in recorded_steps(played / "rollouts.jsonl"):
        for place, value in rule.compute(results).items():
            expected[(step, *place)] = value
    options = {"decay": 0.5}
    found = compare_credit(played, "rae", options=options)
    assert {(c.step, c.rollout, c.index): c.after for c in found.calls} == expected
    last = compare_credit(played, options=options, step=3)
    assert {call.step for call in last.calls} == {3}
    assert all(call.after == expected[3, call.rollout, call.index] for call in last.calls), "from the start, not from 0"
    assert any(call.after != call.before for call in last.calls)
    moving = compare_credit(played, options={"per": "trajectory"})
    assert any(call.after != call.before for call in moving.calls if call.step == 1)


def test_what_was_not_recorded_is_told(copied):
    lines = (copied / "rollouts.jsonl").read_text().splitlines(keepends=True)
    kept = [line for step in (1, 2, 3) for line in [one for one in lines if json.loads(one)["step"] == step][:2]]
    (copied / "rollouts.jsonl").write_text("".join(kept) + '{"step": 4, "id": "e9')  # a line under way
    found = compare_credit(copied)
    assert set(found.incomplete) == {1, 2, 3} and all(held == 2 < whole for held, whole in found.incomplete.values())
    assert "note: 3 steps hold 6 of" in render(found)
    assert found.own_exact < len(found.calls), "the baselines lack the other games"


def test_numbers_by_hand():
    pairs = [(1.0, 2.0), (-1.0, 1.0), (0.0, 0.0), (2.0, -1.0)]
    calls = [ComparedCall(1, f"e{n}", 0, "solver", *pair) for n, pair in enumerate(pairs)]
    calls.append(ComparedCall(2, "e9", 1, "critic", 0.5, 0.5))
    solver, critic = differences(Comparison("mine", None, calls), biggest=2)
    assert (solver.actor, solver.calls, solver.mean) == ("solver", 4, (0.5, 0.5))
    assert solver.std == pytest.approx((1.25**0.5, 1.25**0.5))
    assert (solver.zero, solver.sign_changes) == ((0.25, 0.25), 0.5)
    assert solver.correlation == pytest.approx(np.corrcoef([1, -1, 0, 2], [2, 1, 0, -1])[0, 1])
    assert [call.rollout for call in solver.biggest] == ["e3", "e1"]
    assert critic.correlation is None and critic.biggest == [] and critic.zero == (0.0, 0.0)
    text = render(Comparison("mine", None, calls))
    assert "5 model calls of 2 steps, rule 'mine'" in text and "own rule" not in text
    assert "solver" in text and "+2.000 -> -1.000  step 1, episode e3, call 0" in text


def test_the_command(played, capsys, tmp_path, monkeypatch):
    games = played
    assert cli.main(["credit", str(games), "--rule", "dr_grpo", "--set", "singleton=raw"]) == EXIT_OK
    text = capsys.readouterr().out
    shown = []
    for switch in ("yes", "true", "no"):
        assert cli.main(["credit", str(games), "--rule", "rae", "--set", f"bias_correction={switch}"]) == EXIT_OK
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2], "a switch is read as the rule's own type says"
    assert "rule 'dr_grpo'" in text and "the run's own rule 'rae' gives" in text
    (tmp_path / "halved.py").write_text(
        "from turnwise.credit import EpisodicCredit\n\n\nclass Halved(EpisodicCredit):\n"
        "    def compute_columns(self, samples):\n        return super().compute_columns(samples) / 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["credit", str(games), "--rule", "halved:Halved", "--step", "2", "--json"]) == EXIT_OK
    shown = json.loads(capsys.readouterr().out)
    whole = {(c.rollout, c.index): c.after for c in compare_credit(games, "episodic", step=2).calls}
    assert {(c["rollout"], c["index"]): c["after"] * 2 for c in shown["calls"]} == pytest.approx(whole)
    assert {row["actor"] for row in shown["actors"]} == {call["actor"] for call in shown["calls"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "grp"], "'grp': unknown; did you mean 'grpo'"),
        (["--rule", "rae", "--set", "decai=0.5"], "unknown config key 'options.decai'; did you mean 'decay'"),
        (["--set", "decay"], "--set 'decay': expected NAME=VALUE"),
        (["--step", "99"], "step=99: no step of this number"),
    ],
)
def test_mistakes_are_one_line(played, capsys, arguments, message):
    assert cli.main(["credit", str(played), *arguments]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_folders_without_a_record(tmp_path):
    for rule, message in ((None, "rule=None: .* has no config.toml"), ("grpo", "no run folder with recorded episodes")):
        with pytest.raises(ValueError, match=message):
            compare_credit(tmp_path, rule)


def test_groups_and_states_are_hashable_again():
    step = Step("solver", 0, [], "", [1], [2], [-0.5], [(1, 7)], "stop", group=("q", (1, 2)), info={"state": (0, (3,))})
    step.from_branch = (7, 1)
    result = GenerateResult(Rollout("r", "solve", "q", [step], {"solver": 1.0}), group_id=("int", 5), parent_id="top")
    again = result_of(json.loads(json_line(plain_result(result))))
    assert again.rollout.steps[0].from_branch == (7, 1)
    [sample], [expected] = collect_samples([again]), collect_samples([result])
    assert (sample.group, sample.info, sample.policy_versions) == (("q", (1, 2)), {"state": (0, (3,))}, [(1, 7)])
    sample.group_id = expected.group_id
    assert sample == expected
    # Questions that are equal have one text.
    assert group_text("puzzle-5") == "puzzle-5"
    pairs = [("a", ("int", 1)), ("b", "x")]
    one, other = (("dict", frozenset(order)) for order in (pairs, reversed(pairs)))
    assert group_text(one) == group_text(other) != group_text(("dict", frozenset({("a", ("int", 2)), ("b", "x")})))
    assert group_text(None).startswith("#") and group_text(object).startswith("<class")
