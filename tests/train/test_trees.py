"""``[rollout.tree]``: what becomes a tree, and what can't be."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace

import pytest

from turnwise.credit import GRPOCredit, LevelCredit, TurnReturnsCredit, VineCredit
from turnwise.settings.section import RunFacts
from turnwise.train.config.sampling import TreeConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.validate import config_from_dict, load_config
from turnwise.types import Actor


def facts_of(config, actors=(), credit=None):
    played = [Actor(name) for name in actors]
    task = SimpleNamespace(name="t", actors=played, seats=(), parts={}, credit=credit, episodes={})
    return RunFacts(config=config, task=task)


def sampler_of(config):
    return config.rollout.tree.sampler(config.rollout.branches, config.steps)


def tree_problem(credit, config):
    """The one line of the rule and the tree; empty if they fit."""
    facts = facts_of(config, credit=credit)
    lines = [*config.credit.conflicts(facts, "credit"), *config.rollout.tree.conflicts(facts, "rollout.tree")]
    assert len(lines) < 2
    return "".join(lines)


def config_of(branches=1, rule="at_grpo", **tree):
    return config_from_dict({"rollout": {"branches": branches, "tree": tree}, "credit": {"rule": rule}})


def test_every_key_reaches_the_sampler():
    assert sampler_of(config_of()) is None
    sampler = sampler_of(config_of(6, beam_width=2, score_by="value", playouts=3, branch_at=["b"]))
    assert (sampler.branches, sampler.beam_width, sampler.score_by, sampler.playouts) == (6, 2, "value", 3)
    assert list(sampler.branch_at) == ["b"]
    assert sampler_of(config_of(6, select="sample", temperature=0.5)).select.temperature == 0.5
    assert sampler_of(config_of(6, select="none")).select is None
    mixed = sampler_of(config_of(6, select="mixed", best_share=[1.0, 0.2]))
    assert [mixed.best_share_at(batch) for batch in (0, 99, 200)] == pytest.approx([1.0, 0.2, 0.2]), "100 steps"
    assert sampler_of(config_of(6, select="mixed", best_share=0.25)).best_share_at(50) == 0.25
    assert sampler_of(config_of(1, playouts=2)).playouts == 2
    assert set(TreeConfig.model_fields) == {
        "select", "best_share", "beam_width", "score_by", "temperature", "playouts", "branch_at",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_width": 2}, "'rollout.tree': needs rollout.branches > 1, or rollout.tree.playouts > 0"),
        ({"playouts": 1, "beam_width": 2}, "'rollout.tree': beam_width=2: needs branches > 1"),
        ({"branches": 4, "score_by": "value"}, "'rollout.tree': score_by='value': needs playouts > 0"),
        ({"branches": 4, "select": "none", "beam_width": 2}, "select='none' lets all branches go on"),
        ({"branches": 4, "select": "mixed", "beam_width": 2}, "'rollout.tree': select='mixed': beam_width=2 compete"),
        ({"branches": 4, "best_share": 0.2}, "'rollout.tree': best_share=0.2: has no effect"),
        ({"branches": 4, "branch_at": ["revisor"]}, "'rollout.tree.branch_at': no actor 'revisor'; .*reviser"),
    ],
)
def test_what_can_not_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        config = config_of(**settings)
        facts = facts_of(config, ["proposer", "reviser"])
        raise ConfigError("\n".join(config.rollout.tree.conflicts(facts, "rollout.tree")))


@pytest.mark.parametrize("share", [1.5, -0.1, "half", [0.5], [0.5, 2.0], [1.0, 0.5, 0.0]])
def test_a_share_is_from_0_to_1(share):
    with pytest.raises(
        ConfigError, match=r"^config key 'rollout\.tree\.best_share' = .*: .* number from 0 to 1, or a pair"
    ):
        config_of(4, select="mixed", best_share=share)


@pytest.mark.parametrize("share", [0.25, [1.0, 0.0]])
def test_a_share_goes_through_a_file_and_the_command_line(share):
    config = config_of(4, select="mixed", best_share=share)
    assert config_from_dict(tomllib.loads(to_toml(config))) == config
    given = load_config(None, {"rollout.tree.best_share": str(share)})
    assert given.rollout.tree.best_share == config.rollout.tree.best_share


def test_unknown_keys_are_refused():
    for unknown in ({"survivers": 2}, {"select": {"kind": "best"}}):
        with pytest.raises(ConfigError, match=r"rollout\.tree"):
            config_of(4, **unknown)


def test_rules_and_trees():
    assert tree_problem(GRPOCredit(), config_of(4, "grpo")) == ""
    assert "expected rollout.branches = 1, not 4, or rollout.tree.select = 'none'" in tree_problem(
        TurnReturnsCredit(), config_of(4, "turn_returns")
    )
    assert tree_problem(TurnReturnsCredit(), config_of(4, "turn_returns", select="none")) == ""
    levels = tree_problem(LevelCredit(), config_of(4, "levels", select="none"))
    assert levels.endswith("expected rollout.tree.beam_width = 1, and rollout.tree.select other than 'none'")
    assert tree_problem(LevelCredit(), config_of(4, "levels", beam_width=2)) == levels
    assert tree_problem(LevelCredit(), config_of(4, "levels")) == ""
    inner = tree_problem(LevelCredit(rule="gigpo"), config_of(4, "levels"))
    assert inner.endswith("expected rollout.branches = 1, not 4")
    assert "values of states" in tree_problem(VineCredit(), config_of(1, "vine"))
    assert tree_problem(VineCredit(), config_of(4, "vine")) == ""
    assert tree_problem(VineCredit(), config_of(1, "vine", playouts=2)) == ""
    assert "has no effect: expected credit.rule = 'vine'" in tree_problem(
        GRPOCredit(), config_of(4, "grpo", playouts=2)
    )
    assert tree_problem(GRPOCredit(), config_of(4, "grpo", playouts=2, score_by="value")) == ""
    assert tree_problem(object(), config_of(4, "mine:Rule", playouts=2)) == ""
