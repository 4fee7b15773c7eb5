"""Sub-agents: the trajectories of one attempt count once in a group, and weigh once in the loss."""

from __future__ import annotations

import random

import numpy as np
import pytest

from turnwise.credit import (
    DrGRPOCredit,
    DrMASCredit,
    HierarchyCredit,
    OPOCredit,
    PassAtKCredit,
    RAECredit,
    ReinforcePPCredit,
    RLOOCredit,
)
from turnwise.credit.base import ALONE, EQUAL
from turnwise.credit.grouping import attempt_advantage, grouped_advantage
from turnwise.samples.collect import collect_samples
from turnwise.samples.training_samples import advantages_of
from turnwise.types import CHILD, GenerateResult, Rollout, Step

MODES = [
    (center, scale)
    for center in ("mean", "leave_one_out", "length_weighted", "none")
    for scale in ("std", "mean", "none")
    if (center, scale) != ("none", "mean")
]
OPTIONS = {"ddof": 1, "eps": 0.0, "singleton": "zero", "min_std": 0.0}


def step(actor="worker", tokens=1, **info):
    ids = list(range(tokens))
    return Step(actor, 0, [], "", [1], ids, [-0.1] * tokens, [(tokens, 0)], "stop", info=info)


def attempt(name, reward, *children, actor="worker"):
    """An attempt at question q whose children each have a number of calls, a reward, and where it is from."""
    below = []
    for order, (calls, own) in enumerate(children):
        meta = {"actor": actor, "attempt": name, "parent": name, "order": order, "inherits": own is None}
        rollout = Rollout(f"{name}.{order}", "e/child", None, [step(actor) for _ in range(calls)], meta={CHILD: meta})
        rollout.rewards = {actor: reward if own is None else own}
        below.append(GenerateResult(rollout, group_id="q/child"))
    top = Rollout(name, "e", None, [step("boss")], {"boss": reward, actor: reward})
    return GenerateResult(top, below, group_id="q")


def found(rule, *attempts):
    """Return the advantages of the children's calls, as they train, by attempt."""
    samples = collect_samples(attempts)
    advantages = advantages_of(samples, rule, attempts).tolist()
    rows = {}
    for sample, advantage in zip(samples, advantages, strict=True):
        if sample.attempt_id is not None:
            rows.setdefault(sample.attempt_id, []).append(advantage)
    return [rows[top.rollout.id] for top in attempts if top.rollout.id in rows]


INHERITED = attempt("a", 1.0, (2, None), (1, None), (1, None)), attempt("b", 0.0, (1, None))
"""Three children and one: values 1 and 0, one of each."""
OWN = attempt("a", 1.0, (1, 1.0), (1, 0.0)), attempt("b", 0.0, (1, 0.25))
"""Two children of mean .5 and one of .25, so the mean is .375 and the variance
((.625^2 + .375^2) / 2 + .125^2) / (2 - 1) = .28125."""
HALF = 0.5**0.5


@pytest.mark.parametrize(
    ("rule", "attempts", "expected"),
    [
        # Mean 1/2, deviation sqrt(1/2); each of the three weighs a third.
        (HierarchyCredit(ddof=1, eps=0.0), INHERITED, [[HALF / 3] * 4, [-HALF]]),
        # The first child's two calls share its weight.
        (
            HierarchyCredit(ddof=1, eps=0.0, call_weight="attempt"),
            INHERITED,
            [[HALF / 6, HALF / 6, HALF / 3, HALF / 3], [-HALF]],
        ),
        (RLOOCredit(), INHERITED, [[1 / 3] * 4, [-1.0]]),
        (DrGRPOCredit(), INHERITED, [[1 / 6] * 4, [-1 / 2]]),
        # The first attempt's four rows count a quarter each, and so it counts once.
        (DrMASCredit(eps=0.0), INHERITED, [[HALF / 3] * 4, [-HALF]]),
        (HierarchyCredit(ddof=1, eps=0.0), OWN, [[1.178511 / 2, -0.707107 / 2], [-0.235702]]),
        (DrGRPOCredit(), OWN, [[0.625 / 2, -0.375 / 2], [-0.125]]),
        # Each leaves out its whole attempt: 1 - .25, 0 - .25 and .25 - .5.
        (RLOOCredit(), OWN, [[0.75 / 2, -0.25 / 2], [-0.25]]),
        (OPOCredit(), OWN, [[0.625 / 2, -0.375 / 2], [-0.125]]),
        # Over 0.9 * 0 + 0.1 * mean of the attempts' means, which later batches see.
        (RAECredit(decay=0.9), OWN, [[1.0 / 2, 0.0], [0.25]]),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "compute") else None,
)
def test_children_of_an_attempt_count_once_and_weigh_once(rule, attempts, expected):
    rows = found(rule, *attempts)
    assert rows == [pytest.approx(row, abs=1e-6) for row in expected]


def test_baseline_of_rae_moves_by_the_mean_over_attempts():
    rule = RAECredit(decay=0.9)
    found(rule, *OWN)
    assert rule.baseline("e/child", "worker") == pytest.approx(0.1 * 0.375)


