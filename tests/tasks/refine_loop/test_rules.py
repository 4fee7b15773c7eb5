from __future__ import annotations

from itertools import product
from random import Random

import pytest

from turnwise.tasks.base import split_of
from turnwise.tasks.refine_loop import RefineLoopOptions, RefineLoopTask, parse_draft
from turnwise.tasks.refine_loop.rules import (
    KINDS,
    RulesQuestion,
    answers,
    broken_rules,
    draw_questions,
    format_question,
    parse_question,
    parse_review,
)
from turnwise.tasks.refine_loop.team import CRITIC, GENERATOR, read_view

TEXT = "Write 3 numbers from 1 to 9: sum 9, different, largest 5."
QUESTION = RulesQuestion(3, (("sum", 9), ("different", 0), ("largest", 5)))


# --- rules -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("draft", "broken"),
    [
        ((1, 3, 5), set()),
        ((2, 2, 5), {"different"}),
        ((1, 2, 6), {"largest"}),
        ((1, 2, 5), {"sum"}),
        ((4, 5), {"count"}),
        ((9,), {"count", "largest"}),
        ((3, 3, 3), {"different", "largest"}),
        ((), {"count", "sum", "different", "largest"}),
        (None, {"count", "sum", "different", "largest"}),
    ],
)
def test_broken_rules_by_hand(draft, broken):
    assert broken_rules(QUESTION, draft) == broken


@pytest.mark.parametrize(
    ("kind", "draft", "value"),
    [
        ("sum", (2, 7), 9), ("different", (2, 7), 0), ("different", (2, 2), None), ("ascending", (2, 2), 0),
        ("ascending", (3, 2), None), ("largest", (3, 8, 2), 8), ("smallest", (3, 8, 2), 2), ("first", (3, 8), 3),
        ("last", (3, 8), 8),
    ],
)  # fmt: skip
def test_kinds_by_hand(kind, draft, value):
    assert KINDS[kind](draft) == value


def test_answers_are_all_lists_that_break_nothing():
    assert answers(QUESTION) == ((1, 3, 5), (1, 5, 3), (3, 1, 5), (3, 5, 1), (5, 1, 3), (5, 3, 1))
    seed = Random().randrange(10**6)
    print(f"seed {seed}")
    for text in draw_questions("train", 12, seed, 2):
        question = parse_question(text)
        lists = product(range(1, 10), repeat=question.length)
        assert list(answers(question)) == [draft for draft in lists if not broken_rules(question, draft)] != []


# --- questions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rules", [2, 3, 5])
def test_questions_have_answers_and_as_many_rules_as_asked(rules):
    texts = draw_questions("eval", 20, 0, rules)
    for text in texts:
        question = parse_question(text)
        assert format_question(question) == text and len(set(question.names)) == rules + 1
        assert 3 <= question.length <= 5 and answers(question) and split_of(text) == "eval"
    assert draw_questions("eval", 10, 0, rules) == texts[:10] and draw_questions("eval", 20, 1, rules) != texts


# --- text ------------------------------------------------------------------------------------------------------------
def test_questions_read_back():
    assert parse_question(TEXT) == QUESTION and format_question(QUESTION) == TEXT


@pytest.mark.parametrize(
    "text",
    ["", "Write!", TEXT[:-1], TEXT.replace("sum", "total"), TEXT.replace("sum 9", "sum"), TEXT.replace("3", "x")],
)
def test_what_is_no_question_is_refused(text):
    with pytest.raises(ValueError, match="question="):
        parse_question(text)


def team(**options):
    return RefineLoopTask(RefineLoopOptions(**options))


@pytest.mark.parametrize("quality", [0.0, 0.4, 1.0])
def test_demonstrations_are_well_formed_and_quality_is_the_share_that_is_right(quality):
    made = team(quality=quality).demonstrations(800, 1)
    right = {GENERATOR: [], CRITIC: []}
    drafted = 0
    for actor, messages, reply in made:
        view = read_view(messages)
        question = parse_question(view.question)
        if actor == GENERATOR:
            right[actor].append(not broken_rules(question, parse_draft(reply)))
            drafted += view.draft is not None
            assert view.review is None or parse_review(view.review) == broken_rules(question, view.draft) != set()
        else:
            right[actor].append(parse_review(reply) == broken_rules(question, view.draft))
    assert {len(share) for share in right.values()} == {400} and 140 < drafted < 260
    assert sum(right[GENERATOR]) / 400 == pytest.approx(quality, abs=0.07)
    assert sum(right[CRITIC]) / 400 == pytest.approx(quality + (1 - quality) / 16, abs=0.07)
