from __future__ import annotations

from random import Random

import pytest

from turnwise.tasks.code_duel.problems import (
    FAMILIES,
    HIDDEN,
    MUTANTS,
    catalogue,
    find_family,
    find_problem,
    run_trusted,
)

SUM = "Return the sum of the squares of the even numbers in the list xs."
SHORT = "Take the string s, keep the first 3 letters, then append its reverse, and return it."
NUMBER = "Start with a minus b, take the absolute value, then take it modulo 3, and return it."


@pytest.mark.parametrize(
    ("statement", "arguments", "value"),
    [
        (SUM, ([1, 2, -4, 3],), 20),
        (SUM, ([],), 0),
        (SHORT, ("abide",), "abiiba"),
        (SHORT, ("",), ""),
        (NUMBER, (2, 9), 1),
        ("Return the largest, or 0, of the numbers below -2 in the list xs.", ([1, -5, -3],), -3),
        ("Return the largest, or 0, of the numbers below -2 in the list xs.", ([1],), 0),
        ("Return the smallest, or 0, of the absolute values of the odd numbers in the list xs.", ([-3, 5, 2],), 3),
        ("Return the count of different values of the squares of the numbers in the list xs.", ([2, -2, 3],), 2),
        ("Return the sorted list of the 2-fold of the multiples of 3 in the list xs.", ([6, 1, -3, 0],), [-6, 0, 12]),
        ("Return the reversed list of the numbers above 1 in the list xs.", ([3, 0, 2],), [2, 3]),
        ("Take the string s, remove the vowels, then double each letter, and return it.", ("tide",), "ttdd"),
        ("Take the string s, keep the last 2 letters, then make it upper-case, and return it.", ("cab",), "AB"),
        ("Take the string s, drop the first 1 letters, then sort its letters, and return it.", ("ztab",), "abt"),
        ("Take the string s, keep every second letter, then reverse it, and return it.", ("abcde",), "eca"),
        ("Start with the larger of a and b, square it, then add 5, and return it.", (-9, 2), 9),
        ("Start with the smaller of a and b, multiply by 4, then take the absolute value, and return it.", (-9, 2), 36),
        ("Start with a times b, add 1, then take it modulo 7, and return it.", (-3, 4), 3),
    ],
)
def test_programs_do_what_the_statement_says(statement, arguments, value):
    assert run_trusted(find_problem(statement).program, arguments) == value


@pytest.mark.parametrize("family", FAMILIES)
def test_every_problem_has_hidden_inputs_of_its_kind_and_wrong_programs_that_they_find_out(family):
    seed = Random().randrange(10**6)
    print(f"seed {seed}")
    for statement in Random(seed).sample(list(catalogue(family)), 120):
        problem = find_problem(statement)
        assert len(problem.hidden) == HIDDEN and len(problem.wrong) == len(set(problem.wrong)) == MUTANTS
        assert all(map(FAMILIES[family].accepts, problem.hidden))
        assert [run_trusted(problem.program, given) for given in problem.hidden] == list(problem.expected)
        for wrong in problem.wrong:
            assert [run_trusted(wrong, given) for given in problem.hidden] != list(problem.expected), wrong


def test_a_statement_states_one_problem():
    assert sum(len(catalogue(family)) for family in FAMILIES) == 2649
    assert len({text for family in FAMILIES for text in catalogue(family)}) == 2649
    assert find_family(SHORT).name == "strings"
    with pytest.raises(
        ValueError, match=r"statement='Sort it\.': expected a statement of one of the families lists, str"
    ):
        find_problem("Sort it.")
    with pytest.raises(ValueError, match="family='graphs'"):
        catalogue("graphs")


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("lists", ([10],)), ("lists", ([0] * 7,)), ("lists", ([True],)), ("lists", ((1, 2),)), ("lists", ([1], [2])),
        ("strings", ("A",)), ("strings", ("a" * 9,)), ("strings", (["a"],)), ("strings", ()),
        ("sums", (1,)), ("sums", (1, 2.0)), ("sums", (1, 10)), ("sums", (-10, 1)),
    ],
)  # fmt: skip
def test_inputs_of_another_kind_are_not_accepted(family, arguments):
    assert not FAMILIES[family].accepts(arguments)
