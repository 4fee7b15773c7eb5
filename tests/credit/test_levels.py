"""Rules over paid rewards: what reaches the samples, by hand, with any rule behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from turnwise.credit import Difference, EpisodicCredit, FromChildren, HierarchyCredit, LevelCredit, RAECredit, registry
from turnwise.credit.levels import build_edge, is_finished
from turnwise.samples.collect import collect_samples
from turnwise.samples.training_samples import advantages_of, penalize
from turnwise.train.config.toml import to_toml
from turnwise.train.validate import config_from_dict
from turnwise.types import GenerateResult, Rollout, RolloutFacts, Step

PROPOSED = FromChildren(parent="propose", actor="proposer", child="solve", child_actor="solver", by="mean")
SOLVED = Difference(parent="propose", child="solve", child_actor="solver", by="mean")


def step(actor: str, **fields: Any) -> Step:
    return Step(actor, 0, [], "", [1], [2], [-0.1], [(1, 0)], "stop", **fields)


def episode(
    kind: str, name: str, actor: str, reward: float, *children: GenerateResult, **fields: Any
) -> GenerateResult:
    steps = fields.pop("steps", None) or [step(actor)]
    trainable = fields.pop("is_trainable", True)
    result = GenerateResult(Rollout(name, kind, "q", steps, {actor: reward}, **fields), list(children), group_id="q")
    result.is_trainable = trainable
    for child in children:
        child.parent_id = name
    return result


def proposals() -> list[GenerateResult]:
    """Two problems of one proposer: attempts 1 0 1 (and a failed one), and 0 0, which only measure."""
    solved = [episode("solve", f"p1.{n}", "solver", reward) for n, reward in enumerate((1.0, 0.0, 1.0))]
    solved.append(episode("solve", "p1.3", "solver", 5.0, error="traceback"))
    measured = [episode("solve", f"p2.{n}", "solver", 0.0, is_trainable=False) for n in range(2)]
    steps = [step("proposer", reward=7.0), step("proposer", reward=3.0)]
    return [
        episode("propose", "p1", "proposer", 10.0, *solved, steps=steps),
        episode("propose", "p2", "proposer", -10.0, *measured),
    ]


def by_step(samples: list[Any], values: Any) -> dict[tuple[str, int], float]:
    return {(s.rollout_id, s.step_index): float(v) for s, v in zip(samples, values, strict=True)}


def test_rewards_are_paid_and_then_compared() -> None:
    """Means 2/3 and 0; attempts are paid 1/6 -1/3 1/6. GRPO by level with ddof 0: +-1, and sqrt(1/2) -sqrt(2)."""
    samples = collect_samples(proposals())
    rule = LevelCredit(rule=HierarchyCredit(), edges=[PROPOSED, SOLVED])
    paid = by_step(samples, [s.reward for s in rule.paid(samples)])
    assert paid == pytest.approx(
        {("p1", 0): 2 / 3, ("p1", 1): 2 / 3, ("p1.0", 0): 1 / 6, ("p1.1", 0): -1 / 3, ("p1.2", 0): 1 / 6, ("p2", 0): 0}
    )
    advantages = by_step(samples, rule.compute_columns(samples))
    half = 0.5**0.5
    expected = {("p1", 0): 1, ("p1", 1): 1, ("p2", 0): -1, ("p1.0", 0): half, ("p1.1", 0): -2 * half, ("p1.2", 0): half}
    assert advantages == pytest.approx(expected, abs=1e-4)
    assert rule.compute(proposals()) == pytest.approx(expected, abs=1e-4)
    assert [s.reward for s in samples][:2] == [7.0, 3.0], "the samples that were given stay as they were"


def test_own_step_rewards_no_longer_count_where_an_edge_pays() -> None:
    samples = LevelCredit(rule="episodic", edges=[PROPOSED]).paid(collect_samples(proposals()))
    proposer = [s for s in samples if s.actor == "proposer"]
    assert [s.has_step_reward for s in proposer] == [False] * 3
    assert {s.trajectory_reward for s in proposer} == {2 / 3, 0.0}
    assert all(s.reward == s.trajectory_reward for s in proposer)


def test_three_levels_end_to_end() -> None:
    """Leaves 1 and 0 pay their plan 1; plans of 1 and 4 pay the root 2.5; each leaf by what the plan's best lacks."""
    leaves = [episode("solve", f"l{n}", "solver", reward) for n, reward in enumerate((1.0, 0.0, 4.0))]
    plans = [episode("plan", "a", "planner", -1.0, *leaves[:2]), episode("plan", "b", "planner", -1.0, *leaves[2:])]
    top = episode("root", "r", "lead", -1.0, *plans)
    rule = LevelCredit(
        rule=EpisodicCredit(),
        edges=[
            FromChildren(parent="plan", actor="planner", child="solve", child_actor="solver", by="max"),
            FromChildren(parent="root", actor="lead", child="plan", child_actor="planner"),
            Difference(parent="plan", child="solve", child_actor="solver", by="max"),
        ],
    )
    expected = {"r": 2.5, "a": 1.0, "b": 4.0, "l0": 1.0, "l1": 0.0, "l2": 4.0}
    assert {name: value for (name, _), value in rule.compute([top]).items()} == expected


