"""Edges between levels: against values worked by hand, on trees of depth three and deeper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from turnwise.credit.edges import Difference, FromChildren, build_edge, is_finished
from turnwise.types import GenerateResult, Rollout


def node(name: str, rewards: dict[str, float], *children: GenerateResult, **fields: Any) -> GenerateResult:
    """A result of the type that ``name`` begins with: ``plan-2`` is a ``plan``."""
    return GenerateResult(Rollout(name, name.partition("-")[0], "q", rewards=rewards, **fields), list(children))


def solve(name: str, reward: float, **fields: Any) -> GenerateResult:
    return node(f"solve-{name}", {"solver": reward}, **fields)


def three_levels() -> GenerateResult:
    """A root of two plans; the first has solvers of 1 0 1 and one that failed, the second of 0.5 alone."""
    failed = solve("f", 9.0, error="traceback")
    first = node("plan-1", {"planner": 0.25}, solve("a", 1.0), solve("b", 0.0), failed, solve("c", 1.0))
    second = node("plan-2", {"planner": 0.25}, solve("d", 0.5))
    return node("root-0", {"lead": 3.0}, first, second)


def rewards_of(top: GenerateResult) -> dict[tuple[str, str], float]:
    return {(n.rollout.id, a): r for n in top.walk() if is_finished(n) for a, r in n.rollout.rewards.items()}


def apply(top: GenerateResult, *edges: Any) -> dict[str, float]:
    """What the edges paid, by rollout."""
    nodes, paid = [n for n in top.walk() if is_finished(n)], {}
    for edge in edges:
        paid |= edge.pay(nodes, rewards_of(top) | paid)
    return {rollout: value for (rollout, _), value in paid.items()}


PLANS = {"parent": "plan", "actor": "planner", "child": "solve", "child_actor": "solver"}
ROOTS = {"parent": "root", "actor": "lead", "child": "plan", "child_actor": "planner"}


@pytest.mark.parametrize(
    ("by", "first", "second"),
    [
        ("mean", 2 / 3, 0.5),
        ("sum", 2.0, 0.5),
        ("max", 1.0, 0.5),
        ("min", 0.0, 0.5),
        ("statistics:median", 1.0, 0.5),
        (lambda rewards: rewards[0] * 10 + len(rewards), 13.0, 6.0),
    ],
)
def test_parents_are_paid_by_their_finished_children(by: Any, first: float, second: float) -> None:
    paid = apply(three_levels(), FromChildren(**PLANS, by=by))
    assert paid == {"plan-1": pytest.approx(first), "plan-2": second}


def test_their_own_reward_counts_as_much_as_is_asked() -> None:
    assert apply(three_levels(), FromChildren(**PLANS, by="sum", own=2.0)) == {"plan-1": 2.5, "plan-2": 1.0}


def test_three_levels_by_hand() -> None:
    """Plans are paid the means 2/3 and 1/2, the root their sum; solvers what the mean of their plan lacks without them.

    Without a: mean(0, 1) = 1/2, so 2/3 - 1/2 = 1/6; without b: 2/3 - 1; d alone: 1/2 - empty. Plans then by difference
    in the root's sum: each its own payment.
    """
    edges = [
        FromChildren(**PLANS),
        FromChildren(**ROOTS, by="sum"),
        Difference(parent="plan", child="solve", child_actor="solver"),
        Difference(parent="root", child="plan", child_actor="planner", by="max", own=0.5),
    ]
    expected = {
        "root-0": 7 / 6,
        "plan-1": 0.5 * 2 / 3 + (2 / 3 - 1 / 2),
        "plan-2": 0.25 + 0.0,
        "solve-a": 1 / 6,
        "solve-b": -1 / 3,
        "solve-c": 1 / 6,
        "solve-d": 0.5,
    }
    assert apply(three_levels(), *edges) == pytest.approx(expected)
    assert apply(three_levels(), *edges) == apply(three_levels(), *edges)
    assert apply(three_levels(), FromChildren(**ROOTS, by="sum"), FromChildren(**PLANS))["root-0"] == 0.5, "in order"


def test_one_edge_goes_through_all_levels_of_one_type() -> None:
    """Depth four: 1 and 0 below x pay it 1/2; x and y (3) pay w 7/4; w pays the top. Leaves keep what they earned."""
    x = node("solve-x", {"solver": -1.0}, solve("one", 1.0), solve("nil", 0.0))
    w = node("solve-w", {"solver": -1.0}, x, solve("y", 3.0))
    top = node("solve-t", {"solver": -1.0}, w)
    chain = {"parent": "solve", "actor": "solver", "child": "solve", "child_actor": "solver"}
    assert apply(top, FromChildren(**chain)) == {"solve-x": 0.5, "solve-w": 1.75, "solve-t": 1.75}
    assert apply(top, FromChildren(**chain, own=1.0)) == {"solve-x": -0.5, "solve-w": 0.25, "solve-t": -0.75}


def test_failed_and_dropped_ones_pay_nothing_and_are_paid_nothing() -> None:
    dropped = solve("x", 5.0, meta={"dropped": "raised"})
    childless = node("plan-1", {"planner": 1.0}, solve("f", 5.0, error="traceback"), dropped)
    failed = node("plan-2", {}, solve("a", 1.0), error="traceback")
    alone = node("plan-3", {"planner": -0.25})
    top = node("root-0", {"lead": 0.0}, childless, failed, alone)
    assert apply(top, FromChildren(**PLANS)) == {"plan-1": 0.0}
    assert apply(top, FromChildren(**PLANS, empty=-1.0)) == {"plan-1": -1.0}
    difference = Difference(parent="plan", child="solve", child_actor="solver")
    assert apply(top, difference) == {}


def test_an_outcome_of_ones_own_sees_the_children() -> None:
    """A vote: with a, b and c the majority writes 4, without a there is a tie, which is lost."""

    def vote(parent: GenerateResult, team: Sequence[GenerateResult]) -> float:
        assert parent.rollout.id == "plan-1"
        right = sum(child.rollout.extras["answer"] == 4 for child in team)
        return float(right > len(team) / 2)

    children = [solve(name, 0.0, extras={"answer": answer}) for name, answer in (("a", 4), ("b", 5), ("c", 4))]
    edge = Difference(parent="plan", child="solve", child_actor="solver", outcome=vote)
    assert apply(node("plan-1", {}, *children), edge) == {"solve-a": 1.0, "solve-b": 0.0, "solve-c": 1.0}


def test_difference_by_max_pays_the_best_alone() -> None:
    edge = Difference(parent="plan", child="solve", child_actor="solver", by="max")
    one_best = node("plan-1", {}, solve("a", 0.25), solve("b", 1.0), solve("c", 0.5))
    assert apply(one_best, edge) == {"solve-a": 0.0, "solve-b": 0.5, "solve-c": 0.0}
    two_best = node("plan-1", {}, solve("a", 1.0), solve("b", 1.0))
    assert apply(two_best, edge) == {"solve-a": 0.0, "solve-b": 0.0}
    assert apply(node("plan-1", {}, solve("a", 1.0)), Difference(**vars(edge) | {"empty": 0.25})) == {"solve-a": 0.75}


def test_a_mistyped_actor_is_told() -> None:
    for edge in (
        FromChildren(**PLANS | {"actor": "planer"}),
        FromChildren(**PLANS | {"child_actor": "solvr"}),
        Difference(parent="plan", child="solve", child_actor="solvr"),
    ):
        with pytest.warns(UserWarning, match=r"has an actor '(planer|solvr)'; of the first \['(planner|solver)'\]"):
            apply(three_levels(), edge)


def test_edges_from_tables_and_wrong_ones() -> None:
    table = {"kind": "children", **PLANS, "by": "max", "own": 1}
    assert build_edge(table) == FromChildren(**PLANS, by="max", own=1)
    assert build_edge(
        {"kind": "difference", "parent": "p", "child": "c", "child_actor": "a", "by": "statistics:median"}
    )
    for wrong, message in (
        ({**table, "kind": "childs"}, "'edges.kind' = 'childs': unknown; did you mean 'children'"),
        ({**table, "bye": "max"}, "unknown config key 'edges.bye'; did you mean 'by'"),
        ({**table, "by": "mx"}, "'by' = 'mx': unknown; did you mean"),
        ({"kind": "children"}, "missing 4 required"),
    ):
        with pytest.raises(ValueError, match=message):
            build_edge(wrong)
    for strange in (3, FromChildren):
        with pytest.raises(TypeError, match="expected objects with pay"):
            build_edge(strange)
    with pytest.raises(TypeError, match="outcome=3"):
        Difference(parent="p", child="c", child_actor="a", outcome=3)
    with pytest.raises(TypeError, match="by=3"):
        FromChildren(**PLANS, by=3)
