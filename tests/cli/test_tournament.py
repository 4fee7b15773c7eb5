"""Round robins among checkpoints and scripted players."""

from __future__ import annotations

import json

import numpy as np
import pytest

from turnwise.cli import main as cli
from turnwise.cli.commands.tournament import play_tournament, render, to_json
from turnwise.run.build import build_run
from turnwise.tasks.kuhn_poker import equilibrium, kuhn_tree
from turnwise.train.validate import config_from_dict

pytestmark = pytest.mark.usefixtures("narrow_model")

SETTINGS = {
    "task": "kuhn_poker", "steps": 4, "threads": 1, "health": {"start_questions": 0}, "task_options": {"max_tokens": 6},
    "warm_start": {"steps": 60, "batch_size": 16, "warmup": 5, "lr": 1e-2},
    "rollout": {"prompts_per_step": 6}, "update": {"lr": 1e-4}, "checkpoint": {"every": 2},
    "league": {"share": 0.34, "every": 1, "size": 2},
}  # fmt: skip


def trained(folder, **changes):
    run = build_run(config_from_dict({**SETTINGS, "run_dir": str(folder), **changes}))
    run.train()
    run.close()
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "first")


def value_between(first, second):
    """What a policy gets on average from another one over both seats, exactly."""
    tree = kuhn_tree()
    pad = [np.concatenate([table, np.zeros((12, 1))], axis=1) for table in (first, second)]
    seats = [np.where(tree.player[:, None] == 0, *order) for order in (pad, pad[::-1])]
    return (tree.value(seats[0]) - tree.value(seats[1])) / 2


def test_scripted_players_meet_as_the_game_says(run_dir):
    """The equilibrium's payoff from random play lies in the interval that was found, and the ratings rank them so."""
    result = play_tournament([run_dir], checkpoints=["newest"], games=600)
    assert result.entrants == ("first/step_00000004", "random", "oracle")
    record = result.payoffs.between("oracle", "random")
    low, high = record.payoff_interval()
    expected = value_between(equilibrium(), np.full((12, 2), 0.5))
    assert expected > 0.1 and low - 0.05 < expected < high + 0.05
    assert (record.games, record.matches) == (600, 300) and record.wins + record.draws + record.losses == 600
    elo = dict(zip(result.entrants, result.ratings.elo, strict=True))
    assert elo["oracle"] > elo["random"]


def test_every_checkpoint_and_member_enters_and_equal_calls_are_equal(run_dir):
    first = play_tournament([run_dir], games=8, baselines=["random"])
    assert first.entrants == (*(f"first/step_0000000{step}" for step in (2, 3, 4)), "random"), "3 is the league's"
    again = play_tournament([run_dir], games=8, baselines=["random"])
    assert to_json(first) == to_json(again)
    pairs = to_json(first)["pairs"]
    assert len(pairs) == 12 and all(pair["games"] == 8 and pair["matches"] == 4 for pair in pairs)


def test_each_checkpoint_plays_with_its_own_weights(run_dir):
    """The same weights under two names draw level; a run that never learned the form loses to one that did."""
    raw = trained(run_dir.parent / "raw", warm_start={"steps": 0}, steps=0 + 1, checkpoint={"every": 1})
    result = play_tournament([run_dir, raw], checkpoints=["newest"], games=40, baselines=[])
    [good, bad] = result.entrants
    record = result.payoffs.between(good, bad)
    assert record.mean_payoff() > 0.5 and record.wins > record.losses


def test_two_runs_play_across_and_their_names_differ(run_dir, tmp_path):
    second = trained(tmp_path / "first", seed=1, steps=2)
    result = play_tournament([run_dir, second], checkpoints=["newest"], games=4, baselines=[])
    assert result.entrants == (f"{run_dir}/step_00000004", f"{second}/step_00000002")


def test_the_command_prints_tables_or_json(run_dir, capsys):
    words = ["tournament", str(run_dir), "--checkpoints", "newest", "--games", "4", "--baselines", "random"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "kuhn_poker: 2 entrants, 4 games per pair" in shown and "first/step_00000004" in shown and "Elo" in shown
    assert cli.main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {entry["player"] for entry in said["ratings"]} == {"first/step_00000004", "random"}
    assert said["pairs"][0]["payoff"] == pytest.approx(-said["pairs"][1]["payoff"])


def test_it_leaves_the_run_as_it_was(run_dir):
    before = {file: file.read_bytes() for file in sorted(run_dir.rglob("*")) if file.is_file()}
    play_tournament([run_dir], checkpoints=["newest"], games=2, baselines=["random"])
    assert before == {file: file.read_bytes() for file in sorted(run_dir.rglob("*")) if file.is_file()}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"games": 1}, "games=1"),
        ({"baselines": ["randm"]}, "did you mean 'random'"),
        ({"checkpoints": ["newest"], "baselines": []}, "1 entrant"),
        ({"task": "sudoku"}, "expected a task with seats"),
    ],
)
def test_mistakes_are_told(run_dir, changes, told):
    with pytest.raises(ValueError, match=told):
        play_tournament([run_dir], **changes)


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.toml"):
        play_tournament([tmp_path])


def test_the_table_marks_what_was_not_played():
    from turnwise.cli.commands.tournament import Result
    from turnwise.train.league import Game, Payoffs, bradley_terry

    payoffs, names = Payoffs(), ("a", "b", "c")
    for _ in range(3):
        payoffs.add("a", "b", [Game(1.0, 1.0, -1.0)])
    shown = render(Result("game", 3, names, payoffs, bradley_terry(*payoffs.matrices(names))))
    assert "+1.00 ±0.00" in shown and "-1.00 ±0.00" in shown and "?" in shown
    assert [line.split()[1] for line in shown.splitlines()[3:6]] == ["a", "c", "b"]
