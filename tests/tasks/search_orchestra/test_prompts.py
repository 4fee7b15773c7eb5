from __future__ import annotations

import pytest

from turnwise.tasks.search_orchestra.corpus import Passage
from turnwise.tasks.search_orchestra.prompts import (
    PASSAGE_CHARS,
    SYSTEM_PROMPTS,
    View,
    parse_line,
    parse_route,
    read_view,
    search_messages,
    view_message,
)


@pytest.mark.parametrize("actor", SYSTEM_PROMPTS)
@pytest.mark.parametrize("view", [View("Who?"), View("Who?", (Passage("Bo", "Bo is here."), Passage("b c", "It: 3.")))])
def test_prompts_read_back(actor, view):
    messages = search_messages(actor, view)
    assert read_view(messages) == view and messages[0]["content"] == SYSTEM_PROMPTS[actor]


def test_long_passages_are_cut():
    assert len(view_message("Who?", [Passage("t", "x" * 9999)])["content"]) < PASSAGE_CHARS + 20


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("search", "search"),
        ("Answer.", "answer"),
        ("I could answer, but: SEARCH", "search"),
        ("<think>search</think>answer", "answer"),
        ("research", None),
        ("", None),
    ],
)
def test_the_last_route_counts(text, route):
    assert parse_route(text) == route


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Velmar", "Velmar"),
        ("I think so.\nAnswer: Velmar\n\n", "Velmar"),
        ('**Query:** "river Dun"', '** "river Dun'),
        ("<think>Osk</think> Dun ", "Dun"),
        ("Search query: dun", "dun"),
        ("\n \n", None),
        ("Answer:", None),
        ("x" * 999, "x" * 200),
    ],
)
def test_the_last_line_counts(text, line):
    assert parse_line(text) == line
