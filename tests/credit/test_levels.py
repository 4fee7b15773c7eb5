"""Rules over paid rewards: what reaches the samples, by hand, with any rule behind it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from turnwise.credit import Difference, EpisodicCredit, FromChildren, HierarchyCredit, LevelCredit, RAECredit, registry
from turnwise.samples import pack as rows
from turnwise.samples.collect import collect_samples
from turnwise.train.config.toml import to_toml
from turnwise.train.validate import config_from_dict
from turnwise.types import GenerateResult, Rollout, Step

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


def by_place(samples: list[Any], values: Any) -> dict[tuple[str, int], float]:
    return {(s.rollout_id, s.step_index): float(v) for s, v in zip(samples, values, strict=True)}


def test_rewards_are_paid_and_then_compared() -> None:
    """Means 2/3 and 0; attempts are paid 1/6 -1/3 1/6. GRPO by level with ddof 0: +-1, and sqrt(1/2) -sqrt(2)."""
    samples = collect_samples(proposals())
    rule = LevelCredit(rule=HierarchyCredit(), edges=[PROPOSED, SOLVED])
    paid = by_place(samples, [s.reward for s in rule.paid(samples)])
    assert paid == pytest.approx(
        {("p1", 0): 2 / 3, ("p1", 1): 2 / 3, ("p1.0", 0): 1 / 6, ("p1.1", 0): -1 / 3, ("p1.2", 0): 1 / 6, ("p2", 0): 0}
    )
    advantages = by_place(samples, rule.compute_columns(samples))
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
    rows.penalize(samples, [0.25 if s.rollout_id == "p1.0" else 0.0 for s in samples])
    paid = LevelCredit(rule="episodic", edges=[SOLVED]).paid(samples)
    assert by_place(paid, [s.reward for s in paid])["p1.0", 0] == pytest.approx(1 / 6 - 0.25)


def test_through_the_arenas_own_path() -> None:
    samples = collect_samples(proposals())
    rule = LevelCredit(rule="episodic", edges=[PROPOSED])
    np.testing.assert_allclose(rows.advantages_of(samples, rule), [2 / 3, 2 / 3, 1, 0, 1, 0], atol=1e-7)


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
        episode("solve", f"p.{n}", "solver", reward, meta={"spawned_by": [5, branch]})
        for n, (branch, reward) in enumerate(attempts)
    ]
    return episode("propose", "p", "proposer", 9.0, *solved, steps=steps)


def test_a_branch_is_paid_by_the_children_that_it_spawned() -> None:
    """Means 1/2 and 2/3; the third branch keeps its 6. The own trajectory is the second branch's: 2/3 with own = 0."""
    samples = collect_samples([branched()])
    rule = LevelCredit(rule="at_grpo", options={"scale": "none"}, edges=[PROPOSED, SOLVED])
    paid = by_place(samples, [s.reward for s in rule.paid(samples)])
    proposals = {("p", 0): 1 / 2, ("p", 1): 2 / 3, ("p", 2): 6.0}
    # Without one of them: 0 or 1 of the first two attempts; 1/2, 1/2 or 1 of the others.
    attempts = {("p.0", 0): 0.5, ("p.1", 0): -0.5, ("p.2", 0): 1 / 6, ("p.3", 0): 1 / 6, ("p.4", 0): -1 / 3}
    assert paid == pytest.approx(proposals | attempts)
    advantages = by_place(samples, rule.compute_columns(samples))
    mean = sum(proposals.values()) / 3
    assert [advantages["p", n] for n in range(3)] == pytest.approx([proposals["p", n] - mean for n in range(3)])
    assert PROPOSED.pay([branched()], {("p.2", "solver"): 1.0, ("p.3", "solver"): 1.0, ("p.4", "solver"): 0.0}) == {
        ("p", "proposer"): pytest.approx(2 / 3),
        ("p", "proposer", 5, 0): 0.0,
        ("p", "proposer", 5, 1): pytest.approx(2 / 3),
    }
    rows.penalize(samples, [0.25 if s.rollout_id == "p" and s.branch == 1 else 0.0 for s in samples])
    assert by_place(samples, [s.reward for s in rule.paid(samples)])["p", 1] == pytest.approx(2 / 3 - 0.25)


def test_unbranched_calls_are_paid_by_the_episodes_own_trajectory() -> None:
    top = branched()
    top.rollout.steps.append(step("lead", reward=1.0))
    top.rollout.rewards["lead"] = 0.0
    led = FromChildren(parent="propose", actor="lead", child="solve", child_actor="solver", by="sum")
    samples = collect_samples([top])
    assert by_place(samples, [s.reward for s in LevelCredit(rule="at_grpo", edges=[led]).paid(samples)])["p", 3] == 2.0


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
    with pytest.raises(ValueError, match=r"step 0 of rollout 'a' tells no tree of episodes"):
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
