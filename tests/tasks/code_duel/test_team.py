from __future__ import annotations

import pytest

from turnwise.arena import TreeSampler
from turnwise.tasks.code_duel import CodeDuelOptions, CodeDuelTask, find_problem, read_view
from turnwise.tasks.code_duel.prompts import SYSTEM_PROMPTS
from turnwise.tasks.code_duel.scoring import judge_cases, parse_cases

SUM = "Return the sum of the numbers in the list xs."
ARTIFACT = {"problem": SUM}
RIGHT = "def f(xs):\n    return sum(xs)"
LEN = "def f(xs):\n    return len(xs)"
# [] and [3, -2, 3, 0, 8, -5] are hidden inputs of every list problem.
HIDDEN = find_problem(SUM).hidden
LEN_PASSES = sum(len(xs) == sum(xs) for (xs,) in HIDDEN) / len(HIDDEN)


def team(**options):
    return CodeDuelTask(CodeDuelOptions(**options))


def worth(text):
    return judge_cases(find_problem(SUM), parse_cases(text, 4)).score


# --- one episode, worked by hand -------------------------------------------------------------------------------------
async def test_a_tree_runs_each_branch_s_own_program(table):
    other = "f([1, 2]) == 3"
    seat = table(team(max_turns=1), [LEN, RIGHT, "f([]) == 0", other], tree=TreeSampler(branches=2, select="best"))
    result = await seat.one(ARTIFACT)
    assert table.branches(result) == [
        ("coder", LEN_PASSES, False),
        ("coder", 2.0, True),
        ("tester", 1.0, False),
        ("tester", 1 + worth(other), True),
    ]


# --- the task --------------------------------------------------------------------------------------------------------
def test_other_families_may_be_demonstrated_than_are_played():
    from turnwise.tasks.code_duel.problems import find_family

    task = team(families=("sums",), demonstrated=("lists", "sums"))
    shown = {find_family(read_view(messages).statement).name for _, messages, _ in task.demonstrations(60, 0)}
    assert shown == {"lists", "sums"}
    assert {find_family(problem).name for problem in task.draw("eval", 20, 0)} == {"sums"}


# --- what each actor adds --------------------------------------------------------------------------------------------
def test_only_the_tester_can_be_left_out():
    assert [actor.id for actor in team().with_actors(("coder",)).actors] == ["coder"]
    with pytest.raises(ValueError, match="expected the coder first"):
        team().with_actors(("tester",))


def test_the_tester_is_told_which_inputs_there_are():
    assert "-9 to 9, lists have up to 6, strings up to 8" in SYSTEM_PROMPTS["tester"]
