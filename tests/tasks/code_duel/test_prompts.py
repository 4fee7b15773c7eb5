from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from turnwise.tasks.code_duel import CodeDuelOptions, CodeDuelTask
from turnwise.tasks.code_duel.problems import draw_problems, find_family, find_problem, run_trusted
from turnwise.tasks.code_duel.prompts import SYSTEM_PROMPTS, demonstrations, read_view, write_cases
from turnwise.tasks.code_duel.scoring import judge_cases, parse_cases, parse_program

TEAM = ("coder", "tester")
STATEMENTS = draw_problems("train", 400, 1)


@pytest.mark.parametrize("quality", [0.0, 0.4, 1.0])
def test_every_demonstration_is_well_formed_and_quality_is_the_share_that_is_right(quality):
    right = {"coder": [], "tester": []}
    for statement, (actor, messages, text) in zip(
        STATEMENTS, demonstrations(STATEMENTS, TEAM, 0, quality=quality), strict=True
    ):
        view, problem = read_view(messages), find_problem(statement)
        assert view.statement == statement
        if actor == "coder":
            assert parse_program(text) == text and text in (problem.program, *problem.wrong)
            right[actor].append(text == problem.program)
            assert view.failed is None or view.program in problem.wrong
        else:
            cases = parse_cases(text, 9)
            assert len(cases) == 4 and view.program in (problem.program, *problem.wrong)
            assert all(find_family(statement).accepts(case.arguments) for case in cases)
            right[actor].append(judge_cases(problem, cases).right)
    assert {len(shares) for shares in right.values()} == {200}
    assert sum(right["coder"]) / 200 == pytest.approx(quality, abs=0.1)
    # A wrong program is right on some inputs as well.
    assert quality <= sum(right["tester"]) / 200 + 1e-9 and (quality == 1.0 or sum(right["tester"]) / 200 < 0.9)


def test_the_first_demonstrations_are_clean_and_testers_still_meet_wrong_programs():
    made = list(zip(STATEMENTS, demonstrations(STATEMENTS, TEAM, 0, quality=0.0, clean=0.5), strict=True))
    for part, quality in ((made[:200], 1.0), (made[200:], 0.0)):
        coded = [text == find_problem(statement).program for statement, (actor, _, text) in part if actor == "coder"]
        assert sum(coded) / len(coded) == quality
    shown = [(read_view(m).program, statement) for statement, (actor, m, _) in made[:200] if actor == "tester"]
    assert 0.3 < sum(program == find_problem(statement).program for program, statement in shown) / len(shown) < 0.7


def test_a_wrong_program_of_the_demonstrations_is_a_habit():
    wrong = [text for actor, _, text in demonstrations(STATEMENTS, TEAM, 0, quality=0.0) if actor == "coder"]
    ends = Counter(text.rpartition(" for x in xs")[2] for text in wrong if "for x in xs" in text)
    assert sum(" if " not in end for end in ends.elements()) > 0.9 * ends.total(), "the filter is forgotten"


def test_some_coders_meet_a_program_that_failed():
    made = [read_view(m) for actor, m, _ in demonstrations(STATEMENTS, TEAM, 0) if actor == "coder"]
    assert 0.1 < sum(view.program is not None for view in made) / len(made) < 0.4
    view = next(view for view in made if view.failed)
    case, _, got = view.failed.splitlines()[0].partition(", not ")
    (read,) = parse_cases(case, 1)
    assert repr(run_trusted(view.program, read.arguments)) == got != repr(read.expected)
    alone = demonstrations(STATEMENTS[:40], ("coder",), 0)
    assert all(read_view(messages).program is None for _, messages, _ in alone)


def test_cases_have_different_arguments():
    written = write_cases(find_problem(STATEMENTS[0]), 8, 1.0, Random(0))
    assert len({repr(case.arguments) for case in written}) == 8


def test_other_families_may_be_demonstrated_than_are_played():
    task = CodeDuelTask(CodeDuelOptions(families=("sums",), demonstrated=("lists", "sums")))
    shown = {find_family(read_view(messages).statement).name for _, messages, _ in task.demonstrations(60, 0)}
    assert shown == {"lists", "sums"}
    assert {find_family(problem).name for problem in task.draw("eval", 20, 0)} == {"sums"}


def test_the_tester_is_told_which_inputs_there_are():
    assert "-9 to 9, lists have up to 6, strings up to 8" in SYSTEM_PROMPTS["tester"]