def test_penalties_stay_taken() -> None:
    samples = collect_samples(proposals())
    penalize(samples, [0.25 if s.rollout_id == "p1.0" else 0.0 for s in samples])
    paid = LevelCredit(rule="episodic", edges=[SOLVED]).paid(samples)
    assert by_step(paid, [s.reward for s in paid])["p1.0", 0] == pytest.approx(1 / 6 - 0.25)


def test_through_the_arenas_own_path() -> None:
    samples = collect_samples(proposals())
    rule = LevelCredit(rule="episodic", edges=[PROPOSED])
    np.testing.assert_allclose(advantages_of(samples, rule), [2 / 3, 2 / 3, 1, 0, 1, 0], atol=1e-7)


def test_a_zero_has_the_cause_that_the_rule_names_of_paid_rewards() -> None:
    """Paid by the worst of their children both proposers earn 0, whatever the rubric gave them."""
    samples = collect_samples(proposals())
    worst = FromChildren(parent="propose", actor="proposer", child="solve", child_actor="solver", by="min")
    rule = LevelCredit(rule="hierarchy", edges=[worst])
    zeros = np.flatnonzero(rule.compute_columns(samples) == 0).tolist()
    assert [samples[row].actor for row in zeros] == ["proposer"] * 3
    assert rule.zero_causes(samples, zeros) == ["equal_rewards"] * 3

    class Plain:
        def compute_columns(self, samples: Any) -> Any:
            return np.zeros(len(samples))

    own: Any = Plain()
    assert LevelCredit(rule=own, edges=[worst]).zero_causes(samples, zeros) == ["zero_advantage"] * 3, "it says nothing"


def test_the_rules_state_is_saved() -> None:
    first, second = (LevelCredit(rule=RAECredit(decay=0.5), edges=[PROPOSED]) for _ in range(2))
    first.compute(proposals())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.state_dict() and first.compute(proposals()) == second.compute(proposals())


def branched(*, selected: int = 1) -> GenerateResult:
    """A node with three proposals: attempts 1 0, attempts 1 1 0, and a text that is no problem."""
    steps = [step("proposer", reward=r, tree_node=5, branch=b, selected=b == selected) for b, r in enumerate((4, 5, 6))]
    attempts = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (1, 0.0)]
    solved = [
        episode("solve", f"p.{n}", "solver", reward, facts=RolloutFacts(spawned_by=[5, branch]))
        for n, (branch, reward) in enumerate(attempts)
    ]
    return episode("propose", "p", "proposer", 9.0, *solved, steps=steps)


