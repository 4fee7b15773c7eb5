"""The contract of all credit rules: a worked example, float64 references, the protocol, causes of zeros, options."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from turnwise.credit import (
    ATGRPOCredit,
    ConstantCredit,
    Credit,
    DrGRPOCredit,
    DrMASCredit,
    EpisodicCredit,
    GDPOCredit,
    GiGPOCredit,
    GRPOCredit,
    HierarchyCredit,
    OPOCredit,
    PassAtKCredit,
    RAECredit,
    ReinforcePPCredit,
    RLOOCredit,
    TurnReturnsCredit,
    VineCredit,
    build_rule,
    credit_columns,
    registry,
)
from turnwise.samples.collect import collect_samples
from turnwise.types import CreditAssigner, GenerateResult, Rollout, Sample, Step

OPTIONS: dict[str, dict[str, Any]] = {"pass_at_k": {"k": 2}, "gdpo": {"rewards": {"right": 1.0}}}
"""Options without which a rule can't be built, or would say nothing about few answers."""


# --- by hand ----------------------------------------------------------------------------------------------------------
S, MEAN_GAP = 0.70711, ((0.9 + 1 + 1) / 3) / 2


@pytest.mark.parametrize(
    ("rule", "advantages"),
    [
        (GRPOCredit(), [S, S, S, -S, -S]),
        (GRPOCredit(normalize=False), [MEAN_GAP] * 3 + [-MEAN_GAP] * 2),
        (DrGRPOCredit(), [MEAN_GAP] * 3 + [-MEAN_GAP] * 2),
        (RLOOCredit(), [2 * MEAN_GAP] * 3 + [-2 * MEAN_GAP] * 2),
        (DrMASCredit(), [0.48418, 0.66575, S, -1.14993, -S]),
        (DrMASCredit(scale="none"), [0.26667, 0.36667, 0.5, -0.63333, -0.5]),
        (EpisodicCredit(), [0.9, 1.0, 1.0, 0.0, 0.0]),
        (ConstantCredit(value=0.5), [0.5] * 5),
    ],
)
def test_worked_values(worked: list[Sample], rule: Any, advantages: list[float]) -> None:
    np.testing.assert_allclose(rule.compute_columns(worked), advantages, atol=1e-5)


def rows(make: Any, *attempts: tuple[str, Sequence[float]], **fields: Any) -> list[Sample]:
    """Samples of several attempts: their names, and the rewards of their calls."""
    return [
        make(name, reward=reward, turn=turn, step_index=turn, **fields)
        for name, rewards in attempts
        for turn, reward in enumerate(rewards)
    ]


def test_an_attempt_of_many_calls_moves_the_baseline_of_dr_mas_unless_attempts_count_once(make: Any) -> None:
    samples = rows(make, ("long", [0.0, 0.0]), ("short", [1.0]))
    by_call, by_attempt = (DrMASCredit(per=per, scale="none").compute_columns(samples) for per in ("call", "attempt"))
    np.testing.assert_allclose(by_call, [-1 / 3, -1 / 3, 2 / 3], atol=1e-6)
    np.testing.assert_allclose(by_attempt, [-0.5, -0.5, 0.5], atol=1e-6)


def test_opo_and_reinforce_weigh_tokens(make: Any) -> None:
    """A right answer of 3 tokens, a wrong one of 1: the baseline is 3 / 4, the standard deviation 0.4330."""
    samples = [make("a", reward=1.0, completion_token_ids=[1, 2, 3]), make("b", reward=0.0)]
    np.testing.assert_allclose(OPOCredit().compute_columns(samples), [0.25, -0.75], rtol=1e-6)
    np.testing.assert_allclose(ReinforcePPCredit().compute_columns(samples), [0.57735, -1.73205], atol=1e-5)
    samples[1].group_id = "other"
    np.testing.assert_allclose(ReinforcePPCredit().compute_columns(samples), [0.57735, -1.73205], atol=1e-5)
    assert ReinforcePPCredit(baseline=True).compute_columns(samples).tolist() == [0, 0], "each alone with its question"


