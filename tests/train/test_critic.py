"""The critic: advantages and targets in worked numbers, what it learns, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from turnwise.train.config.optimization import CriticConfig, LossConfig, UpdateConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.learner.local import LocalLearner
from turnwise.train.model.micro_batch import micro_batches
from turnwise.train.model.policy import Policy
from turnwise.train.terms.critic import HEAD, Critic, value_head
from turnwise.train.terms.registry import teachers_replace_rewards, terms_of
from turnwise.train.update.update import update_policy
from turnwise.types import CompletionColumn, RowColumn
from turnwise.types.passes import Needs

ROWS = np.arange(3)


@pytest.fixture
def three_rows(random_batch):
    """Rows of a prompt token and two completion tokens, with rewards 1, 0, 1; the last one is of another actor."""
    return replace(
        random_batch(0, rows=3),
        targets=np.array([5, 9, 12, 6, 8, 7, 30, 31, 33]),
        cu_targets=np.array([0, 3, 6, 9]),
        target_mask=np.array([0, 1, 1] * 3, dtype=np.uint8),
        target_logprobs=np.array([0, -1, -1] * 3, dtype=np.float32),
        advantages=np.array([1, 0, 1], dtype=np.float32),
        actor_index=np.array([0, 0, 1]),
    )


@pytest.fixture
def policy(small_model):
    """A policy whose critic gives 0.5 to every state."""
    made = Policy("default", small_model()[0], UpdateConfig(), total_steps=100)
    made.add_head(HEAD, value_head(made), 0.05)
    with torch.no_grad():
        head_of(made).bias.fill_(0.5)
    return made


def head_of(policy):
    return policy.heads[HEAD].module


def estimated(policy, batch, budget, config):
    """The batch with advantages per token, the term with the targets, and its metrics."""
    term = Critic()
    term.configure(LossConfig(critic=config), batch.actors)
    return term.prepare(policy, batch, ROWS, budget), term, term.metrics({}, 3)


def test_worked_advantages(policy, three_rows):
    """The values of .5 get the mean reward, 2/3, by the bias. GAE with lambda 1/2: the last token has R - V = 1/3 or
    -2/3, the one before half of it; the targets add V."""
    config = CriticConfig(lam=0.5)
    batch, targets, metrics = estimated(policy, three_rows, 100, config)
    assert head_of(policy).bias.tolist() == pytest.approx([2 / 3])
    assert targets.old_values.tolist() == pytest.approx([0, 2 / 3, 2 / 3] * 3)
    assert targets.returns.tolist() == pytest.approx([0, 5 / 6, 1, 0, 1 / 3, 0, 0, 5 / 6, 1], abs=1e-6)
    # The first actor's 1/6, 1/3, -1/3, -2/3 have a mean of -1/8, the second one's 1/6 and 1/3 one of 1/4.
    whitened = [0, 0.63549, 0.99863, 0, -0.45392, -1.18019, 0, -0.70711, 0.70711]
    np.testing.assert_allclose(batch.columns["token_advantages"].values, whitened, atol=1e-5)
    assert batch.advantages.tolist() == [0, 0, 0] and three_rows.advantages.tolist() == [1, 0, 1]
    # A constant explains nothing.
    names = ("first/explained_variance", "second/explained_variance", "explained_variance")
    assert metrics == pytest.approx(dict.fromkeys(names, 0.0), abs=1e-9)
    # With lambda 1 each target is the reward; advantages of a teacher are added after whitening.
    taught = replace(three_rows, columns={"token_advantages": CompletionColumn(np.full(9, 2, dtype=np.float32))})
    batch, targets, _ = estimated(policy, taught, 100, CriticConfig(lam=1.0))
    assert targets.returns.tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 1]
    up, down = 2 + 0.75**0.5, 2 - 0.75**0.5  # of 1/3, 1/3, -2/3, -2/3 with variance 1 / 3
    np.testing.assert_allclose(batch.columns["token_advantages"].values, [2, up, up, 2, down, down, 2, 2, 2], atol=1e-5)


def test_the_head_learns_the_rewards_of_its_states(policy, three_rows):
    loss, update = LossConfig(critic=CriticConfig(lam=1.0)), UpdateConfig(lr=1e-9)
    explained = [
        update_policy(policy, three_rows, update, loss, np.random.default_rng(0))["explained_variance"]
        for _ in range(25)
    ]
    assert abs(explained[0]) < 1e-9 and explained[-1] > 0.8, explained
    (micro,) = micro_batches(three_rows, ROWS, 100)
    values = head_of(policy)(policy.read(micro, Needs(hidden=True)).hidden_N)[:, 0].tolist()
    assert min(values[0], values[1], values[4], values[5]) > max(values[2], values[3])


def test_a_checkpoint_has_the_head_and_its_moments(tmp_path, small_model, three_rows):
    config = TrainConfig(loss={"critic": {"lam": 1.0}}, filter={"drop_zero_advantage": False})

    def learner(seed):
        made = Policy("default", small_model(seed=seed)[0], config.update, total_steps=9)
        return made, LocalLearner({"default": made}, config)

    def step(learner):
        return learner.update(three_rows, ["default"], {}, np.random.default_rng(0), lambda done, total: None)

    (one, trains), (other, resumes) = learner(0), learner(1)
    assert step(trains).metrics["default"]["value_loss"] == pytest.approx(1 / 9, rel=1e-5)  # var(1, 0, 1) / 2
    resumes.load(trains.save(tmp_path, 1, {}))
    assert head_of(one).weight.abs().max() > 0
    step(trains), step(resumes)
    for mine, theirs in zip(head_of(one).parameters(), head_of(other).parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_update_that_fails_leaves_the_bias_as_it_was(small_model, three_rows, monkeypatch):
    def fail(*arguments, **settings):
        raise OSError("no space left")

    config = TrainConfig(loss={"critic": {}}, filter={"drop_zero_advantage": False})
    policy = Policy("default", small_model()[0], config.update, total_steps=9)
    learner = LocalLearner({"default": policy}, config)
    monkeypatch.setattr("turnwise.train.update.update.accumulate", fail)
    with pytest.raises(OSError):
        learner.update(three_rows, ["default"], {}, np.random.default_rng(0), lambda done, total: None)
    assert head_of(policy).bias.tolist() == [0] and not learner.partially_updated


@pytest.mark.parametrize(
    "loss", [LossConfig(critic=CriticConfig(lr=0.05)), LossConfig(baseline="optimal_token")], ids=["critic", "token"]
)
@pytest.mark.parametrize("taught", [["second"], ["first", "second"]], ids=["one", "all"])
def test_what_replaces_advantages_leaves_those_of_teachers_alone(policy, three_rows, loss, taught):
    """No reward pays such an actor: its tokens keep the teacher's advantages, and no value is trained on them."""
    teachers_replace_rewards({"default": policy}, taught)
    given = np.arange(9, dtype=np.float32)
    groups = RowColumn(np.zeros(3, dtype=np.int64))
    batch = replace(three_rows, columns={"token_advantages": CompletionColumn(given), "group_index": groups})
    terms = terms_of(policy).begin(loss, batch.actors)
    made = terms.prepare(policy, batch, ROWS, 100)
    of_taught = np.isin(np.repeat(batch.actor_index, 3), [batch.actors.index(name) for name in taught])
    changed = made.columns["token_advantages"].values != given
    assert not changed[of_taught].any() and changed[~of_taught].any() == (len(taught) == 1)
    if loss.critic is not None:
        assert terms["critic"].valued.numpy().tolist() == [bool(at % 3) and not of_taught[at] for at in range(9)]
        before = head_of(policy).weight.tolist()
        update_policy(policy, batch, UpdateConfig(), LossConfig(critic=loss.critic), np.random.default_rng(0))
        assert (head_of(policy).weight.tolist() == before) == (len(taught) == 2)


def test_what_can_have_no_critic_is_named(small_model):
    padded = Policy("default", small_model()[0], UpdateConfig(), total_steps=9, layout="padded")
    with pytest.raises(ValueError, match=r"'loss.critic': policy 'default' needs padded rows"):
        value_head(padded)