def test_a_branch_is_paid_by_the_children_that_it_spawned() -> None:
    """Means 1/2 and 2/3; the third branch keeps its 6. The own trajectory is the second branch's: 2/3 with own = 0."""
    samples = collect_samples([branched()])
    rule = LevelCredit(rule="at_grpo", options={"scale": "none"}, edges=[PROPOSED, SOLVED])
    paid = by_step(samples, [s.reward for s in rule.paid(samples)])
    proposals = {("p", 0): 1 / 2, ("p", 1): 2 / 3, ("p", 2): 6.0}
    # Without one of them: 0 or 1 of the first two attempts; 1/2, 1/2 or 1 of the others.
    attempts = {("p.0", 0): 0.5, ("p.1", 0): -0.5, ("p.2", 0): 1 / 6, ("p.3", 0): 1 / 6, ("p.4", 0): -1 / 3}
    assert paid == pytest.approx(proposals | attempts)
    advantages = by_step(samples, rule.compute_columns(samples))
    mean = sum(proposals.values()) / 3
    assert [advantages["p", n] for n in range(3)] == pytest.approx([proposals["p", n] - mean for n in range(3)])
    assert PROPOSED.pay([branched()], {("p.2", "solver"): 1.0, ("p.3", "solver"): 1.0, ("p.4", "solver"): 0.0}) == {
        ("p", "proposer"): pytest.approx(2 / 3),
        ("p", "proposer", 5, 0): 0.0,
        ("p", "proposer", 5, 1): pytest.approx(2 / 3),
    }
    penalize(samples, [0.25 if s.rollout_id == "p" and s.branch == 1 else 0.0 for s in samples])
    assert by_step(samples, [s.reward for s in rule.paid(samples)])["p", 1] == pytest.approx(2 / 3 - 0.25)


def test_unbranched_calls_are_paid_by_the_episodes_own_trajectory() -> None:
    top = branched()
    top.rollout.steps.append(step("lead", reward=1.0))
    top.rollout.rewards["lead"] = 0.0
    led = FromChildren(parent="propose", actor="lead", child="solve", child_actor="solver", by="sum")
    samples = collect_samples([top])
    assert by_step(samples, [s.reward for s in LevelCredit(rule="at_grpo", edges=[led]).paid(samples)])["p", 3] == 2.0


def test_branches_that_can_not_be_compared_and_samples_without_a_tree_are_refused(make: Any) -> None:
    rule = LevelCredit(rule="episodic", edges=[PROPOSED])
    [top, _] = proposals()
    top.rollout.steps[0].tree_node = 5
    with pytest.raises(ValueError, match=r"step 0 of rollout 'p1' is a branch that spawned no child: later actions"):
        rule.compute([top])
    [top, _] = proposals()
    top.rollout.steps[0].info["ends"] = [0, 1]
    top.rollout.meta["ends"] = [{"rewards": {"proposer": 1.0}, "dropped": None}] * 2
    with pytest.raises(ValueError, match=r"step 0 of rollout 'p1' led to several ends"):
        rule.compute([top])
    with pytest.raises(ValueError, match=r"step 0 of rollout 'a' has no tree of episodes"):
        rule.compute_columns([make("a")])
    assert (
        rule.capabilities.trees
        and not LevelCredit(rule="gigpo").capabilities.trees
        and rule.compute_columns([]).shape == (0,)
    )


def test_from_a_configuration() -> None:
    table = {"kind": "children", "parent": "propose", "actor": "proposer", "child": "solve", "child_actor": "solver"}
    options = {"rule": "dr_grpo", "options": {"singleton": "raw"}, "edges": [table, {**table, "by": "max"}]}
    config = config_from_dict({"credit": {"rule": "levels", "options": options}})
    import tomllib

    again = config_from_dict(tomllib.loads(to_toml(config)))
    assert again.credit == config.credit
    rule = registry["levels"](**again.credit.options)
    assert rule._rule == registry["dr_grpo"](singleton="raw") and rule._edges[0] == PROPOSED
    for wrong, message in (
        ({"rule": "hierachy"}, "'rule' = 'hierachy': unknown; did you mean 'hierarchy'"),
        ({"options": {"dof": 1}}, "unknown config key 'options.dof'; did you mean 'ddof'"),
        ({"rule": EpisodicCredit(), "options": {"x": 1}}, "options={'x': 1}: they are for a rule's name"),
    ):
        with pytest.raises(ValueError, match=message):
            LevelCredit(**wrong)
    with pytest.raises(TypeError, match="expected a list of edges"):
        LevelCredit(edges=table)


# ---- edges alone: values worked by hand, on trees of depth three and deeper ------------------------------------------
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
    dropped = solve("x", 5.0, facts=RolloutFacts(dropped="raised"))
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