def test_an_early_move_is_paid_for_what_it_made_possible(make: Any) -> None:
    """Both first moves earn nothing themselves; the one of ``a`` leads to 1, discounted to 0.5."""
    samples = rows(make, ("a", [0.0, 1.0]), ("b", [0.0, 0.0]))
    advantages = TurnReturnsCredit(gamma=0.5, scale="none").compute_columns(samples)
    np.testing.assert_allclose(advantages, [0.25, 0.5, -0.25, -0.5], rtol=1e-6)
    assert ATGRPOCredit().compute_columns(samples)[0] == 0


def test_group_in_group_by_hand(make: Any) -> None:
    """Both start in S; ``a`` goes on to X and wins, ``b`` comes back to S and loses. Returns with gamma 0.5:
    in S there are 0.5 (a), 0 and 0 (b); X was met once. Episodes: 1 and 0."""
    samples = rows(make, ("a", [0.0, 1.0]), ("b", [0.0, 0.0]))
    for sample, state in zip(samples, "SXSS", strict=True):
        sample.info = {"state": state}
    advantages = GiGPOCredit(gamma=0.5, omega=2.0, scale="none").compute_columns(samples)
    third = 0.5 / 3
    np.testing.assert_allclose(
        advantages, [0.5 + 2 * (0.5 - third), 0.5, -0.5 - 2 * third, -0.5 - 2 * third], rtol=1e-6
    )


# --- float64 references -----------------------------------------------------------------------------------------------
def grouped(
    samples: Sequence[Sample],
    key: Callable[[Sample], Hashable],
    unit: Callable[[Sample], Hashable],
    value: Callable[[Sample], float] = lambda s: s.reward,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    centre: str = "mean",
    divide: bool = True,
) -> np.ndarray:
    """``(r - centre) / scale``, group by group and unit by unit. Groups of one unit or of equal values give 0."""
    result = np.zeros(len(samples))
    for group in {key(s) for s in samples}:
        units: dict[Hashable, list[int]] = {}
        for place, s in enumerate(samples):
            if key(s) == group:
                units.setdefault(unit(s), []).append(place)
        values = np.array([np.mean([value(samples[p]) for p in places]) for places in units.values()])
        if len(values) == 1 or len(set(values)) == 1:
            continue
        lengths = [sum(len(samples[p].completion_token_ids) for p in places) for places in units.values()]
        for index, places in enumerate(units.values()):
            others = np.delete(values, index).mean()
            centres = {"mean": values.mean(), "others": others, "lengths": np.average(values, weights=lengths)}
            scale = np.std(values, ddof=ddof) + eps if divide else 1.0
            result[places] = (values[index] - centres[centre]) / scale
    return result


def returns(samples: Sequence[Sample], gamma: float) -> dict[int, float]:
    """What the actor of each sample, by its ``id``, earned from that call to the end of the rollout."""
    return {
        id(s): sum(
            gamma**place * o.reward
            for place, o in enumerate(
                sorted(
                    (o for o in samples if (o.rollout_id, o.actor) == (s.rollout_id, s.actor)),
                    key=lambda o: o.step_index,
                )[s.info["call"] :]
            )
        )
        for s in samples
    }


def gigpo(samples: Sequence[Sample]) -> np.ndarray:
    later, whole = returns(samples, 0.9), returns(samples, 1.0)
    totals = {seat(s): whole[id(s)] for s in samples if s.info["call"] == 0}
    episodes = grouped(samples, of_actor, seat, lambda s: totals[seat(s)])
    return episodes + 0.5 * grouped(samples, lambda s: (of_actor(s), s.info["state"]), id, lambda s: later[id(s)])


def pass_at_k(samples: Sequence[Sample]) -> np.ndarray:
    """All subsets of ``k`` answers, written out."""
    result, k = np.zeros(len(samples)), 2
    for question in {s.group_id for s in samples}:
        places: dict[str, list[int]] = {}
        for place, s in enumerate(samples):
            if s.group_id == question:
                places.setdefault(s.rollout_id, []).append(place)
        rewards = [float(np.mean([samples[p].reward for p in some])) for some in places.values()]
        subsets = list(combinations(range(len(rewards)), k))
        best = np.array([max(rewards[i] for i in subset) for subset in subsets])
        for index, some in enumerate(places.values()):
            if len(rewards) > k and len(set(rewards)) > 1:
                given = best[[index in subset for subset in subsets]].mean()
                result[some] = (given - best.mean()) / (best.std() + 1e-6)
    return result


