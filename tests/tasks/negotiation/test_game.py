"""Deals, utilities and bargains worked by hand."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import pytest

from turnwise.tasks.negotiation import (
    NegotiationOptions,
    NegotiationRules,
    NegotiationTask,
    bargainer,
    best_bargain,
    divisions,
    nash_solution,
    random_player,
    utility,
    value_rows,
)
from turnwise.tasks.negotiation import task as module
from turnwise.tasks.negotiation.game import LEAST, expected_utility, read_prompt

QUESTION = {"pool": [3, 2, 1], "values": [[1, 2, 3], [2, 0, 4]]}
GENERAL = NegotiationRules("general_sum")


def played(texts, rules=None, question=QUESTION):
    rules = rules or NegotiationRules()
    game = rules.start(question)
    verdicts = [rules.play(game, text) for text in texts]
    return game, verdicts


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


def test_an_unknown_payoff_is_named():
    with pytest.raises(ValueError, match=r"payoff='zero'.*'general_sum', 'zero_sum'"):
        NegotiationRules("zero")


def task(**options):
    return NegotiationTask(NegotiationOptions(**options))


async def test_with_general_sums_two_bargainers_do_much_better_than_two_random_players(table):
    fair = task(payoff="general_sum")
    shares = {}
    for name, player in (("oracle", fair.oracle()), ("random", fair.random_player(0))):
        results = await table(fair, player).play(fair.requests(0, 60, 1))
        shares[name] = sum(result.rollout.extras["nash_share"] for result in results) / 60
        assert all(0 <= result.rollout.extras["nash_share"] <= 1 for result in results)
    assert shares["oracle"] > 0.6 > 0.3 > shares["random"]


def test_training_questions_come_again_and_others_run_out(monkeypatch):
    """With one piece of each resource there are 66 rows of values, so 66 * 66 questions."""
    monkeypatch.setattr(module, "MOST", 1)
    monkeypatch.setattr(module, "_PATIENCE", 200)
    drawn = [str(question) for question in task().questions("train", 5000, 0)]
    assert len(drawn) == 5000 > len(set(drawn)) > 3000
    with pytest.raises(ValueError, match=r"n=500: the eval split holds about \d+ questions"):
        list(task().questions("eval", 500, 0))


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
