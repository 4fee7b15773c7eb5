"""What all rules share; grouped rules against a float64 brute force."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.credit import ATGRPOCredit, Credit, DrMASCredit, GRPOCredit, HierarchyCredit, registry
from turnwise.samples.collect import collect_samples
from turnwise.types import CreditAssigner, GenerateResult, Rollout, Sample, Step

ROWS = st.lists(
    st.tuples(
        st.sampled_from("pq"),  # question
        st.sampled_from("abcd"),  # copy
        st.sampled_from(["solver", "verifier"]),
        st.integers(0, 2),  # turn
        st.sampled_from([None, None, 1, 2]),  # tree node
        st.sampled_from([0.0, 0.25, 1.0, 1000.0, 1000.3, -3.0]),
    ),
    min_size=1,
    max_size=24,
)
# rule, key, what counts as one value, which reward
GROUPED: dict[str, tuple[Callable[[], Credit], Any, Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOCredit, lambda s: s.group_id, lambda s: s.rollout_id, lambda s: s.reward, {}),
    "hierarchy": (
        HierarchyCredit,
        lambda s: (s.parent_rollout_id, s.group_id, s.episode_type, s.actor),
        lambda s: s.rollout_id,
        lambda s: s.trajectory_reward,
        {"ddof": 0},
    ),
    "dr_mas": (DrMASCredit, lambda s: (s.group_id, s.actor), id, lambda s: s.reward, {}),
    "at_grpo": (
        ATGRPOCredit,
        lambda s: (s.group_id, s.actor, s.turn, s.tree_node is not None and (s.rollout_id, s.tree_node)),
        id,
        lambda s: s.reward,
        {"eps": 1e-8},
    ),
}


def samples_of(make: Any, rows: list[tuple[Any, ...]]) -> list[Sample]:
    """A trajectory's reward is that of its copy, whatever its steps got; nodes below another rollout differ too."""
    return [
        make(
            f"{uid}-{name}",
            actor,
            reward,
            group_id=uid,
            turn=turn,
            tree_node=parent,
            step_index=index,
            trajectory_reward=float(ord(name)),
            parent_rollout_id=None if name < "c" else "top",
        )
        for index, (uid, name, actor, turn, parent, reward) in enumerate(rows)
    ]


@pytest.mark.parametrize("name", list(GROUPED))
@given(rows=ROWS)
def test_grouped_rules_equal_brute_force(make: Any, reference: Any, name: str, rows: list[tuple[Any, ...]]) -> None:
    rule, key, unit, value, options = GROUPED[name]
    samples = samples_of(make, rows)
    advantages = rule().compute_columns(samples)
    assert advantages.dtype == np.float32 and advantages.shape == (len(rows),)
    np.testing.assert_allclose(advantages, reference(samples, key, unit, value, **options), rtol=1e-6, atol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {"pass_at_k": {"k": 2}, "gdpo": {"rewards": {"right": 1.0}}}

FORMULA = re.compile(r"\bA(_\w+)?(\([\w, ]+\))? = \S")
SOURCE = re.compile(r"https://(arxiv\.org/abs/\d{4}\.\d{5}|doi\.org/10\.\S+)\b|turnwise's\s+own\b")


def undocumented(module_doc: str | None, class_doc: str | None) -> list[str]:
    """What the docstrings of a rule's file and class lack: the formula of its advantage, and where it is from."""
    text = f"{module_doc or ''}\n{class_doc or ''}"
    return [what for what, found in (("formula", FORMULA), ("source", SOURCE)) if not found.search(text)]


@pytest.mark.parametrize("name", list(registry))
def test_a_rule_says_its_formula_and_its_source(name: str) -> None:
    rule = registry[name]
    assert undocumented(sys.modules[rule.__module__].__doc__, rule.__doc__) == []


def test_a_rule_that_says_neither_is_found() -> None:
    assert undocumented(None, None) == ["formula", "source"]
    assert undocumented("Mine: A is what I like (https://example.org).", "Mine(*, eps: float = 1.0)") == [
        "formula",
        "source",
    ]
    assert undocumented("    A_i = R_i - mean(R)", "A rule.") == ["source"]
    assert undocumented("Someone et al., https://arxiv.org/abs/1234.56789.", None) == ["formula"]
    assert undocumented("Turnwise's own.", "``A(s, a) = r``, turnwise's own.") == []


@pytest.mark.parametrize("name", list(registry))
def test_every_rule_keeps_the_protocol(make: Any, name: str) -> None:
    rule = registry[name](**OPTIONS.get(name, {}))
    assert isinstance(rule, Credit)
    protocol: CreditAssigner = rule
    assert protocol.compute_columns([]).shape == (0,)
    assert protocol.compute([]) == {}
    rule.load_state_dict(rule.state_dict())
    with pytest.raises(ValueError, match="surprise"):
        rule.load_state_dict({"surprise": 1})
    with pytest.raises(TypeError, match="no_such_option"):
        registry[name](no_such_option=1)


def test_compute_walks_children_and_skips_failures() -> None:
    def result(name: str, reward: float, **fields: Any) -> GenerateResult:
        step = Step("solver", 0, [], "4", [1], [2], [-0.1], [(1, 0)], "stop", reward=reward)
        judge = Step(None, 0, [], "ok", [1], [2], [-0.1], [(1, 0)], "stop")
        error = fields.pop("error", None)
        return GenerateResult(Rollout(name, "solve", "q", [judge, step], error=error), group_id="q", **fields)

    parent = result("p", 9.0, is_trainable=False, children=[result("a", 1.0), result("b", 0.0)])
    advantages = DrMASCredit().compute([parent, result("x", 5.0, error="Traceback")])
    assert advantages == {("a", 1): pytest.approx(0.5**0.5, abs=1e-5), ("b", 1): pytest.approx(-(0.5**0.5), abs=1e-5)}


def test_a_group_of_one_gets_zero_and_is_not_lost(make: Any) -> None:
    samples = [make("a", reward=1.0, group_id="alone"), make("b", reward=1.0), make("c", reward=0.0)]
    for rule in (GRPOCredit, HierarchyCredit, DrMASCredit, ATGRPOCredit):
        advantages = rule().compute_columns(samples)
        assert advantages[0] == 0 and advantages[1] > 0 > advantages[2]
        assert rule(singleton="raw").compute_columns(samples)[0] == pytest.approx(1.0, abs=1e-5)
        with pytest.raises(ValueError, match="single"):
            rule(singleton="error").compute_columns(samples)


def test_a_truncated_answer_is_worth_what_a_whole_one_of_its_reward_is(make: Any) -> None:
    """0 for the cut one, as it once was by default, pays more than the whole wrong answer: policies flee there."""
    samples = [make("a", reward=1.0), make("b", reward=0.0), make("c", reward=0.0, finish_reason="length")]
    np.testing.assert_allclose(DrMASCredit().compute_columns(samples), [1.15470, -0.57735, -0.57735], atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(registry) - {"vine"}))
