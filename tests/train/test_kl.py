from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch

from turnwise.train.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from turnwise.train.config.optimization import KLConfig, LossConfig, UpdateConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.learner.local import LocalLearner
from turnwise.train.model.policy import Policy
from turnwise.train.terms.kl import KLPenalty, adapted
from turnwise.train.terms.registry import teachers_replace_rewards, terms_of
from turnwise.train.update.update import update_policy
from turnwise.train.validate import load_config
from turnwise.types import Sample

from ..trained import lines_of

TARGET = KLConfig(coef=0.1, target=0.05, horizon=100)


def moved_policy(model, name="default", **options):
    """A policy that has left its reference."""
    policy = Policy(name, model, UpdateConfig(), total_steps=9, with_reference=True, **options)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return policy


def sample_of(place, prompt, completion, logprobs, **changes):
    settings = {"group_id": 0, "episode_type": "e", "actor": "solver", "turn": 0, "branch": 0, "tree_node": None}
    settings |= {"rollout_id": f"r{place}", "step_index": 0, "policy": "default", "policy_versions": [(0, 9)]}
    settings |= {"reward": 1.0, "trajectory_reward": 1.0}
    return Sample(
        **settings | changes, prompt_token_ids=prompt, completion_token_ids=completion, rollout_logprobs=logprobs
    )


@pytest.mark.parametrize(
    ("kl", "samples", "want"),
    [
        (0.05, 50, 0.1),  # on target
        (0.0525, 100, 0.1 * 1.05),  # 5 % off, a whole horizon
        (0.5, 50, 0.1 * 1.1),  # far off: 20 %, half a horizon
        (0.0, 50, 0.1 * 0.9),
        (0.0, 10**9, 0.1 * 0.8),  # never negative
        (float("nan"), 50, 0.1),
    ],
)
def test_the_coefficient_follows_the_target(kl, samples, want):
    assert adapted(0.1, kl, samples, TARGET) == pytest.approx(want)
    assert adapted(0.1, kl, samples, KLConfig(coef=0.1)) == 0.1


def test_an_update_adapts_the_coefficient_and_a_checkpoint_keeps_it(tmp_path, random_batch, small_model):
    model, _ = small_model()
    policy = moved_policy(model)
    batch, loss = random_batch(0, rows=10), LossConfig(kl=TARGET)
    first = update_policy(policy, batch, UpdateConfig(), loss, np.random.default_rng(0))
    assert first["kl"] > 0.06 and first["kl_coef"] == 0.1
    assert terms_of(policy)["kl"].coef == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    policy.skipped = 2
    path = save_checkpoint(tmp_path, 1, {"default": policy}, {})
    other = Policy("default", small_model(seed=1)[0], UpdateConfig(), total_steps=9, with_reference=True)
    load_checkpoint(path, {"default": other})
    assert (terms_of(other)["kl"].coef, other.skipped) == (terms_of(policy)["kl"].coef, 2)
    second = update_policy(other, batch, UpdateConfig(), loss, np.random.default_rng(0))
    assert second["kl_coef"] == terms_of(policy)["kl"].coef


def test_the_penalty_is_the_sum_over_the_rows_tokens(small_model):
    model, _ = small_model()
    policy = moved_policy(model)
    frozen = Policy("frozen", small_model(seed=1)[0], UpdateConfig(), total_steps=1, trainable=False)
    rng = np.random.default_rng(3)
    samples = []
    for place in range(7):
        prompt, completion = rng.integers(0, 200, 3 + place % 3).tolist(), rng.integers(0, 200, 1 + place % 4).tolist()
        changes = {"actor": ("solver", "judge")[place % 2], "temperature": (1.0, 0.5)[place % 2]}
        changes |= {"policy": "frozen"} if place == 5 else {}
        changes |= {"loss_mask": [0, 1, 1]} if place == 2 else {}
        samples.append(sample_of(place, prompt, completion, (-rng.random(len(completion))).tolist(), **changes))
    learner = LocalLearner({"default": policy, "frozen": frozen}, TrainConfig(update={"micro_batch_tokens": 12}))
    config = KLConfig(coef=0.25, apply_to="reward")
    penalty = KLPenalty(learner.policies, config, learner.reference_logprobs)
    got = penalty.penalties(samples)
    reference = copy.deepcopy(policy.reference).double()
    want, counts = [], []
    for sample in samples:
        tokens = torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]])
        logs = torch.log_softmax(reference(tokens).logits[0].double() / sample.temperature, -1)
        start = len(sample.prompt_token_ids)
        ref = [float(logs[start + i - 1, token]) for i, token in enumerate(sample.completion_token_ids)]
        mask = sample.loss_mask or [1] * len(ref)
        want.append(sum(m * (old - r) for m, old, r in zip(mask, sample.rollout_logprobs, ref, strict=True)))
        counts.append(sum(mask))
    want[5] = 0.0
    assert got == pytest.approx([0.25 * value for value in want], rel=1e-4, abs=1e-5)
    metrics = penalty.trained()
    own = [place for place in range(7) if place != 5]
    tokens = sum(counts[place] for place in own)
    assert metrics["default/kl"] == pytest.approx(sum(want) / tokens, rel=1e-4)
    assert metrics["default/kl_penalty"] == pytest.approx(0.25 * sum(want) / 6, rel=1e-4)
    solver = [place for place in own if place % 2 == 0]
    per_token = sum(want[place] for place in solver) / sum(counts[place] for place in solver)
    assert metrics["default/solver/kl"] == pytest.approx(per_token, rel=1e-4)
    assert not any(name.startswith("frozen") for name in metrics)
    assert penalty.trained() == {}


