from __future__ import annotations

import pytest

from turnwise.arena import TreeSampler
from turnwise.tasks.code_duel import CodeDuelOptions, CodeDuelTask, View, find_problem, read_view
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
async def test_agreement_ends_the_episode(table):
    seat = table(team(), [RIGHT, "f([1, 2]) == 3"])
    result = await seat.one(ARTIFACT)
    found = worth("f([1, 2]) == 3")
    assert 0 < found <= 1
    assert table.rewards(result) == [("coder", 0, 2.0), ("tester", 0, 1 + found)]
    assert result.rollout.rewards == {"coder": 2.0, "tester": pytest.approx(1 + found)}
    assert result.rollout.metrics["solved/coder"] == 1.0 and result.rollout.extras["agreed"]
    assert [(actor, read_view(messages)) for actor, messages in seat.seen] == [
        ("coder", View(SUM)),
        ("tester", View(SUM, RIGHT)),
    ]


async def test_two_rounds_by_hand(table):
    assert 0 < LEN_PASSES < 1
    cases = "f([1, 2]) == 3\nf([]) == 0\nf([4]) == 5"  # the last one is wrong
    seat = table(team(), [LEN, cases, RIGHT, "f([7]) == 8"])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [
        ("coder", 0, LEN_PASSES),
        ("tester", 0, worth(cases)),
        ("coder", 1, 2.0),
        ("tester", 1, 1.0),  # the program is right; no case of theirs is
    ]
    assert worth(cases) == pytest.approx(2 / 3 * judge_cases(find_problem(SUM), parse_cases(cases, 2)).found)
    assert result.rollout.rewards == {"coder": 2.0, "tester": 1.0}
    assert read_view(seat.seen[2][1]) == View(SUM, LEN, "f([1, 2]) == 3, not 2\nf([4]) == 5, not 1")
    assert read_view(seat.seen[3][1]) == View(SUM, RIGHT)  # the tester is not told what failed before
    assert result.rollout.extras["rounds"] == 2 and not result.rollout.extras["agreed"]
    assert result.rollout.metrics["right_cases/tester"] == 0.0


async def test_agreeing_on_a_wrong_program_is_no_success(table):
    result = await table(team(), [LEN, "f([]) == 0"]).one(ARTIFACT)
    assert table.rewards(result) == [("coder", 0, LEN_PASSES), ("tester", 0, 0.0)]
    assert result.rollout.extras["agreed"] and result.rollout.metrics["solved/coder"] == 0.0


async def test_unreadable_replies_change_nothing_and_pay(table):
    seat = table(team(), ["I can't.", "Nor can I.", RIGHT, ""])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [("coder", 0, -0.25), ("tester", 0, -0.25), ("coder", 1, 2.0), ("tester", 1, 0.75)]
    assert [read_view(messages).program for _, messages in seat.seen] == [None, None, None, RIGHT]
    assert result.rollout.metrics["valid_format/coder"] == 0.5


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
