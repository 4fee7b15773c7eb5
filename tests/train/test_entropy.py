"""The adaptive entropy bonus: its rule in worked numbers, the loss that it makes, its state."""

from __future__ import annotations

import math

import numpy as np
import pytest

from turnwise.train.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.policy import Policy
from turnwise.train.terms.entropy import EntropyBonus
from turnwise.train.terms.registry import terms_of
from turnwise.train.update.update import update_policy
from turnwise.train.validate import load_config


@pytest.fixture
def policy(small_model):
    return Policy("default", small_model()[0], UpdateConfig(), total_steps=9)


def test_the_coefficient_follows_the_entropy():
    """A target of 0.5 and steps of 0.01 from 0.02: below the target it rises, above it falls and is not applied."""
    config, term = LossConfig(entropy_coef=0.02, entropy_target=0.5, entropy_step=0.01), EntropyBonus()
    applied = []
    for entropy in (0.4, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.4, math.nan, 0.4):
        applied.append(term.coefficient(config))
        term.adapt(entropy, config)
    # 0.02, then 0.03, 0.04, 0.04 on the target, 0.03, 0.02, 0.01, 0, 0.01, 0.01 of an entropy that is no number, 0.02.
    assert applied == pytest.approx([0.02, 0.03, 0.04, 0.04, 0, 0, 0, 0, 0.01, 0.01])
    assert term.coefficient(config) == pytest.approx(0.02)


def test_without_a_target_the_coefficient_stays():
    config, term = LossConfig(entropy_coef=-0.02), EntropyBonus()
    term.adapt(0.1, config)
    assert term.coefficient(config) == -0.02 and term.coef is term.last is None


@pytest.mark.parametrize("target", [0.01, 100.0])
def test_an_update_applies_the_coefficient_and_a_checkpoint_keeps_it(
    tmp_path, random_batch, small_model, policy, target
):
    """The entropy is between both targets. The loss of the second step has the bonus of the adapted coefficient."""
    batch, settings = random_batch(0, rows=6), UpdateConfig(lr=1e-9)
    config = LossConfig(entropy_coef=0.02, entropy_target=target, entropy_step=0.01)
    rng = np.random.default_rng(0)
    first = update_policy(policy, batch, settings, config, rng)
    assert first["entropy_coef"] == 0.02 and 0.01 < first["entropy"] < 100
    path = save_checkpoint(tmp_path, 1, {"default": policy}, {})
    other = Policy("default", small_model(seed=1)[0], settings, total_steps=9)
    load_checkpoint(path, {"default": other})
    second = update_policy(other, batch, settings, config, rng)
    assert second["entropy_coef"] == pytest.approx(0.03 if target == 100 else 0)
    assert terms_of(other)["entropy"].coef == pytest.approx(0.04 if target == 100 else 0)
    # The steps change the weights by next to nothing, so the losses differ by the bonus.
    difference = (second["entropy_coef"] - first["entropy_coef"]) * first["entropy"]
    assert first["loss"] - second["loss"] == pytest.approx(difference, rel=1e-2)


def test_a_target_needs_a_coefficient_of_0_or_more():
    with pytest.raises(ConfigError, match=r"'loss.entropy_target': needs loss.entropy_coef >= 0"):
        load_config(None, {"loss.entropy_target": 0.5, "loss.entropy_coef": -0.1})