def test_attempts_of_equal_children_are_one_answer_of_pass_at_k():
    """Of three attempts with rewards 1, 0 and 0, two with several children: as three answers without children."""
    attempts = (
        attempt("a", 1.0, (1, None), (1, None)),
        attempt("b", 0.0, (1, None), (2, None)),
        attempt("c", 0.0, (1, None)),
    )
    alone = attempt("d", 1.0, (1, None)), attempt("e", 0.0, (1, None)), attempt("f", 0.0, (1, None))
    rows, plain = found(PassAtKCredit(k=2), *attempts), found(PassAtKCredit(k=2), *alone)
    assert [sum(row) for row in rows[:1]] == pytest.approx([plain[0][0]], abs=1e-6)
    assert rows[1][0] == pytest.approx(plain[1][0] / 2, abs=1e-6)


def test_reinforce_pp_counts_tokens_by_weight():
    """Rewards 1 and 0 with weight 1/2 each, and .25: mean .375 over 2, variance as above over 2 = .140625."""
    rows = found(ReinforcePPCredit(eps=0.0), *(replaced(top) for top in OWN))
    std = ((0.625**2 + 0.375**2) / 2 + 0.125**2) ** 0.5 / 2**0.5
    assert rows == [
        pytest.approx([0.625 / std / 2, -0.375 / std / 2], abs=1e-6),
        pytest.approx([-0.125 / std], abs=1e-6),
    ]


def replaced(top):
    """Return the attempt without its own calls."""
    return GenerateResult(Rollout(top.rollout.id, "e", None), top.children, group_id=top.group_id)


def test_attempt_that_is_alone_compares_its_children_with_none():
    top = attempt("a", 1.0, (1, 1.0), (1, 0.0))
    rule, samples = HierarchyCredit(), collect_samples([top])
    assert found(rule, top) == [[0.0, 0.0]]
    assert set(rule.zero_causes(samples, range(len(samples)))) == {ALONE}


def test_equal_rewards_are_the_cause_of_zeros():
    tops = attempt("a", 1.0, (1, None), (1, None)), attempt("b", 1.0, (1, None))
    rule, samples = HierarchyCredit(), collect_samples(tops)
    assert found(rule, *tops) == [[0.0, 0.0], [0.0]]
    assert set(rule.zero_causes(samples, range(len(samples)))) == {EQUAL}


def test_children_that_do_not_train_have_no_share():
    """One of three failed, and one has no call that trains: the third weighs as much as its whole attempt."""
    top, other = attempt("a", 1.0, (1, None), (1, None), (1, None)), attempt("b", 0.0, (1, None))
    top.children[0].rollout.error = "failed"
    top.children[1].rollout.steps[0].trainable = False
    assert found(HierarchyCredit(ddof=1, eps=0.0), top, other) == [pytest.approx([HALF]), pytest.approx([-HALF])]


def test_actors_are_weighed_apart():
    """Two children of each of two actors: each actor's weigh as one."""
    tops = []
    for name, reward in (("a", 1.0), ("b", 0.0)):
        top, also = (
            attempt(name, reward, (1, None), (1, None)),
            attempt(name, reward, (1, None), (1, None), actor="critic"),
        )
        for child in also.children:
            child.rollout.id += "c"
        tops.append(GenerateResult(top.rollout, [*top.children, *also.children], group_id="q"))
    assert found(HierarchyCredit(ddof=1, eps=0.0), *tops) == [
        pytest.approx([HALF / 2] * 4),
        pytest.approx([-HALF / 2] * 4),
    ]


@pytest.mark.parametrize(("center", "scale"), MODES)
def test_equal_units_of_an_attempt_are_one_unit(center, scale):
    """Where all units of an attempt have its value, the advantages are those of one unit for each attempt."""
    draw = random.Random(7)
    attempts = [index for index in range(12) for _ in range(draw.randint(1, 5))]
    of_attempt = [draw.random() for _ in range(12)]
    lengths = np.ones(len(attempts)) / np.bincount(attempts)[attempts]
    values = np.array([of_attempt[index] for index in attempts])
    groups = [index % 3 for index in attempts]
    options = {**OPTIONS, "center": center, "scale": scale}
    given = attempt_advantage(values, groups, attempts, lengths=np.ones(len(attempts)), **options)
    expected = grouped_advantage(values, groups, units=attempts, lengths=lengths, **options)
    np.testing.assert_allclose(given, expected, atol=1e-12)


@pytest.mark.parametrize(("center", "scale"), MODES)
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_attempts_of_one_unit_are_grouped_as_ever(center, scale, singleton):
    draw = np.random.default_rng(3)
    values, groups = draw.random(40).round(1), [*draw.integers(0, 6, 39).tolist(), 99]
    options = {**OPTIONS, "center": center, "scale": scale, "singleton": singleton, "min_std": 0.2, "eps": 1e-6}
    lengths = draw.integers(1, 9, 40).astype(float)
    given = attempt_advantage(values, groups, range(40), lengths=lengths, **options)
    np.testing.assert_allclose(given, grouped_advantage(values, groups, lengths=lengths, **options), atol=1e-12)


def test_what_a_group_of_one_attempt_raises():
    options = {**OPTIONS, "center": "mean", "scale": "std", "singleton": "error"}
    with pytest.raises(ValueError, match="group 'q' has a single member"):
        attempt_advantage(np.array([1.0, 0.0]), ["q", "q"], ["a", "a"], **options)
