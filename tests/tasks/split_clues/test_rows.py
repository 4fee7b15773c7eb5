from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.tasks.base import split_of
from turnwise.tasks.split_clues.rows import (
    Rows,
    draw_questions,
    format_question,
    maximum,
    parse_digits,
    parse_question,
    right_share,
)


def test_the_answer_is_the_maximum_of_each_place():
    assert maximum("195", "278") == "298" == Rows("195", "278").answer
    assert right_share("298", "298") == 1.0 and right_share("208", "298") == pytest.approx(2 / 3)
    assert right_share(None, "298") == 0.0


def test_questions_read_back():
    assert parse_question(format_question(Rows("195", "278"))) == Rows("195", "278")
    for text in ("195", "195/27", "19a/278", "/", "1/2/3"):
        with pytest.raises(ValueError, match="expected two rows"):
            parse_question(text)


@pytest.mark.parametrize(
    ("text", "digits"),
    [("195", "195"), ("1 9 5\n", "195"), ("I say\n195", "195"), ("195\n278", "278"), ("1955", None), ("", None),
     ("19x", None), ("١٢٣", None), ("195.", None)],
)  # fmt: skip
def test_the_last_line_of_digits_is_read(text, digits):
    assert parse_digits(text, 3) == digits


@given(st.text(max_size=40))
def test_reading_never_fails(text):
    assert parse_digits(text, 3) is None or len(parse_digits(text, 3)) == 3


def test_draws_are_different_repeat_and_belong_to_their_split():
    drawn = draw_questions("eval", 300, 0, 3)
    assert len(set(drawn)) == 300 and drawn[:20] == draw_questions("eval", 20, 0, 3)
    assert {split_of(question) for question in drawn} == {"eval"}
    assert drawn != draw_questions("eval", 300, 1, 3)
    assert not set(drawn) & set(draw_questions("train", 2000, 0, 3))


def test_a_split_can_be_exhausted():
    with pytest.raises(ValueError, match=r"n=9999: the eval split holds about \d+ questions of 2 digits"):
        draw_questions("eval", 9999, 0, 2)
