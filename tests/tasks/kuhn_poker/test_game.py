"""The rules, who is shown what, the players, and episodes against the exact value of the policies that play them."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from turnwise.tasks.kuhn_poker import KuhnOptions, KuhnPokerTask, solve
from turnwise.tasks.kuhn_poker.game import (
    DEALS,
    ENDS,
    INFORMATION_SETS,
    KuhnRules,
    board,
    equilibrium,
    payoff,
    table_player,
)


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


def test_an_unfinished_game_pays_nothing():
    with pytest.raises(ValueError, match="history='pb'"):
        payoff("KQ", "pb")


def task(**options):
    return KuhnPokerTask(KuhnOptions(**options))


async def mean_payoff(table, policy, games, **options):
    """Of seat 0 in self-play by ``policy``, over equally many games of each deal, and the standard error."""
    requests = task(**options).requests(0, games, 1)
    results = await table(task(**options), table_player(policy, Random(0))).play(requests)
    won = np.array([result.rollout.rewards["player0"] for result in results])
    assert all(sum(result.rollout.rewards.values()) == 0 for result in results)
    return won.mean(), won.std() / np.sqrt(games)


@pytest.mark.parametrize("policy", [equilibrium(), np.tile([0.3, 0.5, 0.2], (12, 1))], ids=["equilibrium", "erring"])
async def test_episodes_pay_what_the_tree_says(table, policy):
    mean, error = await mean_payoff(table, policy, 900, invalid_cost=2.5)
    assert mean == pytest.approx(solve(policy, 2.5).value, abs=4 * error)


def test_every_six_games_hold_every_deal():
    dealt = [request.artifact["cards"] for request in task().requests(3, 12, 1)]
    assert Counter(dealt[:6]) == Counter(dealt[6:]) == Counter(DEALS)
    assert dealt != [request.artifact["cards"] for request in task(seed=1).requests(3, 12, 1)]
