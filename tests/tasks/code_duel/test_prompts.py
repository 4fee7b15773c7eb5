from __future__ import annotations

import pytest

from turnwise.tasks.code_duel.prompts import SYSTEM_PROMPTS, View, code_duel_messages, read_view


@pytest.mark.parametrize("actor", SYSTEM_PROMPTS)
@pytest.mark.parametrize(
    "view",
    [
        View("Say it."),
        View("Say it.", "def f(x):\n    return x"),
        View("Say it.", "def f(x): 1", "f(1) == 1, not None"),
    ],
)
def test_prompts_read_back(actor, view):
    messages = code_duel_messages(actor, view)
    assert read_view(messages) == view and messages[0]["content"] == SYSTEM_PROMPTS[actor]


def test_the_tester_is_told_which_inputs_there_are():
    assert "-9 to 9, lists have up to 6, strings up to 8" in SYSTEM_PROMPTS["tester"]
