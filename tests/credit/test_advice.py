from __future__ import annotations

import warnings
from typing import Any

import pytest

from turnwise.credit import DrMASCredit, GRPOCredit, HierarchyCredit, RAECredit, RLOOCredit


def game(make: Any, name: str, left: float, right: float, **fields: Any) -> list[Any]:
    """Two actors, the left of which acts twice."""
    rewards = (("left", left, 0), ("right", right, 1), ("left", left, 2))
    return [make(name, actor, reward, step_index=place, **fields) for actor, reward, place in rewards]


def games(make: Any, *outcomes: tuple[float, float], **fields: Any) -> list[Any]:
    return [row for number, pair in enumerate(outcomes) for row in game(make, f"g{number}", *pair, **fields)]


WON_AND_LOST = ((1.0, -1.0), (-1.0, 1.0), (0.0, 0.0), (1.0, -1.0))


def advice_of(rule: Any, *batches: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            rule.compute_columns(batch)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("rule", [GRPOCredit, RLOOCredit])
def test_both_sides_of_a_zero_sum_game_in_one_group_are_told_once(make: Any, rule: Any) -> None:
    batch = games(make, *WON_AND_LOST)
    [told] = advice_of(rule(), batch, batch)
    assert told.startswith(f"{rule.__name__}: the actors of each trajectory share one value")
    assert "HierarchyCredit, DrMASCredit, ATGRPOCredit and RAECredit" in told


def test_a_split_of_a_fixed_sum_is_such_a_game(make: Any) -> None:
    assert advice_of(GRPOCredit(), games(make, (0.1, 0.9), (0.7, 0.3), (0.2, 0.8), (0.5, 0.5)))


def test_rules_that_tell_actors_apart_say_nothing(make: Any) -> None:
    for rule in (HierarchyCredit(), DrMASCredit(), RAECredit()):
        assert not advice_of(rule, games(make, *WON_AND_LOST)), rule


@pytest.mark.parametrize(
    "outcomes",
    [
        ((1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0)),  # a team
        ((1.0, 0.9), (0.0, 0.1), (1.0, 0.0), (0.0, -0.1)),  # a team with shares of their own
        ((0.5, 0.2), (0.5, 0.2), (0.5, 0.2), (0.5, 0.2)),  # nothing happens
        ((1.0, -1.0), (-1.0, 1.0), (1.0, -1.0)),  # too few to tell
    ],
)
def test_other_games_are_no_reason_for_advice(make: Any, outcomes: Any) -> None:
    assert not advice_of(GRPOCredit(), games(make, *outcomes))


def test_one_actor_against_a_frozen_one_is_no_reason(make: Any) -> None:
    assert not advice_of(GRPOCredit(), [make(f"g{n}", "left", reward) for n, (reward, _) in enumerate(WON_AND_LOST)])


def test_groups_of_one_alone_are_told(make: Any) -> None:
    alone = [make(f"t{n}", reward=float(n), group_id=n) for n in range(3)]
    [told] = advice_of(GRPOCredit(), alone, alone)
    assert "each of the 3 values of this batch is alone in its group, so all advantages are 0" in told
    assert not advice_of(GRPOCredit(), [*alone, make("t3", group_id=0)]), "two share a question"
    assert not advice_of(GRPOCredit(), alone[:1]), "an evaluation of one, or a demo"
    assert not advice_of(GRPOCredit(singleton="raw"), alone)


def test_after_eight_batches_nobody_looks_any_more(make: Any) -> None:
    pair = [make("a", reward=1.0), make("b")]
    alone = [make(f"t{n}", group_id=n) for n in range(3)]
    assert advice_of(GRPOCredit(), *[pair] * 7, alone) and not advice_of(GRPOCredit(), *[pair] * 8, alone)


def test_first_arguments_by_place() -> None:
    assert (GRPOCredit(False).scale, GRPOCredit(False, True).positive_only, RAECredit(0.5).decay) == ("none", True, 0.5)
    assert RLOOCredit(True).normalize and not RLOOCredit(True).positive_only
