from __future__ import annotations

import pytest

from turnwise.tasks.base import split_of
from turnwise.tasks.proposer_solver import ProposerSolverOptions, ProposerSolverTask, Size, read_problem, value_of
from turnwise.tasks.proposer_solver.curves import CURVES
from turnwise.tasks.proposer_solver.episodes import PROPOSER, SOLVER

TASK = ProposerSolverTask()


@pytest.mark.parametrize("name", ["oracle", "random"])
async def test_players_play_the_nested_game(table, name):
    player = TASK.oracle() if name == "oracle" else TASK.random_player(1)
    results = await table(TASK, player).play(TASK.requests(1, 4, 2))
    for result in results:
        assert result.rollout.error is None and len(result.children) == 4
        assert name == "random" or result.rollout.rewards[PROPOSER] == 0.0, "what everybody solves teaches nothing"


def test_demonstrations_are_well_formed_and_quality_is_the_share_of_right_answers():
    for quality in (0.0, 0.4, 1.0):
        task = ProposerSolverTask(ProposerSolverOptions(quality=quality))
        made = task.demonstrations(600, 1)
        answers = [(m[-1]["content"], reply) for actor, m, reply in made if actor == SOLVER]
        right = sum(int(reply) == value_of(problem) for problem, reply in answers) / len(answers)
        assert len(answers) == 300 and right == pytest.approx(quality, abs=0.08)
        proposed = [reply for actor, _, reply in made if actor == PROPOSER]
        assert all(read_problem(reply, Size()) == reply and split_of(reply) == "train" for reply in proposed)


def test_what_a_pass_rate_is_worth_by_hand():
    assert {name: [curve(rate) for rate in (0.0, 0.25, 0.5, 0.75, 1.0)] for name, curve in CURVES.items()} == {
        "variance": [0.0, 0.75, 1.0, 0.75, 0.0],
        "linear": [0.0, 0.5, 1.0, 0.5, 0.0],
        "hard": [0.0, 0.75, 0.5, 0.25, 0.0],
    }
