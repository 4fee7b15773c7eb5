"""The rules, worked by hand: who acts, what is paid, what each seat is shown, and the players."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from turnwise.tasks.kuhn_poker.game import (
    DEALS,
    ENDS,
    INFORMATION_SETS,
    KuhnRules,
    board,
    equilibrium,
    payoff,
    read_board,
    table_player,
)

PLAYS = [
    ("KQ", ["check", "check"], (1, -1)),
    ("JQ", ["check", "check"], (-1, 1)),
    ("KQ", ["check", "bet", "fold"], (-1, 1)),
    ("KQ", ["check", "bet", "call"], (2, -2)),
    ("QK", ["check", "bet", "call"], (-2, 2)),
    ("JK", ["bet", "fold"], (1, -1)),
    ("JK", ["bet", "call"], (-2, 2)),
    ("KJ", ["bet", "call"], (2, -2)),
]


@pytest.mark.parametrize(("cards", "actions", "payoffs"), PLAYS)
def test_plays_worked_by_hand(cards, actions, payoffs):
    rules = KuhnRules()
    game = rules.start({"cards": cards})
    for number, action in enumerate(actions):
        assert rules.to_move(game) == number % 2
        assert rules.play(game, f"I think so. [{action}]") == "legal"
    assert rules.to_move(game) is None
    assert rules.payoffs(game) == payoffs
    assert rules.describe(game) == {"cards": cards, "history": game["history"]}


def test_every_ending_is_zero_sum_and_the_higher_card_wins_the_showdowns():
    for cards in DEALS:
        for history in ENDS:
            swapped = payoff(cards[::-1], history)
            showdown = history in ("pp", "pbb", "bb")
            assert payoff(cards, history) == (-swapped if showdown else swapped)


def test_the_score_counts_chips():
    scores = [KuhnRules().score((won, -won), 0) for won in (-3, -2, -1, 0, 1, 2, 3)]
    assert scores == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert KuhnRules().score((1, -1), 1) == 0.25


@pytest.mark.parametrize(
    ("history", "text", "verdict"),
    [
        ("", "[bet]", "legal"),
        ("", "[CHECK] or [fold]? [Check]", "legal"),
        ("", "bet", "unreadable"),
        ("", "[raise]", "unreadable"),
        ("", "", "unreadable"),
        ("", "[call]", "illegal"),
        ("", "[fold]", "illegal"),
        ("b", "[bet]", "illegal"),
        ("b", "[check]", "illegal"),
        ("pb", "[fold]", "legal"),
    ],
)
def test_what_can_be_read_and_what_is_allowed(history, text, verdict):
    game = {"cards": "JQ", "history": history}
    assert KuhnRules().play(game, text) == verdict
    assert (game["history"] == history) == (verdict != "legal")


def test_a_seat_is_shown_its_own_card_the_bets_and_its_choices():
    game = {"cards": "KJ", "history": "pb"}
    assert KuhnRules().observe(game, 0) == "Your card: K.\nBets so far: check, bet.\nReply with [fold] or [call]."
    game = {"cards": "KJ", "history": "p"}
    assert KuhnRules().observe(game, 1) == "Your card: J.\nBets so far: check.\nReply with [check] or [bet]."


def test_a_prompt_depends_on_the_information_set_alone():
    """Whatever the other one holds, and so nothing of it can be in the prompt: 12 sets, 12 prompts."""
    rules, seen = KuhnRules(), {}
    for cards in DEALS:
        for history in ("", "p", "b", "pb"):
            seat = len(history) % 2
            shown = rules.observe({"cards": cards, "history": history}, seat)
            seen.setdefault((cards[seat], history), set()).add(shown)
    assert set(seen) == set(INFORMATION_SETS) and len(seen) == 12
    assert all(len(shown) == 1 for shown in seen.values())
    assert len(set.union(*seen.values())) == 12


def test_prompts_are_read_back():
    for card, history in INFORMATION_SETS:
        assert read_board([{"role": "user", "content": board(f"Your card: {card}.", history)}]) == (card, history)
    with pytest.raises(ValueError, match="expected a prompt of Kuhn poker"):
        read_board([{"role": "user", "content": "Your card: A."}])


def test_a_table_player_plays_its_table():
    policy = np.tile([0.2, 0.5, 0.3], (12, 1))
    player = table_player(policy, Random(1))
    shown = [{"role": "user", "content": board("Your card: Q.", "b")}]
    said = Counter(player("player1", shown) for _ in range(4000))
    assert set(said) == {"[fold]", "[call]", "[pass]"}
    assert [said[word] / 4000 for word in ("[fold]", "[call]", "[pass]")] == pytest.approx([0.2, 0.5, 0.3], abs=0.04)


@pytest.mark.parametrize("bad", [-0.01, 0.34, float("nan")])
def test_there_is_no_equilibrium_beyond_a_third(bad):
    with pytest.raises(ValueError, match=r"alpha=.*expected a number in \[0, 1/3\]"):
        equilibrium(bad)


@pytest.mark.parametrize("cards", ["KK", "K", None, "AK"])
def test_a_deal_is_two_of_three_cards(cards):
    with pytest.raises(ValueError, match=r"artifact\['cards'\]="):
        KuhnRules().start({"cards": cards})


def test_an_unfinished_game_pays_nothing():
    with pytest.raises(ValueError, match="history='pb'"):
        payoff("KQ", "pb")