def test_in_the_reward_it_leaves_out_actors_that_learn_from_teachers_alone(small_model):
    """They have no penalty, and no metric counts them."""
    learner = LocalLearner({"default": moved_policy(small_model()[0])}, TrainConfig())
    teachers_replace_rewards(learner.policies, ["judge"])
    penalty = KLPenalty(learner.policies, KLConfig(coef=0.25, apply_to="reward"), learner.reference_logprobs)
    samples = [sample_of(place, [1, 2], [3, 4], [-1.0, -1.0], actor=("solver", "judge")[place]) for place in range(2)]
    first, second = penalty.penalties(samples)
    assert first != 0 == second
    assert penalty.trained().keys() == {f"default/{name}" for name in ("kl", "kl_coef", "kl_penalty", "solver/kl")}


def test_in_the_reward_it_reaches_credit_and_leaves_the_record_whole(make_trainer, monkeypatch):
    """A run whose sampler left the reference: credit sees the reward less the penalty, metrics the reward itself."""
    kl = {"coef": 0.5, "apply_to": "reward", "target": 1e-4, "horizon": 30}
    trainer = make_trainer("kl", steps=3, loss={"kl": kl}, with_reference=True)
    seen = []
    inner = trainer.arena.credit.compute_columns
    noting = lambda samples: [seen.append([s.reward for s in samples]), inner(samples)][1]  # noqa: E731
    monkeypatch.setattr(trainer.arena.credit, "compute_columns", noting)
    asyncio.run(trainer.run())
    lines = lines_of(trainer.config.run_dir)
    assert lines[0]["default/kl"] == pytest.approx(0, abs=1e-5) and lines[0]["default/kl_coef"] == 0.5
    assert abs(lines[2]["default/kl"]) > 1e-4 and {"default/first/kl", "default/second/kl"} <= set(lines[2])
    assert terms_of(trainer.policies["default"])["kl"].coef != lines[2]["default/kl_coef"] != 0.5
    for line, rewards in zip(lines, seen, strict=True):
        assert np.mean(rewards) == pytest.approx(line["reward"] - line["default/kl_penalty"], abs=1e-6)


def test_the_reference_is_refreshed_every_second_step(tmp_path, random_batch, small_model):
    """Steps 1 to 5: the reference has the weights of steps 0, 2, 2, 4, 4, and the KL of steps 3 and 5 starts at 0."""
    config = TrainConfig(loss={"kl": {"coef": 0.1, "refresh_every": 2}}, update={"lr": 1e-2})

    def fresh(seed):
        return Policy("default", small_model(seed=seed)[0], config.update, total_steps=9, with_reference=True)

    def weights_of(model):
        return {key: tensor.clone() for key, tensor in model.state_dict().items()}

    def equal(one, other):
        return all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())

    policy = fresh(0)
    learner, rng, versions, kls = LocalLearner({"default": policy}, config), np.random.default_rng(0), [], []
    weights = [weights_of(policy.model)]
    for step in range(1, 6):
        updated = learner.update(random_batch(step, rows=6), ["default"], {}, rng, lambda done, total: None)
        weights.append(weights_of(policy.model))
        versions.append(updated.metrics["default"]["reference_version"])
        kls.append(updated.metrics["default"]["kl"])
        assert equal(weights_of(policy.reference), weights[versions[-1]])
        assert not equal(weights[-1], weights[-2])
    assert versions == [0, 2, 2, 4, 4]
    assert kls[0] == kls[2] == kls[4] == 0 < min(kls[1], kls[3])
    # A checkpoint has the weights of the reference.
    path = learner.save(tmp_path, 5, {})
    other = fresh(1)
    LocalLearner({"default": other}, config).load(path)
    assert equal(weights_of(other.reference), weights[4]) and equal(weights_of(other.model), weights[5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.kl.refresh_every": 2}, r"'loss.kl.refresh_every': needs loss.kl.coef > 0"),
        (
            {"loss.kl.coef": 0.1, "loss.kl.refresh_every": 2, "policies": {"a": {"lora": {}}}},
            r"'loss.kl.refresh_every': the reference of the adapter 'policies.a' is its base",
        ),
        (
            {"loss.kl.coef": 0.1, "loss.kl.refresh_every": 2, "policies": {"a": {"reference": "tiny"}}},
            r"'loss.kl.refresh_every': expected no policies.a.reference",
        ),
        ({"loss.kl.refresh_every": 0}, r"'loss.kl.refresh_every' = 0"),
    ],
)
def test_what_can_not_be_refreshed_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, changes)


def test_a_learner_of_adapters_refreshes_no_reference(small_model):
    pytest.importorskip("peft")
    from peft import LoraConfig

    from turnwise.inference.weights.lora import SharedBase

    adapter = SharedBase(small_model()[0]).add_adapter("a", LoraConfig(target_modules=["q_proj"]), seed=0)
    config = TrainConfig(loss={"kl": {"coef": 0.1, "refresh_every": 2}})
    policy = Policy("a", adapter, config.update, total_steps=9, with_reference=True)
    with pytest.raises(ConfigError, match=r"'loss.kl.refresh_every' = 2: the reference of the adapter 'a' is its base"):
        LocalLearner({"a": policy}, config)
