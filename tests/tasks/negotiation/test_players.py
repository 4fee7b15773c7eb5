"""The scripted players: what the bargainer offers and accepts, and how both fare."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from turnwise.tasks.negotiation import bargainer, best_bargain, random_player, utility, value_rows
from turnwise.tasks.negotiation.players import LEAST, expected_utility


def prompt(said=(), left=6, values=(1, 2, 3)):
    shown = "\n".join(f"player{turn % 2}: [{action}]" for turn, action in enumerate(said)) or "Nothing was said."
    text = f"Pool: wood 3, gold 2, wheat 1.\nYour values: wood {values[0]}, gold {values[1]}, wheat {values[2]}.\n"
    return [{"role": "user", "content": f"{text}{shown}\nAnswers left: {left}."}]


def test_what_the_other_expects():
    rows = value_rows((3, 2, 1))
    assert expected_utility((3, 2, 1), (3, 2, 1)) == pytest.approx(1.0)
    assert expected_utility((3, 2, 1), (1, 0, 0)) == pytest.approx(sum(row[0] for row in rows) / len(rows) / 10)


def test_with_zero_sums_the_bargainer_keeps_the_most_that_leaves_something():
    for values in value_rows((3, 2, 1)):
        kept = best_bargain((3, 2, 1), values, "zero_sum")
        left = [count - have for count, have in zip((3, 2, 1), kept, strict=True)]
        assert expected_utility((3, 2, 1), left) >= LEAST
        assert utility(values, kept) > expected_utility((3, 2, 1), left)


def test_with_general_sums_it_keeps_what_it_values_and_leaves_what_it_does_not():
    assert best_bargain((3, 2, 1), (0, 5, 0), "general_sum") == (0, 2, 0)


@pytest.mark.parametrize(
    ("offer", "left", "accepted"),
    [("keep 0 0 0", 6, True), ("keep 3 2 0", 6, False), ("keep 3 2 0", 1, True), ("keep 3 2 1", 1, False)],
)
def test_with_general_sums_it_accepts_less_the_later_it_is(offer, left, accepted):
    answer = bargainer("general_sum")("player1", prompt([offer], left))
    assert (answer == "[accept]") == accepted and answer.startswith(("[accept]", "[keep"))


@pytest.mark.parametrize(("offer", "accepted"), [("keep 3 0 0", True), ("keep 0 2 1", False), ("keep 3 2 1", False)])
def test_with_zero_sums_it_accepts_what_puts_it_ahead(offer, accepted):
    assert (bargainer("zero_sum")("player1", prompt([offer])) == "[accept]") == accepted


def test_the_random_player_does_each_legal_thing():
    player = random_player(Random(0))
    first = Counter(player("player0", prompt())[1:5] for _ in range(300))
    later = Counter(player("player1", prompt(["keep 1 1 1"]))[1:5] for _ in range(400))
    assert set(first) == {"keep", "walk"} and set(later) == {"keep", "walk", "acce", "reje"}
    assert max(later.values()) < 150
    assert set(Counter(player("player0", prompt(["keep 1 1 1", "reject"]))[1:5] for _ in range(99))) == {"keep", "walk"}