def whitened(samples: Sequence[Sample], values: np.ndarray, counts: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    """Mean 0 and standard deviation 1 over each policy's part of the batch, in which row ``i`` counts ``counts[i]``."""
    result = np.zeros(len(samples))
    for policy in {s.policy for s in samples}:
        part = np.array([s.policy == policy for s in samples]) & (counts > 0)
        mean, total = np.average(values[part], weights=counts[part]), counts[part].sum()
        std = np.sqrt(counts[part] @ (values[part] - mean) ** 2 / (total - ddof))
        result[part] = (values[part] - mean) / (std + eps)
    return result


def reinforce(samples: Sequence[Sample], baseline: bool) -> np.ndarray:
    tokens = np.array([sum(s.loss_mask or []) for s in samples], dtype=float)
    means = {s.rollout_id: np.mean([o.reward for o in samples if o.rollout_id == s.rollout_id]) for s in samples}
    each = np.array([means[s.rollout_id] for s in samples])
    by_question = grouped(samples, question, attempt, divide=False)
    return whitened(samples, by_question if baseline else each, tokens, 0, 1e-8)


def gdpo(samples: Sequence[Sample], batch: str) -> np.ndarray:
    sums = np.zeros(len(samples))
    for name, weight in (("right", 2.0), ("brief", 0.5)):
        there = [i for i, s in enumerate(samples) if name in s.info["rewards"]]
        part = [samples[i] for i in there]
        sums[there] += weight * grouped(part, of_actor, seat, lambda s, name=name: s.info["rewards"][name])
    calls = [sum(seat(o) == seat(s) for o in samples) for s in samples]
    counts = [1 / n for n in calls] if batch == "attempts" else [sum(s.loss_mask or []) for s in samples]
    return whitened(samples, sums, np.array(counts, dtype=float), 1, 1e-6)


def question(s: Sample) -> Hashable:
    return s.group_id


def attempt(s: Sample) -> Hashable:
    return s.rollout_id


def of_actor(s: Sample) -> Hashable:
    return (s.group_id, s.actor)


def seat(s: Sample) -> Hashable:
    return (s.rollout_id, s.actor)


def level(s: Sample) -> Hashable:
    return (s.parent_rollout_id, s.group_id, s.episode_type, s.actor)


def siblings(s: Sample) -> Hashable:
    return (s.group_id, s.actor, s.turn, s.tree_node is not None and (s.rollout_id, s.tree_node))


def turn_returns(samples: Sequence[Sample]) -> np.ndarray:
    later = returns(samples, 0.9)
    return grouped(samples, lambda s: (of_actor(s), s.turn), id, lambda s: later[id(s)])


REWARDS = {"right": 2.0, "brief": 0.5}
# The rule, its reference, and whether it takes trees.
REFERENCES: dict[str, tuple[Callable[[], Any], Callable[[Sequence[Sample]], np.ndarray], bool]] = {
    "grpo": (GRPOCredit, partial(grouped, key=question, unit=attempt), True),
    "dr_grpo": (DrGRPOCredit, partial(grouped, key=question, unit=attempt, divide=False), True),
    "rloo": (RLOOCredit, partial(grouped, key=question, unit=attempt, divide=False, centre="others"), True),
    "opo": (OPOCredit, partial(grouped, key=question, unit=attempt, divide=False, centre="lengths"), True),
    "hierarchy": (
        HierarchyCredit,
        partial(grouped, key=level, unit=attempt, value=lambda s: s.trajectory_reward, ddof=0),
        True,
    ),
    "dr_mas": (DrMASCredit, partial(grouped, key=of_actor, unit=id), True),
    "dr_mas attempts": (partial(DrMASCredit, per="attempt"), partial(grouped, key=of_actor, unit=seat), True),
    "at_grpo": (ATGRPOCredit, partial(grouped, key=siblings, unit=id, eps=1e-8), True),
    "turn_returns": (partial(TurnReturnsCredit, gamma=0.9), turn_returns, False),
    "gigpo": (partial(GiGPOCredit, gamma=0.9, omega=0.5), gigpo, False),
    "pass_at_k": (partial(PassAtKCredit, k=2), pass_at_k, True),
    "reinforce_pp": (ReinforcePPCredit, partial(reinforce, baseline=False), True),
    "reinforce_pp baseline": (partial(ReinforcePPCredit, baseline=True), partial(reinforce, baseline=True), True),
    "gdpo": (partial(GDPOCredit, rewards=REWARDS), partial(gdpo, batch="attempts"), False),
    "gdpo tokens": (partial(GDPOCredit, rewards=REWARDS, batch="tokens"), partial(gdpo, batch="tokens"), False),
}


def batch(make: Any, seed: int, trees: bool) -> list[Sample]:
    """Three questions, four attempts each, with calls of two actors. Even seeds have ties and large rewards."""
    rng = np.random.default_rng(seed)
    samples = []
    for name in range(12):
        calls = {"solver": 0, "verifier": 0}
        whole = float(rng.choice([0.0, 0.25, 1.0, 1000.3]))
        for step in range(int(rng.integers(1, 4))):
            actor, size = str(rng.choice(["solver", "verifier"])), int(rng.integers(1, 9))
            hostile = rng.choice([0.0, 0.25, 1.0, 1000.0, 1000.3, -3.0])
            rewards = {"right": float(rng.random()), "brief": float(1000 + rng.random())}
            info = {"state": int(rng.integers(3)), "call": calls[actor], "rewards": rewards}
            if actor == "verifier":
                del rewards["brief"]
            calls[actor] += 1
            fields = {
                "group_id": f"q{name % 3}",
                "turn": step // 2,
                "tree_node": [None, 1, 2][int(rng.integers(3))] if trees else None,
                "parent_rollout_id": None if name % 2 else "top",
                "trajectory_reward": whole,
                "policy": actor,
                "completion_token_ids": [2] * size,
                "loss_mask": (rng.random(size) < 0.7).astype(int).tolist(),
                "info": info,
            }
            reward = float(1000 + rng.random() if seed % 2 else hostile)
            samples.append(make(f"t{name}", actor, reward, step_index=step, **fields))
    return samples


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", REFERENCES)
def test_it_equals_its_float64_reference(make: Any, name: str, seed: int) -> None:
    rule, reference, trees = REFERENCES[name]
    samples = batch(make, seed, trees)
    found, expected = rule().compute_columns(samples), reference(samples)
    assert found.dtype == np.float32 and found.shape == (len(samples),) and expected.any()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_every_rule_without_a_tree_or_a_state_has_a_reference() -> None:
    """The others have files of their own, or no formula: values of states, levels, baselines, and constants."""
    assert {name.split()[0] for name in REFERENCES} == set(registry) - {"vine", "levels", "rae", "constant", "episodic"}


# --- the protocol -----------------------------------------------------------------------------------------------------
FORMULA = re.compile(r"\bA(_\w+)?(\([\w, ]+\))? = \S")
SOURCE = re.compile(r"https://(arxiv\.org/abs/\d{4}\.\d{5}|doi\.org/10\.\S+)\b|turnwise's\s+own\b")


@pytest.mark.parametrize("name", registry)
def test_a_rule_says_its_formula_and_its_source(name: str) -> None:
    rule = registry[name]
    said = f"{sys.modules[rule.__module__].__doc__}\n{rule.__doc__}"
    assert FORMULA.search(said) and SOURCE.search(said)


@pytest.mark.parametrize("name", registry)
def test_every_rule_keeps_the_protocol(make: Any, name: str) -> None:
    rule = registry[name](**OPTIONS.get(name, {}))
    assert isinstance(rule, Credit)
    protocol: CreditAssigner = rule
    assert protocol.compute_columns([]).shape == (0,) and protocol.compute([]) == {}
    rule.load_state_dict(rule.state_dict())
    with pytest.raises(ValueError, match="surprise"):
        rule.load_state_dict({"surprise": 1})
    with pytest.raises(TypeError, match="no_such_option"):
        registry[name](no_such_option=1)


def results(rewards: Sequence[float], *, finish: str = "stop") -> list[GenerateResult]:
    """Attempts of one call at one question."""
    return [
        GenerateResult(
            Rollout(
                f"t{n}",
                "solve",
                "q",
                [Step("solver", 0, [], "4", [1], [2], [-0.1], [(1, 0)], finish if n % 2 else "stop", reward=reward)],
                metrics={"right/solver": reward},
            ),
            group_id="q",
        )
        for n, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize("name", sorted(set(registry) - {"vine"}))
def test_how_a_call_ended_does_not_matter_and_results_get_what_their_samples_do(name: str) -> None:
    """Were a truncated answer worth 0, it would pay more than a whole wrong one: policies flee there."""

    def rule() -> Any:
        return registry[name](**OPTIONS.get(name, {}))

    whole, cut = (results([1.0, 0.5, 0.25, 0.0], finish=finish) for finish in ("stop", "length"))
    advantages = rule().compute_columns(collect_samples(whole)).tolist()
    assert rule().compute_columns(collect_samples(cut)).tolist() == advantages
    assert rule().compute(whole) == {(f"t{n}", 0): advantage for n, advantage in enumerate(advantages)}


@pytest.mark.parametrize("name", sorted(set(registry) - {"levels", "vine"}))
def test_columns_of_another_trainer_get_what_samples_do(make: Any, name: str) -> None:
    samples = batch(make, 1, trees=False)
    options = {"rewards": {"right": 1.0, "brief": 0.5}} if name == "gdpo" else {}
    for sample in samples:  # as a trainer has them
        sample.loss_mask, sample.parent_rollout_id, sample.policy = None, None, "p"
        sample.trajectory_reward, sample.info["rewards"] = sample.reward, {"right": sample.reward, "brief": sample.turn}
    found = credit_columns(
        name,
        [s.reward for s in samples],
        questions=[s.group_id for s in samples],
        actors=[s.actor for s in samples],
        turns=[s.turn for s in samples],
        trajectories=[s.rollout_id for s in samples],
        lengths=[len(s.completion_token_ids) for s in samples],
        states=[s.info["state"] for s in samples],
        components={name: [s.info["rewards"][name] for s in samples] for name in ("right", "brief")},
        options=options,
    )
    assert np.array_equal(found, build_rule(name, options).compute_columns(samples))


# --- zeros and options ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "hierarchy", "dr_mas", "at_grpo", "turn_returns", "gigpo"]
)
def test_a_zero_names_its_cause(make: Any, name: str) -> None:
    groups = {"tied": [0.1, 0.1, 0.1], "lonely": [1.0], "close": [0.0, 0.05], "middle": [0.0, 0.5, 1.0]}
    samples = [
        make(f"{uid}{copy}", reward=reward, group_id=uid, prompt_token_ids=[1, len(uid)])
        for uid, rewards in groups.items()
        for copy, reward in enumerate(rewards)
    ]
    rule = registry[name](min_std=0.1)
    zeros = np.flatnonzero(rule.compute_columns(samples) == 0).tolist()
    causes = ["equal_rewards"] * 3 + ["alone"] + ["min_std"] * 2 + ["zero_advantage"]
    assert zeros == [0, 1, 2, 3, 4, 5, 7] and rule.zero_causes(samples, zeros) == causes
    assert rule.zero_causes(samples, []) == []


SUM32 = float(np.float32(0.7) + np.float32(0.1)), float(np.float32(0.1) + np.float32(0.7) + np.float32(2**-24))
EQUAL = {
    "two sums": ([0.1 + 0.2, 0.3] * 3, True),
    "cancelled out": ([0.1 + 0.2 - 0.3, 0.0] * 3, True),
    "large": ([10000.1 + 20000.2, 30000.3] * 3, True),
    "float32": ([*SUM32] * 3, True),
    "one step of float64 each": ([1.0, np.nextafter(1.0, 2.0), np.nextafter(1.0, 0.0)] * 2, True),
    "one in a million": ([1.0, 1.000001] * 3, False),
    "whole numbers": ([5_000_000.0, 5_000_001.0] * 3, False),
    "far from 0": ([1e9, 1e9 + 0.001] * 3, False),
    "small": ([1e-6, 2e-6] * 3, False),
}


@pytest.mark.parametrize("name", sorted(set(registry) - {"constant", "episodic", "levels", "rae", "vine"}))
@pytest.mark.parametrize("case", EQUAL)
def test_rewards_that_differ_by_rounding_are_equal(make: Any, name: str, case: str) -> None:
    rewards, equal = EQUAL[case]
    assert len(set(rewards)) > 1, "they do differ"
    samples = [
        make(str(row), reward=reward, info={"rewards": {"right": reward}, "state": 0})
        for row, reward in enumerate(rewards)
    ]
    rule = build_rule(name, OPTIONS.get(name, {}))
    advantages = rule.compute_columns(samples)
    assert (advantages == 0).all() == equal
    assert set(rule.zero_causes(samples, np.flatnonzero(advantages == 0))) == ({"equal_rewards"} if equal else set())


@pytest.mark.parametrize("rule", [ATGRPOCredit, DrMASCredit, GRPOCredit, HierarchyCredit])
@pytest.mark.parametrize(
    "options", [{"center": "median"}, {"scale": "mad"}, {"singleton": "drop"}, {"ddof": 2}, {"eps": -1.0}]
)
def test_a_wrong_option_of_groups_shows_when_the_rule_is_made(rule: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}={next(iter(options.values()))!r}"):
        rule(**options)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (ConstantCredit, {"value": float("nan")}, "value=nan"),
        (DrMASCredit, {"key": "uid"}, "key='uid': expected a callable"),
        (GDPOCredit, {"rewards": {}}, r"rewards=\{\}: expected the names of rewards with their weights"),
        (GDPOCredit, {"rewards": ["right"]}, r"rewards=\['right'\]: expected the names"),
        (GDPOCredit, {"rewards": {"right": "1"}}, r"rewards=\{'right': '1'\}"),
        (GDPOCredit, {"rewards": {"right": float("nan")}}, "rewards=.*nan"),
        (GDPOCredit, {"rewards": {"right": 1}, "batch": "rows"}, "batch='rows': expected 'attempts' or 'tokens'"),
        (GDPOCredit, {"rewards": {"right": 1}, "ddof": 2}, "ddof=2"),
        (GDPOCredit, {}, "rewards"),
        (GiGPOCredit, {"gamma": -0.1}, "gamma=-0.1"),
        (GiGPOCredit, {"omega": -1.0}, "omega=-1.0"),
        (GiGPOCredit, {"anchor": "state"}, "anchor='state': expected a callable"),
        (GRPOCredit, {"call_weight": "turn"}, "call_weight='turn': expected 'row' or 'attempt'"),
        (PassAtKCredit, {"k": 0}, "k=0"),
        (PassAtKCredit, {"k": 2.5}, "k=2.5"),
        (PassAtKCredit, {"eps": -1.0}, "eps=-1.0"),
        (DrMASCredit, {"per": "row"}, "per='row': expected 'call' or 'attempt'"),
        (RAECredit, {"decay": 1.0}, "decay=1.0"),
        (RAECredit, {"per": "game"}, r"per='game': expected one of \['batch', 'trajectory'\]"),
        (ReinforcePPCredit, {"eps": -1}, "eps=-1"),
        (TurnReturnsCredit, {"gamma": 1.5}, "gamma=1.5"),
        (TurnReturnsCredit, {"center": "median"}, "center='median'"),
        (VineCredit, {"gamma": 1.5}, "gamma=1.5"),
    ],
)
def test_a_wrong_option_is_named(rule: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rule(**options)


@pytest.mark.parametrize("name", ["at_grpo", "dr_mas"])
def test_step_rewards_that_hide_the_rubrics_are_named(make: Any, name: str) -> None:
    """A describer paid for its form alone. In a tree, or where the attempts earned the same, nothing is hidden."""
    differ, equal = [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]
    groups = [
        ("hidden", differ, {}),
        ("same", equal, {}),
        ("tree", differ, {"tree_node": 0}),
        ("rubric", differ, {"has_step_reward": False}),
    ]
    samples = [
        make(uid, reward=0.25, trajectory_reward=earned, group_id=uid, **more)
        for uid, outcomes, more in groups
        for earned in outcomes
    ]
    causes = registry[name]().zero_causes(samples, range(12))
    assert causes == ["equal_step_rewards"] * 3 + ["equal_rewards"] * 9
