"""Round robins among checkpoints and scripted players."""

from __future__ import annotations

import json

import numpy as np
import pytest

from turnwise.cli import main as cli
from turnwise.cli.run.tournament import play_tournament, render, to_json
from turnwise.run.build import build_run
from turnwise.tasks.kuhn_poker import equilibrium, kuhn_tree
from turnwise.train.validate import config_from_dict

from ..trained import GAMES, Trained

pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.fixture
def run_dir(games: Trained):
    """The games' run, which a tournament leaves as it was."""
    files = {file: file.stat().st_mtime_ns for file in games.folder.rglob("*")}
    yield games.folder
    assert files == {file: file.stat().st_mtime_ns for file in games.folder.rglob("*")}


def value_between(first, second):
    """What a policy gets on average from another one over both seats, exactly."""
    tree = kuhn_tree()
    pad = [np.concatenate([table, np.zeros((12, 1))], axis=1) for table in (first, second)]
    seats = [np.where(tree.player[:, None] == 0, *order) for order in (pad, pad[::-1])]
    return (tree.value(seats[0]) - tree.value(seats[1])) / 2


def test_scripted_players_meet_as_the_game_says(run_dir):
    """The equilibrium's payoff from random play lies in the interval that was found, and the ratings rank them so."""
    result = play_tournament([run_dir], checkpoints=["newest"], games=600)
    assert result.participants == ("games/step_00000004", "random", "oracle")
    record = result.payoffs.between("oracle", "random")
    low, high = record.payoff_interval()
    expected = value_between(equilibrium(), np.full((12, 2), 0.5))
    assert expected > 0.1 and low - 0.05 < expected < high + 0.05
    assert (record.games, record.matches) == (600, 300) and record.wins + record.draws + record.losses == 600
    elo = dict(zip(result.participants, result.ratings.elo, strict=True))
    assert elo["oracle"] > elo["random"]


def test_every_checkpoint_and_member_enters_and_equal_calls_are_equal(run_dir):
    first = play_tournament([run_dir], games=8, baselines=["random"])
    assert first.participants == (*(f"games/step_0000000{step}" for step in (2, 3, 4)), "random"), "3 is the league's"
    again = play_tournament([run_dir], games=8, baselines=["random"])
    assert to_json(first) == to_json(again)
    pairs = to_json(first)["pairs"]
    assert len(pairs) == 12 and all(pair["games"] == 8 and pair["matches"] == 4 for pair in pairs)


def test_runs_play_across_each_with_its_own_weights(run_dir, tmp_path):
    """A run that never learned the form loses to one that did. Two folders of one name are told apart."""
    raw = {**GAMES, "run_dir": str(tmp_path / "games"), "steps": 1, "warm_start": {}, "checkpoint": {"every": 1}}
    run = build_run(config_from_dict({**raw, "threads": 1, "health": {"start_questions": 0}}))
    run.train()
    run.close()
    result = play_tournament([run_dir, tmp_path / "games"], checkpoints=["newest"], games=40, baselines=[])
    assert result.participants == (f"{run_dir}/step_00000004", f"{tmp_path / 'games'}/step_00000001")
    record = result.payoffs.between(*result.participants)
    assert record.mean_payoff() > 0.5 and record.wins > record.losses


def test_the_command_prints_tables_or_json(run_dir, capsys):
    words = ["tournament", str(run_dir), "--checkpoints", "newest", "--games", "4", "--baselines", "random"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "kuhn_poker: 2 participants, 4 games per pair" in shown and "games/step_00000004" in shown and "Elo" in shown
    assert cli.main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {entry["player"] for entry in said["ratings"]} == {"games/step_00000004", "random"}
    assert said["pairs"][0]["payoff"] == pytest.approx(-said["pairs"][1]["payoff"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"games": 1}, "games=1"),
        ({"baselines": ["randm"]}, "did you mean 'random'"),
        ({"checkpoints": ["newest"], "baselines": []}, "1 participant"),
        ({"task": "sudoku"}, "expected a task with seats"),
    ],
)
def test_mistakes_are_told(run_dir, changes, told):
    with pytest.raises(ValueError, match=told):
        play_tournament([run_dir], **changes)


def test_the_table_marks_what_was_not_played(tmp_path):
    from turnwise.cli.run.tournament import Result
    from turnwise.train.league.payoffs import GameResult, Payoffs, bradley_terry

    payoffs, names = Payoffs(), ("a", "b", "c")
    for _ in range(3):
        payoffs.add("a", "b", [GameResult(1.0, 1.0, -1.0)])
    shown = render(Result("game", 3, names, payoffs, bradley_terry(*payoffs.matrices(names))))
    assert "+1.00 ±0.00" in shown and "-1.00 ±0.00" in shown and "?" in shown
    assert [line.split()[1] for line in shown.splitlines()[3:6]] == ["a", "c", "b"]
    with pytest.raises(ValueError, match=r"holds no config\.toml"):
        play_tournament([tmp_path])
