"""Deals, utilities and bargains worked by hand."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from turnwise.tasks.negotiation import NegotiationRules, divisions, nash_solution, utilities, utility, value_rows
from turnwise.tasks.negotiation.game import read_prompt

QUESTION = {"pool": [3, 2, 1], "values": [[1, 2, 3], [2, 0, 4]]}
GENERAL = NegotiationRules("general_sum")


def played(texts, rules=None, question=QUESTION):
    rules = rules or NegotiationRules()
    game = rules.start(question)
    verdicts = [rules.play(game, text) for text in texts]
    return game, verdicts


def test_an_accepted_offer_of_the_first_seat():
    """Seat 0 keeps 0 wood, 2 gold, 1 wheat: worth 0 + 4 + 3 = 7 to it; 3 wood are worth 6 to seat 1."""
    game, verdicts = played(["I want gold. [keep 0 2 1]", "[accept]"])
    assert verdicts == ["legal", "legal"] and game["deal"] == [0, 2, 1]
    assert utilities(game) == (0.7, 0.6)
    assert NegotiationRules().payoffs(game) == pytest.approx((0.1, -0.1))
    assert GENERAL.payoffs(game) == (0.7, 0.6)
    assert NegotiationRules().to_move(game) is None


def test_an_accepted_offer_of_the_second_seat():
    """Seat 1 keeps 3 wood and the wheat: all of its 10; 2 gold are worth 4 to seat 0."""
    game, _ = played(["[reject? no: keep 3 2 1] [keep 3 2 1]", "[keep 3 0 1]", "[accept]"])
    assert game["deal"] == [0, 2, 0]
    assert utilities(game) == (0.4, 1.0)
    assert NegotiationRules().describe(game) == {
        "deal": [0, 2, 0], "utilities": [0.4, 1.0], "nash_share": pytest.approx(0.4 / 0.42),
    }  # fmt: skip


@pytest.mark.parametrize(
    "texts",
    [["[walk]"], ["[keep 1 1 1]", "[walk]"], ["[keep 0 0 0]", "[reject]"] * 3, ["[keep 3 2 1]"] * 6],
    ids=["at once", "after an offer", "all rejected", "nobody gives in"],
)
def test_no_deal_is_worth_nothing(texts):
    game, verdicts = played(texts)
    assert set(verdicts) == {"legal"} and game["deal"] is None
    assert NegotiationRules().to_move(game) is None
    assert NegotiationRules().payoffs(game) == GENERAL.payoffs(game) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("before", "text", "verdict"),
    [
        ([], "[accept]", "illegal"),
        ([], "[reject]", "illegal"),
        ([], "[keep 4 0 0]", "illegal"),
        ([], "[keep 1 1]", "illegal"),
        ([], "[keep 1 1 1 1]", "illegal"),
        ([], "[keep]", "unreadable"),
        ([], "[keep -1 0 0]", "unreadable"),
        ([], "[keep 999999999 0 0]", "illegal"),
        pytest.param([], f"[keep {'9' * 4400} 0 0]", "unreadable", id="4400 digits"),
        ([], "[keep \u0663 0 0]", "legal"),
        ([], "accept", "unreadable"),
        ([], "[ KEEP  3 2\t1 ]", "legal"),
        (["[keep 1 1 1]", "[reject]"], "[accept]", "illegal"),
        (["[keep 1 1 1]"], "[accept]", "legal"),
    ],
)
def test_what_can_be_read_and_what_is_allowed(before, text, verdict):
    assert played([*before, text])[1][-1] == verdict


def test_seats_take_turns_whatever_is_said():
    rules, game = NegotiationRules(turns=4), NegotiationRules().start(QUESTION)
    movers = []
    for text in ("[keep 1 1 1]", "[reject]", "[keep 1 1 0]", "[keep 0 0 0]"):
        movers.append(rules.to_move(game))
        rules.play(game, text)
    assert movers == [0, 1, 0, 1] and rules.to_move(game) is None


def test_a_seat_is_shown_the_pool_its_own_values_and_what_was_said():
    game, _ = played(["[keep 3 0 1]", "[reject]"])
    assert NegotiationRules().observe(game, 0) == (
        "Pool: wood 3, gold 2, wheat 1.\nYour values: wood 1, gold 2, wheat 3.\n"
        "player0: [keep 3 0 1]\nplayer1: [reject]\nAnswers left: 4."
    )
    assert read_prompt([{"role": "user", "content": NegotiationRules().observe(game, 0)}]) == {
        "pool": (3, 2, 1), "values": (1, 2, 3), "offer": None, "left": 4,
    }  # fmt: skip
    game, _ = played(["[keep 3 0 1]"])
    assert "wood 2, gold 0, wheat 4" in NegotiationRules().observe(game, 1)
    assert read_prompt([{"role": "user", "content": NegotiationRules().observe(game, 1)}])["offer"] == (3, 0, 1)
    with pytest.raises(ValueError, match="expected a prompt of the negotiation"):
        read_prompt([{"role": "user", "content": "Pool: wood 3, gold 2, wheat 1."}])


def test_a_prompt_says_nothing_of_the_others_values():
    """Whatever the other seat's values are, what is shown is the same."""
    for seat in (0, 1):
        shown = set()
        for other in value_rows((3, 2, 1)):
            values = [[1, 2, 3], [1, 2, 3]]
            values[1 - seat] = list(other)
            game, _ = played(["[keep 2 1 0]"] * (1 + seat), question={"pool": [3, 2, 1], "values": values})
            shown.add(NegotiationRules().observe(game, seat))
        assert len(shown) == 1


