from __future__ import annotations

import pytest

from turnwise.tasks import build_task
from turnwise.tasks.base import split_of
from turnwise.tasks.proposer_solver import ProposerSolverOptions, ProposerSolverTask, Size, read_problem, value_of
from turnwise.tasks.proposer_solver.episodes import PROPOSER, SOLVE, SOLVER, read_example

TASK = ProposerSolverTask()


async def test_oracle_and_random_players(table):
    requests = TASK.eval_requests("eval", 40)
    assert {request.episode_type for request in requests} == {SOLVE}
    score = {}
    for name, player in (("oracle", TASK.oracle()), ("random", TASK.random_player(0))):
        results = await table(TASK, player).play(requests)
        score[name] = sum(result.rollout.metrics[TASK.success_metric] for result in results)
    assert score["oracle"] == 40 and score["random"] < 6


@pytest.mark.parametrize("name", ["oracle", "random"])
async def test_players_play_the_nested_game(table, name):
    player = TASK.oracle() if name == "oracle" else TASK.random_player(1)
    results = await table(TASK, player).play(TASK.requests(1, 4, 2))
    for result in results:
        assert result.rollout.error is None and len(result.children) == 4
        assert name == "random" or result.rollout.rewards[PROPOSER] == 0.0, "what everybody solves teaches nothing"


def test_held_out_problems_never_train():
    held_out = {r.artifact["question"] for split in ("eval", "validation") for r in TASK.eval_requests(split, 100)}
    shown = {r.artifact["example"] for step in range(20) for r in TASK.requests(step, 16, 1)}
    for actor, messages, reply in TASK.demonstrations(400, 0):
        shown.add(read_example(messages) if actor == PROPOSER else messages[-1]["content"])
        shown |= {reply} if actor == PROPOSER else set()
    assert len(held_out) == 200 and not held_out & shown and {split_of(text) for text in shown} == {"train"}


def test_demonstrations_are_well_formed_and_quality_is_the_share_of_right_answers():
    for quality in (0.0, 0.4, 1.0):
        task = ProposerSolverTask(ProposerSolverOptions(quality=quality))
        made = task.demonstrations(600, 1)
        answers = [(m[-1]["content"], reply) for actor, m, reply in made if actor == SOLVER]
        right = sum(int(reply) == value_of(problem) for problem, reply in answers) / len(answers)
        assert len(answers) == 300 and right == pytest.approx(quality, abs=0.08)
        assert all(read_problem(reply, Size()) == reply for actor, _, reply in made if actor == PROPOSER)
    assert TASK.demonstrations(20, 1) == TASK.demonstrations(20, 1) != TASK.demonstrations(20, 2)


def test_requests_depend_on_seed_and_step_alone():
    first = TASK.requests(5, 3, 4)
    assert first == TASK.requests(5, 3, 4) and len({r.group_id for r in first}) == 3
    assert len({r.seed for r in first}) == 12 and all(r.artifact["step"] == 5 for r in first)
    assert TASK.requests(6, 3, 4) != first


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"curve": "cubic"}, "curve='cubic'"),
        ({"numbers": 1}, "numbers=1"),
        ({"attempt": 2}, "unknown option 'attempt'; did you mean 'attempts'"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        build_task("proposer_solver", options)
