"""Values of states, by hand: in a tree, with playouts, along one trajectory, and where nothing is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import ATGRPOCredit, VineCredit
from turnwise.samples.collect import collect_samples
from turnwise.types import GenerateResult, Rollout, RolloutFacts, Step, StepFacts
from turnwise.types.facts import separate


def act(actor: str, reward: float | None, node: int | None = None, branch: int = 0, **fields: Any) -> Step:
    """One action; ``after`` are its playouts, each ``([(actor, reward), ...], {actor: outcome})``."""
    info, facts = fields.pop("info", {}), StepFacts(env_response="", error=fields.pop("error", None))
    if "after" in fields:
        info["playouts"] = [played(*one) for one in fields.pop("after")]
    defaults: dict[str, Any] = {"finish_reason": "stop", "selected": True}
    return Step(
        actor, 0, [], "", [1], [2], [-0.1], [(1, 0)], reward=reward, tree_node=node, branch=branch, info=info,
        facts=facts, **(defaults | fields),
    )  # fmt: skip


def played(rewards: Any, outcome: Any = None) -> dict[str, Any]:
    return {"rewards": [list(pair) for pair in rewards], "outcome": outcome or {}}


def advantages(steps: list[Step], rewards: dict[str, float] | None = None, meta: Any = None, **options: Any) -> list:
    facts, own = separate(RolloutFacts, meta or {})
    rollout = Rollout("r", "game", None, steps, rewards or {}, meta=own, facts=facts)
    samples = collect_samples([GenerateResult(rollout, group_id="q")])
    return VineCredit(**options).compute_columns(samples).tolist()


def test_a_tree_of_two_nodes_by_hand() -> None:
    """The first branch went on, and its state is worth the mean of (1, 4, 1); the pruned one's is taken to be the same.

    Q = (1 + 2, 3 + 2), V = 4; so the advantage is the reward less the siblings' mean.
    """
    steps = [
        act("a", 1.0, 7, 0, selected=True),
        act("a", 3.0, 7, 1, selected=False),
        act("a", 1.0, 8, 0, selected=False, from_branch=(7, 0)),
        act("a", 4.0, 8, 1, from_branch=(7, 0)),
        act("a", 1.0, 8, 2, selected=False, from_branch=(7, 0)),
    ]
    assert advantages(steps) == pytest.approx([-1.0, 1.0, -1.0, 2.0, -1.0])


def test_two_beams_tell_their_states_apart() -> None:
    """Branch 0 earns 0 and leads to (4, 2), branch 1 earns 2 and leads to (1, 1); nobody looked behind branch 2.

    V(s_0) = 3, V(s_1) = 1, V(s_2) = 2: Q = (3, 3, 1 + 2), V = 3. By its own reward branch 1 would be the best.
    """
    steps = [
        act("a", 0.0, 7, 0),
        act("a", 2.0, 7, 1, selected=False),
        act("a", 1.0, 7, 2, selected=False),
        act("a", 4.0, 8, 0, from_branch=(7, 0)),
        act("a", 2.0, 8, 1, from_branch=(7, 0), selected=False),
        act("a", 1.0, 9, 0, from_branch=(7, 1), selected=False),
        act("a", 1.0, 9, 1, from_branch=(7, 1), selected=False),
    ]
    ends = {"ends": [{"from_branch": [8, 0], "rewards": {}}, {"from_branch": [9, 0], "rewards": {}}], "own_end": 0}
    assert advantages(steps, meta=ends) == pytest.approx([0.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.0])
    # with a discount of 1/2: Q = (0 + 1.5, 2 + .5, 1 + 1), V = 2
    assert advantages(steps, meta=ends, gamma=0.5)[:3] == pytest.approx([-0.5, 0.5, 0.0])


def test_playouts_tell_what_pruned_states_were_worth() -> None:
    """Q = (1 + mean(0, 2), 0 + mean(4, 6)) = (2, 5), V = 3.5: the branch that was not selected was the better one."""
    steps = [
        act("a", 1.0, 7, 0, after=[([("a", 0.0)],), ([("a", 2.0)],)]),
        act("a", 0.0, 7, 1, selected=False, after=[([("a", 4.0)],), ([("a", 5.0), ("a", 1.0)],)]),
        act("a", 2.0, from_branch=(7, 0), after=[([],)]),
    ]
    # the second action did not branch: V before it is the mean of the playouts, 1, and it earned 2
    assert advantages(steps) == pytest.approx([-1.5, 1.5, 1.0])
    # gamma = 1/2: the second playout of branch 1 is worth 5 + 1/2, so Q = (1 + .5, (4 + 5.5) / 4)
    assert advantages(steps, gamma=0.5)[:2] == pytest.approx([(1.5 - 2.375) / 2, (2.375 - 1.5) / 2])


def test_vineppo_along_one_trajectory() -> None:
    """An outcome at the end alone, 1: V(s_0) = 1/4, V(s_1) = 3/4, V(s_2) = 1/2, then the end itself."""

    def wins(*outcomes: float) -> list:
        return [([("a", 0.0)], {"a": outcome}) for outcome in outcomes]

    steps = [
        act("a", None, after=wins(1, 1, 1, 0)),
        act("a", None, after=wins(1, 0)),
        act("a", None, after=[([], {"a": 1.0})]),
    ]
    meta = {"playouts": [played(*one) for one in wins(0, 0, 1, 0)]}
    assert advantages(steps, {"a": 1.0}, meta) == pytest.approx([0.5, -0.25, 0.5])
    assert sum(advantages(steps, {"a": 1.0}, meta)) == pytest.approx(1.0 - 0.25), "it telescopes"


def test_an_actor_is_paid_for_its_own_actions_or_for_the_teams() -> None:
    """Both proposals earn 0; the reviser makes 1 of the first (on the mean of its branches) and 3 of the second."""
    steps = [
        act("proposer", 0.0, 7, 0),
        act("proposer", 0.0, 7, 1, selected=False),
        act("reviser", 0.0, 8, 0, from_branch=(7, 0), selected=False),
        act("reviser", 2.0, 8, 1, from_branch=(7, 0)),
        act("reviser", 3.0, 9, 0, from_branch=(7, 1), selected=False),
        act("reviser", 3.0, 9, 1, from_branch=(7, 1), selected=False),
    ]
    ends = {"ends": [{"from_branch": [8, 1], "rewards": {}}, {"from_branch": [9, 0], "rewards": {}}], "own_end": 0}
    assert advantages(steps, meta=ends) == pytest.approx([0, 0, -1, 1, 0, 0])
    assert advantages(steps, meta=ends, team=True) == pytest.approx([-1, 1, -1, 1, 0, 0])
    assert advantages(steps, meta=ends, team=True, gamma=0.5)[:2] == pytest.approx([-0.5, 0.5])


def test_outcomes_count_where_the_last_action_earned_nothing_by_itself() -> None:
    """Three ways that were all played on (no selection), each with its own end: A = R_i - mean(R) at the node."""
    steps = [act("a", None, 7, branch, info={"ends": [branch]}) for branch in range(3)]
    steps += [act("b", None, from_branch=(7, branch), info={"ends": [branch]}) for branch in range(3)]
    outcomes = [1.0, 0.0, 0.5]
    ends = [{"from_branch": [7, branch], "rewards": {"a": won, "b": won}} for branch, won in enumerate(outcomes)]
    found = advantages(steps, {"a": 0.5, "b": 0.5}, {"ends": ends, "own_end": None})
    assert found == pytest.approx([0.5, -0.5, 0.0, 0.0, 0.0, 0.0])


def test_a_branch_that_ended_is_worth_its_reward_alone() -> None:
    """The solved one ended with 2; the other went on in the second beam, to 3: Q = (2, 0 + 3)."""
    steps = [
        act("a", 2.0, 7, 0),
        act("a", 0.0, 7, 1, selected=False),
        act("a", 3.0, 8, 0, from_branch=(7, 1), selected=False),
        act("a", 3.0, 8, 1, from_branch=(7, 1), selected=False),
    ]
    ends = {"ends": [{"from_branch": [7, 0], "rewards": {}}, {"from_branch": [8, 0], "rewards": {}}], "own_end": 0}
    assert advantages(steps, meta=ends) == pytest.approx([-0.5, 0.5, 0.0, 0.0])


def test_a_state_behind_which_all_was_pruned_tells_nothing() -> None:
    """Branch 1's children all lost to branch 0's: it is worth what branch 0's state is, 5, and not its children's 1."""
    steps = [
        act("a", 1.0, 7, 0),
        act("a", 1.0, 7, 1, selected=False),
        act("a", 5.0, 8, 0, from_branch=(7, 0)),
        act("a", 5.0, 8, 1, from_branch=(7, 0), selected=False),
        act("a", 2.0, 9, 0, from_branch=(7, 1), selected=False),
        act("a", 0.0, 9, 1, from_branch=(7, 1), selected=False),
    ]
    ends = {"ends": [{"from_branch": [8, 0], "rewards": {}}, {"from_branch": [8, 1], "rewards": {}}], "own_end": 0}
    assert advantages(steps, meta=ends) == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0, -1.0])


def test_the_outcome_is_for_actors_whose_last_action_earned_nothing() -> None:
    """ "a" was paid for its last action, "b" for its first alone: so only "b" is paid by the outcome, 10."""

    def steps(first: float | None, last: float | None) -> list[Step]:
        nodes = [act("b", 0.0, 7, 0), act("b", 0.0, 7, 1, selected=False, after=[([], {})])]
        return [*nodes, act("b", first, from_branch=(7, 0)), act("b", last, from_branch=(7, 0))]

    # Q = (what the way earned, 0)
    assert advantages(steps(1.0, None), {"b": 10.0})[:2] == pytest.approx([5.5, -5.5])
    assert advantages(steps(None, 1.0), {"b": 10.0})[:2] == pytest.approx([0.5, -0.5])


def test_an_action_after_which_nothing_is_known_says_nothing() -> None:
    """A beam that was lost: its last action has a value before it, and none behind."""
    steps = [
        act("a", 1.0, 7, 0, after=[([("a", 2.0)],)]),
        act("a", 1.0, 7, 1, selected=False, after=[([("a", 4.0)],)]),
        act("a", 3.0, from_branch=(7, 1), selected=False),
    ]
    ends = {"ends": [{"from_branch": [7, 0], "rewards": {}}], "own_end": 0}
    assert advantages(steps, meta=ends) == pytest.approx([-2.0, 2.0, 0.0])


def test_a_zero_names_its_cause() -> None:
    """A tied pair, an only action, and the middle one of three."""
    steps = [act("a", 1.0, 7, 0), act("a", 1.0, 7, 1, selected=False), act("a", 5.0, from_branch=(7, 0))]
    steps += [act("a", reward, 8, branch, from_branch=(7, 0)) for branch, reward in enumerate([0.0, 1.0, 2.0])]
    samples = collect_samples([GenerateResult(Rollout("r", "game", None, steps), group_id="q")])
    zeros = np.flatnonzero(VineCredit().compute_columns(samples) == 0).tolist()
    assert zeros == [0, 1, 2, 4]
    assert VineCredit().zero_causes(samples, zeros) == ["equal_rewards"] * 2 + ["alone", "zero_advantage"]
    played_from = [act("a", 0.0, 7, 0, after=[([("a", 2.0)],)]), act("a", 2.0, from_branch=(7, 0)), act("a", 0.0, 7, 1)]
    samples = collect_samples([GenerateResult(Rollout("r", "game", None, played_from), group_id="q")])
    assert VineCredit().zero_causes(samples, [1]) == ["zero_advantage"], "playouts are something to compare with"


def test_truncated_failed_and_hooks_calls() -> None:
    steps = [
        act("a", 4.0, 7, 0, finish_reason="length"),
        act("a", 1.0, 7, 1, selected=False),
        act("a", 2.0, 7, 2, selected=False),
        act("a", 99.0, 7, 3, selected=False, trainable=False, error="ModelError: down"),
    ]
    steps.append(Step("a", 0, [], "", [1], [2], [-0.1], [(1, 0)], "stop", reward=9.0, branch=1, selected=False))
    assert advantages(steps) == pytest.approx([5 / 3, -4 / 3, -1 / 3, 0.0]), "the truncated one counts like the others"


@pytest.mark.parametrize("seed", range(3))
def test_with_one_survivor_and_no_playouts_it_is_at_grpo_without_the_deviation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, from_branch = [], None
    for node in range(4):
        steps += [
            act("ab"[node % 2], float(rng.random()), node, b, selected=b == 1, from_branch=from_branch)
            for b in range(3)
        ]
        from_branch = (node, 1)
    samples = collect_samples([GenerateResult(Rollout("r", "game", None, steps), group_id="q")])
    expected = ATGRPOCredit(scale="none").compute_columns(samples)
    np.testing.assert_allclose(VineCredit().compute_columns(samples), expected, atol=1e-6, err_msg=f"seed {seed}")


def test_penalties_count_where_they_are_paid() -> None:
    rollout = Rollout("r", "game", None, [act("a", 1.0, 7, 0), act("a", 1.0, 7, 1, selected=False)])
    samples = collect_samples([GenerateResult(rollout, group_id="q")])
    samples[1].reward -= 0.5
    assert VineCredit().compute_columns(samples).tolist() == pytest.approx([0.25, -0.25])


def test_what_can_not_be_valued_is_told(make: Any) -> None:
    with pytest.raises(ValueError, match="no rollout of the batch has branches or playouts"):
        advantages([act("a", 1.0), act("a", 2.0)])
    with pytest.raises(ValueError, match="has no tree of episodes"):
        VineCredit().compute_columns([make("a", reward=1.0)])


def test_siblings_that_earn_the_same_up_to_rounding_are_equal() -> None:
    for rewards in ([0.1] * 3, [0.1 + 0.2, 0.3, 0.3]):
        steps = [act("a", reward, 7, branch, selected=branch == 0) for branch, reward in enumerate(rewards)]
        assert advantages(steps) == [0.0] * 3