def test_general_sums_let_nobody_earn_by_the_others_mistake():
    assert GENERAL.invalid_payoffs(0) == (-1.5, 0.0) and GENERAL.invalid_payoffs(1) == (0.0, -1.5)
    assert NegotiationRules().invalid_payoffs(1) == (1.5, -1.5)
    assert GENERAL.score((0.7, 0.6), 1) == 0.6 and GENERAL.score((-1.5, 0.0), 0) == 0.0
    assert NegotiationRules().score((0.1, -0.1), 0) == 1.0 and NegotiationRules().score((0.0, 0.0), 1) == 0.5


def test_the_nash_solution():
    """By hand: seat 0 should get all gold, worth nothing to seat 1; wheat is worth 3 and 4 to them, wood 1 and 2.

    With the gold and the wheat it has 7 and leaves 6: 42. With gold and k wood it has 4 + k and leaves 10 - 2k: at
    most 5 * 8 = 40. With all but one wood: 9 * 2.
    """
    assert nash_solution(QUESTION) == ((0, 2, 1), pytest.approx(0.42))
    opposite = {"pool": [1, 1, 1], "values": [[10, 0, 0], [0, 10, 0]]}
    share, best = nash_solution(opposite)
    assert share[0] == 1 and share[1] == 0 and best == 1.0


def test_the_nash_solution_is_the_best_of_all_divisions():
    rng = Random(3)
    for _ in range(30):
        pool = tuple(rng.randint(1, 4) for _ in range(3))
        rows = value_rows(pool)
        if not rows:
            continue
        first, second = rng.choice(rows), rng.choice(rows)
        best = max(
            sum(a * n for a, n in zip(first, share, strict=True))
            * sum(b * (c - n) for b, c, n in zip(second, pool, share, strict=True))
            for share in product(*(range(count + 1) for count in pool))
        )
        assert nash_solution({"pool": list(pool), "values": [first, second]})[1] == pytest.approx(best / 100)


def test_divisions_and_values():
    assert len(list(divisions((3, 2, 1)))) == 4 * 3 * 2
    assert value_rows((4, 4, 4)) == () and (1, 2, 3) in value_rows((3, 2, 1))
    assert all(3 * a + 2 * b + c == 10 for a, b, c in value_rows((3, 2, 1)))
    assert utility((1, 2, 3), (0, 2, 1)) == 0.7


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"pool": [3, 2], "values": [[1, 2, 3], [1, 2, 3]]},
        {"pool": [3, 2, 0], "values": [[1, 2, 3], [1, 2, 3]]},
        {"pool": [3, 2, 1], "values": [[1, 2, 3]]},
        {"pool": [3, 2, 1], "values": [[1, 2, 3], [1, 2, 4]]},
    ],
)
def test_bad_questions_are_named(question):
    with pytest.raises(ValueError, match=r"artifact=.*expected 'pool'"):
        NegotiationRules().start(question)


def test_an_unknown_payoff_is_named():
    with pytest.raises(ValueError, match=r"payoff='zero'.*'general_sum', 'zero_sum'"):
        NegotiationRules("zero")
