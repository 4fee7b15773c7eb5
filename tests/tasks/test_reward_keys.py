"""``[reward]`` of a config: what each task serves, what it refuses and why, and that its values reach the rewards."""

from __future__ import annotations

import pytest

from turnwise.arena import RewardMix, TreeSampler
from turnwise.arena.stages.registry import STAGES, classes
from turnwise.run.build import arena_for_client
from turnwise.run.checks import dry_run, resolve_config, task_of
from turnwise.run.parts import FactsOfTask
from turnwise.settings.section import RunFacts
from turnwise.tasks import TASKS, build_task
from turnwise.tasks.math_orchestra import SOLVER, VERIFIER
from turnwise.tasks.search_orchestra import SearchOrchestraTask
from turnwise.tasks.search_orchestra.prompts import ANSWERER, SEARCHER
from turnwise.tasks.search_orchestra.prompts import VERIFIER as ROUTER
from turnwise.train.config.rewards import RewardConfig
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.validate import config_from_dict, load_config

VALUES = {
    "alpha": 0.5,
    "mode": "convex",
    "difference": 1.0,
    "threshold": 0.5,
    "turn_shaping": "ramp",
    "gamma": 0.5,
    "invalid_cost": 0.5,
}
GAMES = {"alpha", "mode", "difference", "invalid_cost"}
REFUSED = {
    "gsm8k": {"alpha", "mode", "difference", "turn_shaping", "gamma"},
    "kuhn_poker": GAMES,
    "lookup": {"alpha", "mode", "difference", "turn_shaping", "gamma"},
    "negotiation": GAMES,
    "proposer_solver": {"alpha", "mode", "difference"},
    "tic_tac_toe": GAMES,
}


def config_of(task, questions="", **settings):
    options = {"path": questions} if task in ("gsm8k", "math_orchestra") else {}
    return config_from_dict({"task": task, "task_options": options, "eval": {"num_prompts": 2}, **settings})


def problems_of(config):
    problems = Problems()
    resolve_config(config, task_of(config), problems)
    return problems.lines


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_serves_a_key_or_refuses_it_with_the_reason(task, questions):
    refused, built = set(), task_of(config_of(task, questions))
    for key, value in VALUES.items():
        reward = {"turn_shaping": "discount", key: value} if key == "gamma" else {key: value}
        facts = FactsOfTask(config_of(task, questions, credit={"rule": "grpo"}), built, built.actors)
        run = RunFacts(config=config_of(task, questions, reward=reward, credit={"rule": "grpo"}), task=facts)
        lines = list(run.config.reward.conflicts(run, "reward"))
        if any(line.startswith(f"config key 'reward.{key}' = {value!r}: episode '") for line in lines):
            refused.add(key)
        else:
            assert not lines
    assert refused == REFUSED.get(task, set())


def test_the_keys_are_those_of_the_mix():
    assert set(VALUES) == set(RewardMix.__dataclass_fields__)
    sections = [kind.settings["reward"] for kind in classes(STAGES) if "reward" in kind.settings]
    added = {key for section in sections for key in section.model_fields}
    assert set(RewardConfig.model_fields) == {*VALUES, *added} and {"overlong_buffer", "overlong_penalty"} <= added
    assert RewardConfig().of_mix() == {} and RewardConfig(**VALUES).of_mix() == VALUES


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("sudoku", {"reward": {"mode": "convex", "alpha": 2.0}}, r"section 'reward': alpha=2.0: .* \[0, 1\]"),
        ("sudoku", {"reward": {"turn_shaping": "discount"}}, "section 'reward': gamma=None: expected a number"),
        ("sudoku", {"reward": {"gamma": 0.5}}, "section 'reward': gamma=0.5: has no effect"),
        ("kuhn_poker", {"reward": {"turn_shaping": "ramp"}}, "'reward.turn_shaping' = 'ramp': the rule 'rae' does not"),
        ("kuhn_poker", {"reward": {"invalid_cost": 2.0}}, "expected task_options.invalid_cost"),
        ("proposer_solver", {"reward": {"alpha": 0.5}}, "expected task_options.curve"),
    ],
)
def test_contradictions_name_the_key(task, settings, message):
    [line] = problems_of(config_of(task, **settings))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(line)


@pytest.mark.parametrize("rule", ["rae", "hierarchy", "episodic", "levels", "turn_returns", "gigpo"])
def test_rules_that_compare_no_single_calls_refuse_turn_shaping(rule):
    config = config_of("sudoku", reward={"turn_shaping": "ramp"}, credit={"rule": rule})
    assert "'reward.turn_shaping' = 'ramp'" in problems_of(config)[0]


def test_the_command_line_and_a_dry_run_tell_the_mix():
    given = {"reward.alpha": "0.4", "reward.turn_shaping": "ramp", "eval.num_prompts": "2", "rollout.branches": "2"}
    config = load_config(None, given)
    told = dry_run(config)
    assert "# rewards of episode 'sudoku': alpha = 0.4, mode = 'weighted_sum', difference = 0.0" in told
    assert "invalid_cost = 0.25" in told and "[reward]\nalpha = 0.4\nturn_shaping" in told
    with pytest.raises(ConfigError, match=r"'reward\.alpha' = '-1'|'reward\.alpha' = -1"):
        load_config(None, {"reward.alpha": "-1"})


def test_the_values_reach_the_arena(table):
    task = build_task("sudoku")
    client = table(task, []).arena.client
    config = config_of("sudoku", reward={"alpha": 0.4, "difference": 2.0}, credit={"rule": "at_grpo"})
    arena = arena_for_client(client, config, task, task.actors, client.tokenizer, None)
    assert arena.mix_of("sudoku") == RewardMix(alpha=0.4, difference=2.0, invalid_cost=0.25)


# --- differences by hand ----------------------------------------------------------------------------------------------
def differences(result):
    assert result.rollout.error is None, result.rollout.error
    return [(step.actor_id, pytest.approx(step.facts.team_difference)) for step in result.rollout.steps]


async def test_in_a_tree_the_orchestra_mixes_actions(table, questions):
    """A wrong answer that the verifier rejects: outcome 0; the verifier's own part is 1. Only alpha changes the mix."""
    task = build_task("math_orchestra", {"path": questions, "max_loops": 1})
    for alpha, expected in ((None, [0.0, 1.0]), (0.25, [0.0, 0.75])):
        reward = {} if alpha is None else {"alpha": alpha}
        lines = ["#### 5", "#### 5", "verdict: reject", "verdict: reject"]
        result = await table(task, lines, tree=TreeSampler(2), reward=reward).one({"question": "2 + 2", "answer": "4"})
        assert [step.reward for step in result.rollout.steps if step.selected] == expected
        assert result.rollout.rewards == {SOLVER: 0.0, VERIFIER: 0.0}, "the outcome"


async def test_a_search_gains_the_pages_that_it_finds(table):
    task = SearchOrchestraTask()
    request = next(one for one in task.requests(1, 40, 1) if len(one.artifact["supports"]) == 2)
    oracle = task.oracle()
    seat = table(task, oracle, reward={"difference": 1.0})
    result = await seat.one(request.artifact)
    assert [one for one in differences(result) if one[0] != ROUTER] == [(SEARCHER, 0.5), (SEARCHER, 0.5), (ANSWERER, 0)]
    wrong = table(task, lambda actor, chat: "?" if actor == ANSWERER else oracle(actor, chat), reward={"difference": 1})
    assert differences(await wrong.one(request.artifact))[-1] == (ANSWERER, -1.0)
