from __future__ import annotations

from turnwise.naming import nearest


def test_a_close_name_is_offered_and_else_all_of_them():
    assert nearest("stepz", ["seed", "steps"]) == "did you mean 'steps'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