def test_no_rule_looks_at_how_a_call_ended(make: Any, name: str) -> None:
    def advantages(finish: str) -> list[float]:
        rule = registry[name](**OPTIONS.get(name, {}))
        samples = collect_samples(
            [
                GenerateResult(
                    Rollout(
                        id,
                        "solve",
                        "q",
                        [Step("solver", 0, [], "4", [1], [2], [-0.1], [(1, 0)], how, reward=r)],
                        metrics={"right/solver": r},
                    ),
                    group_id="q",
                )
                for id, r, how in [("a", 1.0, "stop"), ("b", 0.5, finish), ("c", 0.25, "stop"), ("d", 0.0, finish)]
            ]
        )
        return rule.compute_columns(samples).tolist()

    assert advantages("length") == advantages("stop")
    assert not hasattr(registry[name](**OPTIONS.get(name, {})), "include_truncated")


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


def test_units_of_several_calls_are_tied_by_their_means(make: Any) -> None:
    """0.1 + 0.2 is not 0.3 in binary: the mean of three equal rewards must be that reward all the same."""
    samples = [make("a", reward=0.1) for _ in range(3)] + [make("b", reward=0.1)]
    assert GRPOCredit().compute_columns(samples).tolist() == [0.0] * 4
    assert GRPOCredit().zero_causes(samples, range(4)) == ["equal_rewards"] * 4
    assert GRPOCredit(singleton="raw").zero_causes([make("a")], [0]) == ["zero_advantage"], "its reward is 0"


def test_the_samples_own_group_and_a_custom_key_go_first(make: Any) -> None:
    samples = [make("a", reward=1.0, group_id=1), make("b", reward=0.0, group_id=2), make("c", reward=4.0, group_id=2)]
    assert DrMASCredit().compute_columns(samples)[0] == 0
    assert DrMASCredit(key=lambda s: (s.actor,)).compute_columns(samples)[0] < 0
    for sample in samples[:2]:
        sample.group = ("mine",)
    advantages = DrMASCredit(key=lambda s: (s.actor,)).compute_columns(samples)
    np.testing.assert_allclose(advantages, [0.5**0.5, -(0.5**0.5), 0], atol=1e-5)


def test_options_reach_the_statistics(make: Any) -> None:
    samples = [make(name, reward=reward) for name, reward in zip("abcd", [1.0, 0.0, 1.0, 1.0], strict=True)]
    for options, expected in [
        ({}, [0.499999, -1.499997, 0.499999, 0.499999]),
        ({"scale": "none"}, [0.25, -0.75, 0.25, 0.25]),
        ({"scale": "none", "center": "leave_one_out"}, [1 / 3, -1, 1 / 3, 1 / 3]),
        ({"scale": "none", "center": "none"}, [1, 0, 1, 1]),
        ({"ddof": 0}, [0.577349, -1.732047, 0.577349, 0.577349]),
        ({"eps": 0.5}, [0.25, -0.75, 0.25, 0.25]),
        ({"min_std": 0.6}, [0, 0, 0, 0]),
    ]:
        np.testing.assert_allclose(DrMASCredit(**options).compute_columns(samples), expected, atol=1e-6)
    with pytest.raises(TypeError, match="key='uid': expected a callable"):
        DrMASCredit(key="uid")
    with pytest.raises(ValueError, match="center='median'"):
        DrMASCredit(center="median").compute_columns(samples)


def test_length_weighted_centre_takes_the_completions_lengths(make: Any) -> None:
    long, short = make("a", reward=1.0, completion_token_ids=[1, 2, 3]), make("b", reward=0.0)
    advantages = DrMASCredit(center="length_weighted", scale="none").compute_columns([long, short])
    np.testing.assert_allclose(advantages, [0.25, -0.75], atol=1e-6)


@pytest.mark.parametrize("rule", [ATGRPOCredit, DrMASCredit, GRPOCredit, HierarchyCredit])
@pytest.mark.parametrize(
    "options", [{"center": "median"}, {"scale": "mad"}, {"singleton": "drop"}, {"ddof": 2}, {"eps": -1.0}]
)
def test_a_wrong_option_shows_when_the_rule_is_made(rule: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}={next(iter(options.values()))!r}"):
        rule(**options)
