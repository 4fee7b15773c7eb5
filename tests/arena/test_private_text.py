"""Private text without an arena: how texts are compared, what a prompt hides, and what is marked."""

from __future__ import annotations

import pytest

from turnwise.arena import private, reveal
from turnwise.arena.runtime.private_text import PrivateTexts, contains_phrase, hidden_parts, is_stated, normalize_text


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ("you hold 12 coins", "you hold 1", False),
        ("you hold 1 coin", "you hold 1", True),
        ("worth 1.5", "worth 1", False),
        ("worth 1.", "worth 1", True),
        ("2.1 and 11 1", "1", True),
        ("2.1 and 11", "1", False),
        ("i hold 8.your card", "your card", True),
        ("a (k) b", "(k)", True),
        ("[bet]]", "[bet]", True),
        ("your card: k.", "your card: k.", True),
        ("xyour card", "your card", False),
    ],
)
def test_texts_are_compared_as_whole_words(text, part, expected):
    assert contains_phrase(text, part) is expected


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ("Your card: Q.\nYour  Card: K.", "your card: k.", True),
        ("Your card: Q\nYour card: K", "your card: k", True),
        ("Your card: Q\nYour card: K\n", "your card: q", True),
        ("(your card: K)", "your card: k", True),
        ("Your card: K, and Q", "your card: k", False),
        ("Your card: K of hearts", "your card: k", False),
        ("It is your card: K", "your card: k", False),
        ("You hold 1.5", "you hold 1.", False),
        ("You hold 12.", "you hold 1", False),
        ("K\nQ", "k", False),
    ],
)
def test_a_statement_has_nothing_beside_it(text, part, expected):
    assert is_stated(text, part) is expected


def test_case_and_white_space_do_not_count():
    assert normalize_text("  Your\n CARD:\tK ") == "your card: k"


@pytest.mark.parametrize(
    ("text", "shown", "parts"),
    [
        ("He may hold the king. [fold]", "[fold]", ["He may hold the king"]),
        ("<think>a b c d</think> x", "x", ["a b c d"]),
        ("[think] a b c d [/think] x", "x", ["a b c d"]),
        ("<|think|>**a b c d**<|end|> x", "x", ["a b c d"]),
        ("<think>a b c d <i>e f g h</i></think> x", "x", ["a b c d", "e f g h"]),
        ("<think>a b <i>c d</i></think> x", "x", ["<think>a b <i>c d</i></think>"]),
        ("<think>a b</think> x", "x", ["<think>a b</think>"]),
        ("well <think>a b</think> x", "x", ["<think>a b</think>"]),
        ("<think> </think> x", "x", []),
        ("a <b> c x", "x", []),
        ("a b c d [x] e f g h i", "[x]", ["a b c d", "e f g h i"]),
        ("a b c [x]", "[x]", []),
        ("say one think a b c d e say two", "say one say two", ["think a b c d e"]),
        ("all of this is gone", "", ["all of this is gone"]),
        ("nothing is hidden here", "nothing is hidden here", []),
    ],
)
def test_hidden_parts(text, shown, parts):
    assert hidden_parts(text, shown) == parts


def test_a_text_that_was_observed_and_then_marked_is_marked():
    texts = PrivateTexts()
    texts.add("The code is 4711.", ["ann"], observation=True)
    texts.add("the code is  4711.", ["ann"])
    texts.add("Hear: the code is 4711.", ["bob"], observation=True)
    assert texts.leak("bob", [{"role": "user", "content": "Hear: the code is 4711."}], []).readers == {"ann"}


def test_outside_of_an_episode_texts_are_only_returned():
    assert private("Your card: K.", to="ann") == "Your card: K." == reveal("Your card: K.")


@pytest.mark.parametrize(
    ("text", "to", "named"), [(" \n", "ann", "text="), ("K.", "", "to=''"), ("K.", [], r"to=\[\]")]
)
def test_mistakes_are_named(text, to, named):
    with pytest.raises(ValueError, match=named):
        private(text, to=to)
