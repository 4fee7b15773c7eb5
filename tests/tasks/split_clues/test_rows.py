from __future__ import annotations

import pytest

from turnwise.tasks.split_clues.rows import (
    Rows,
    format_question,
    maximum,
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
