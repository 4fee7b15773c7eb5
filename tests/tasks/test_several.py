"""Several tasks as one: shares of a step, names of episodes and actors, demonstrations and players."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from turnwise.tasks import build_task
from turnwise.tasks.several import Part, SeveralTasks


def several(**weights):
    made = {
        "easy": ("sudoku", {"blanks": [1, 2]}),
        "hard": ("sudoku", {"blanks": [6, 8]}),
        "clues": ("split_clues", {}),
    }
    return SeveralTasks({name: Part(build_task(*made[name]), weight) for name, weight in weights.items()})


def test_each_step_asks_each_task_in_its_share():
    """Of 7 questions with weights 2, 1, 1: 3.5, 1.75 and 1.75, so steps take turns; four steps have 14, 7 and 7."""
    task = several(easy=2, hard=1, clues=1)
    steps = [task.counts(step, 7) for step in range(400)]
    assert all(sum(counts.values()) == 7 and min(counts.values()) >= 1 for counts in steps)
    assert Counter(tuple(counts.values()) for counts in steps[:4]) == {(4, 2, 1): 1, (3, 2, 2): 2, (4, 1, 2): 1}
    for end in range(1, 401):
        total = {name: sum(counts[name] for counts in steps[:end]) for name in task.parts}
        assert all(abs(total[name] - task.shares[name] * 7 * end) < 1 for name in total)
    assert several(easy=2, hard=1, clues=1).counts(399, 7) == steps[399], "whatever was counted before"
    rare = several(easy=50, hard=1, clues=1)  # fewer than one question a step
    assert all(min(rare.counts(step, 4).values()) >= 0 for step in range(200))
    assert sum(rare.counts(step, 4)["clues"] for step in range(52)) == 4


def test_requests_are_of_their_tasks_and_groups_stay_apart():
    task = several(easy=1, hard=1, clues=2)
    requests = task.requests(1, 8, 2)
    assert Counter(request.facts.task for request in requests) == {"easy": 4, "hard": 4, "clues": 8}
    assert {(request.facts.task, request.episode_type) for request in requests} == {
        ("easy", "easy/sudoku"), ("hard", "hard/sudoku"), ("clues", "split_clues")
    }  # fmt: skip
    assert set(task.episodes()) == {"easy/sudoku", "hard/sudoku", "split_clues"}
    groups = Counter(request.group_id for request in requests)
    assert len(groups) == 8 and set(groups.values()) == {2}
    own = build_task("split_clues").requests(1, 4, 2)
    assert [r.artifact for r in requests if r.facts.task == "clues"] == [r.artifact for r in own]
    assert [r.facts.task for r in task.eval_requests("validation", 2)] == ["easy"] * 2 + ["hard"] * 2 + ["clues"] * 2
    assert task.problems(requests + task.eval_requests("eval", 2)) == []


def test_actors_of_one_name_keep_their_own_prompts():
    games = ("kuhn_poker", "tic_tac_toe")
    task = SeveralTasks({name: Part(build_task(name)) for name in games})
    assert [actor.id for actor in task.actors] == ["player0", "player1"]
    given = [replace(actor, policy=f"policy-{actor.id}", max_concurrency=3) for actor in task.actors]
    teams = task.teams(given)
    for name in games:
        for actor in build_task(name).actors:
            assert teams[name][actor.id] == replace(actor, policy=f"policy-{actor.id}", max_concurrency=3)
    assert teams["kuhn_poker"]["player0"].system_prompt != teams["tic_tac_toe"]["player0"].system_prompt


def test_demonstrations_come_in_turns_with_their_system_prompts():
    task = several(easy=1, clues=3)
    shown = task.demonstrations(40, 0)
    prompts = {name: {actor.system_prompt for actor in part.task.actors} for name, part in task.parts.items()}
    of = [next(name for name in prompts if messages[0]["content"] in prompts[name]) for _, messages, _ in shown]
    assert Counter(of) == {"easy": 10, "clues": 30} and Counter(of[:20]) == {"easy": 5, "clues": 15}
    assert all(messages[0]["role"] == "system" for _, messages, _ in shown)
    oracle, player = task.oracle(), task.random_player(0)
    for actor, messages, _ in shown[:12]:
        assert isinstance(oracle(actor, messages), str) and isinstance(player(actor, messages), str)
    json.dumps(shown)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "expected at least one task"),
        ({"a/b": ("sudoku", 1)}, "task 'a/b': expected a name without '/'"),
        ({"a": ("sudoku", 0)}, "weight=0 of task 'a': expected a number > 0"),
        ({"a": ("proposer_solver", 1), "b": ("proposer_solver", 1)}, "task 'a' has several episodes .*one of the same"),
    ],
)
def test_tasks_that_do_not_go_together(parts, message):
    with pytest.raises(ValueError, match=message):
        SeveralTasks({name: Part(build_task(task), weight) for name, (task, weight) in parts.items()})
