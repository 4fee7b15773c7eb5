"""``turnwise eval`` on the session's runs."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from turnwise.cli import main as cli
from turnwise.cli.run.eval import evaluate_from_config, measure, render
from turnwise.report.status import read_status
from turnwise.run import load
from turnwise.train.checkpoint.files import CheckpointError
from turnwise.train.eval.show import invalid_reasons, texts_of
from turnwise.train.run_lock import RunLock
from turnwise.types import GenerateResult, Rollout, Step

pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.fixture
def sudoku(team):
    return team.config


def test_two_checkpoints_on_the_same_questions(team, sudoku):
    measured = measure(sudoku, "newest", "step_00000002")
    first, second, found = measured.evaluation, measured.other, measured.difference
    assert first == evaluate_from_config(sudoku) == team.evaluation
    assert second == evaluate_from_config(sudoku, "step_00000002")
    pairs = list(zip(first.values, second.values, strict=True))
    assert found.difference.mean == pytest.approx(first.success - second.success)
    assert (found.better, found.worse) == (sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
    shown = render(measured)
    assert "step_00000003 against " in shown and "step_00000002: success" in shown and "wilson; p = " in shown
    assert "solved/proposer" in shown and "reward/reviser" in shown


def test_what_only_reads_works_while_a_run_writes(sudoku, capsys, tmp_path):
    out = str(tmp_path / "report.html")
    with RunLock(sudoku.run_dir):
        for words in (["eval", "--eval.num_prompts", "2"], ["view", "--out", out], ["credit"], ["replay"]):
            assert cli.main([words[0], str(sudoku.run_dir), *words[1:]]) == 0, capsys.readouterr().err
        assert cli.main(["train", str(sudoku.run_dir / "config.toml")]) == 2
    assert f"process {os.getpid()} on host" in capsys.readouterr().err


def test_a_checkpoint_that_a_run_deletes_meanwhile_gives_way_to_the_newest(sudoku, tmp_path, monkeypatch):
    """The result was named after the newest checkpoint at the end, whichever had been evaluated."""
    config = sudoku.model_copy(update={"run_dir": tmp_path / "run"})
    shutil.copytree(sudoku.run_dir, config.run_dir)
    whole, gone = load.load_weights, []

    def deleted(path, policies):
        if not gone:
            gone.append(path)
            shutil.rmtree(path)
        whole(path, policies)

    monkeypatch.setattr(load, "load_weights", deleted)
    measured = measure(config)
    assert gone[0].name == "step_00000003" and measured.checkpoint.endswith("step_00000002")
    assert measured.evaluation == evaluate_from_config(sudoku, "step_00000002")
    with pytest.raises(CheckpointError, match="step_00000002"):
        gone.clear()
        evaluate_from_config(config, "step_00000002")


def test_checkpoints_are_evaluated_by_name(team, capsys, sudoku):
    for name, step in (("best", team.best_step), ("newest", 3), (f"step_{team.best_step:08d}", team.best_step)):
        assert cli.main(["eval", str(team.folder / "config.toml"), "--checkpoint", name]) == 0
        assert f"step_{step:08d}: success" in capsys.readouterr().out.replace("\n", "")
    assert cli.main(["eval", str(team.folder / "config.toml"), "--checkpoint", "step_9"]) == 1
    assert "step_9/manifest.json can't be read" in capsys.readouterr().err
    words = ["eval", str(sudoku.run_dir), "--checkpoint", "newest", "--against", "newest", "--json"]
    assert cli.main([*words, "--eval.num_prompts", "4"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["episodes"] == 4 and plain["checkpoint"] == plain["against"]["checkpoint"]
    assert plain["checkpoint"].endswith("step_00000003")
    assert plain["difference"]["difference"]["mean"] == 0 and plain["difference"]["p"] == 1
    assert plain["estimates"]["satisfied/reviser"]["method"] in ("bootstrap", "wilson")


def test_the_start_is_the_run_s_own_while_it_has_it(sudoku, monkeypatch):
    """It repeated the warm start, which takes minutes."""
    monkeypatch.setattr("turnwise.run.build.run_warm_start", None)
    own = measure(sudoku, "start")
    assert own.checkpoint.endswith("step_00000000")
    assert own.evaluation == evaluate_from_config(sudoku, "step_00000000")
    assert read_status(sudoku.run_dir).exported == 3, "policies/ carries the step of its weights"


def test_episodes_are_shown_and_invalid_actions_counted(sudoku, capsys):
    words = ["eval", str(sudoku.run_dir), "--eval.num_prompts", "3", "--show", "2"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "episode 2: success 0" in shown and "episode 3" not in shown
    assert "user, to proposer: " in shown and "\n  reviser: " in shown and "rewards: proposer " in shown
    assert cli.main([*words, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert len(plain["shown"]) == 2 and plain["invalid"] == {}


def test_the_reasons_of_invalid_actions_are_counted_without_what_they_quote():
    def played(*reasons):
        steps = [Step("a", 0, [], "", [], [], [], [], "stop", info={"invalid_action": reason}) for reason in reasons]
        return GenerateResult(Rollout("r", "x", 0, steps=steps), group_id=len(reasons))

    results = [played("no number in 'one'", "too long"), played('no number in "it\'s"')]
    assert invalid_reasons(results) == {"no number in …": 2, "too long": 1}
    assert "    invalid: too long" in texts_of(results, [0.0, 1.0], 5)[0]


def test_several_samples_of_each_question(sudoku, capsys):
    assert cli.main(["eval", str(sudoku.run_dir), "--samples", "4", "--eval.num_prompts", "3"]) == 0
    shown = capsys.readouterr().out
    assert "3 questions, 4 samples of each" in shown
    assert [f"pass@{k}" in shown for k in (1, 2, 3, 4)] == [True, True, False, True]
    assert "what each actor adds:" in shown and "without it" not in shown, "contributions cost nothing"
    assert cli.main(["eval", str(sudoku.run_dir), "--samples", "2", "--temperature", "0"]) == 2
    assert "samples=2, temperature=0.0: greedy samples are all equal" in capsys.readouterr().err


def test_both_seats_of_a_game_have_their_rewards(games):
    measured = measure(games.config, "start", "newest")
    assert measured.difference.test == "sign-flip permutation"
    counts = [measured.evaluation.estimates[f"reward/player{seat}"].count for seat in (0, 1)]
    assert counts == [3, 3], "each question from both seats"
    assert len(set(measured.evaluation.clusters)) == 3, "the two games of a match are one trial"


# ---- what each actor adds -------------------------------------------------------------------------------------------
def test_each_actor_is_left_out_and_plays_alone(sudoku):
    measured = measure(sudoku, ablate=["all"])
    proposer, reviser = measured.additions
    assert (proposer.actor, reviser.actor) == ("proposer", "reviser")
    assert reviser.without == proposer.alone and reviser.alone == proposer.without
    assert reviser.without.clusters == measured.evaluation.clusters
    pairs = list(zip(measured.evaluation.values, reviser.without.values, strict=True))
    assert reviser.difference.better == sum(a > b for a, b in pairs)
    assert "solved/proposer" in reviser.without.metrics and "satisfied/reviser" not in reviser.without.metrics
    made = measured.evaluation.contributions["reviser"]
    assert made.handed > 0 and made.wrong + made.right == 12 * made.handed
    shown = render(measured).splitlines()
    place = shown.index("what each actor adds (same questions, same seeds):")
    assert shown[place + 1].split()[:6] == ["actor", "changed", "fixed", "broken", "without", "it"]
    share = made.changed / made.handed
    assert shown[place + 3].split()[:3] == ["reviser", f"{share:.1%}", f"({made.changed}/{made.handed})"]


def test_ablations_as_json_and_their_errors(sudoku, capsys):
    words = ["eval", str(sudoku.run_dir), "--eval.num_prompts", "2"]
    assert cli.main([*words, "--json", "--ablate", "reviser,proposer", "--ablate", "reviser"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [row["actor"] for row in plain["ablations"]] == ["reviser", "proposer"]
    reviser = plain["ablations"][0]
    assert reviser["without"]["episodes"] == 2 and "mean" in reviser["difference"]["difference"]
    assert plain["contributions"]["reviser"].keys() == {"handed", "changed", "wrong", "fixed", "right", "broken"}
    assert cli.main([*words, "--ablate", "revisor"]) == 2
    assert "--ablate revisor: task 'sudoku' has no actor 'revisor'; did you mean 'reviser'?" in capsys.readouterr().err
    assert cli.main([*words, "--ablate", "reviser", "--against", "start"]) == 2
    assert "--against start, --ablate reviser: expected one of them" in capsys.readouterr().err
