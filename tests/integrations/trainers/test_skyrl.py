"""SkyRL's registries call turnwise's rules and losses, and get what SkyRL's own functions give."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import torch

from turnwise import ops
from turnwise.credit import RAECredit, credit_columns
from turnwise.integrations.trainers import skyrl as adapter

LOSSES = ["regular", "dual_clip", "gspo", "cispo", "sapo"]
CORRECTIONS = {
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.5},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2},
    "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1},
    "product": {"tis_ratio_type": "token", "sequence_mask_metric": "product", "product_mask_low": 0.5},
    "outlier": {"outlier_token_is_threshold_low": 0.3, "outlier_token_is_threshold_high": 2.5},
    "token_mask": {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
}


pytestmark = pytest.mark.usefixtures("own_names")

OTHERS = {
    "eps_clip_low": 0.1,
    "eps_clip_high": 0.3,
    "clip_ratio_c": 1.7,
    "cispo.cispo_eps_clip_low": 0.4,
    "cispo.cispo_eps_clip_high": 0.6,
    "sapo.tau_pos": 2.0,
    "sapo.tau_neg": 3.0,
}
SETTINGS = {"defaults": {}, "others": OTHERS} | {
    name: {f"off_policy_correction.{key}": value for key, value in settings.items()}
    for name, settings in CORRECTIONS.items()
}


def rewards_of(scores, mask):
    """Token rewards as SkyRL makes them: a row's reward is on its last token."""
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(mask)), mask.sum(dim=1).long() - 1] = torch.tensor(scores)
    return rewards


def ragged(generator, rows, tokens=9):
    lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
    return (torch.arange(tokens) < lengths[:, None]).long()


def compute(skyrl, name, scores, mask, uids, config=None):
    """Ask as SkyRL's trainer does, with the defaults of its configuration."""
    config = config or skyrl.AlgorithmConfig()
    return skyrl.compute_advantages_and_returns(
        token_level_rewards=rewards_of(scores, mask),
        response_mask=mask,
        index=uids,
        adv_estimator=name,
        config=config,
        grpo_norm_by_std=config.grpo_norm_by_std,
        gamma=config.gamma,
        lambd=config.lambd,
    )


def test_two_agents_of_one_question(skyrl):
    """Rewards (1, 0), (0, 1), (1, 1), (0, 0) of solver and verifier: each agent has its own mean and deviation."""
    name = adapter.register_credit("dr_mas")
    assert name == "turnwise_dr_mas"
    uids = [adapter.make_uid("7", agent) for agent in ("solver", "verifier") for _ in range(4)]
    mask = torch.tensor([[1, 1, 0]] * 8)
    advantages, returns = compute(skyrl, name, [1.0, 0, 1, 0, 0, 1, 1, 0], mask, uids)
    right = 0.5 / (1 / 3) ** 0.5
    expected = right * torch.tensor([1.0, -1, 1, -1, -1, 1, 1, -1])[:, None] * mask
    torch.testing.assert_close(advantages, expected, atol=2e-6, rtol=0)
    assert returns is advantages and advantages.dtype == torch.float32


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rule", "by_std"), [("grpo", True), ("dr_grpo", False)])
def test_grpo_is_skyrls_own(skyrl, rule, by_std, seed):
    """SkyRL leaves the reward of a group of one as it is: ``singleton="raw"``."""
    generator = torch.Generator().manual_seed(seed)
    mask = ragged(generator, 13)
    uids = ["a"] * 4 + ["b"] * 5 + ["alone"] + ["c"] * 3
    scores = torch.randn(13, generator=generator).tolist()
    config = skyrl.AlgorithmConfig(grpo_norm_by_std=by_std)
    own, _ = compute(skyrl, "grpo", scores, mask, uids, config)
    ours, _ = compute(skyrl, adapter.register_credit(rule, singleton="raw"), scores, mask, uids, config)
    torch.testing.assert_close(ours, own, atol=1e-6, rtol=1e-6, msg=lambda text: f"seed {seed}: {text}")
    assert own.abs().sum() > 1


def test_agent_and_turn_reach_the_rule(skyrl):
    """A question may look like a path or hold another ``#``; AT-GRPO compares the same call of the same agent."""
    turns = [0, 0, 1, 1, 0, 0]
    agents = ["solver"] * 4 + ["verifier"] * 2
    question = "data/x#agent=y"
    uids = [adapter.make_uid(question, agent, turn) for agent, turn in zip(agents, turns, strict=True)]
    scores = [1.0, 0.0, 5.0, 3.0, 0.5, 0.1]
    ours, _ = compute(skyrl, adapter.register_credit("at_grpo"), scores, torch.ones(6, 2).long(), uids)
    expected = credit_columns("at_grpo", scores, questions=[question] * 6, actors=agents, turns=turns)
    np.testing.assert_allclose(ours[:, 1], expected, atol=1e-6)
    with pytest.raises(ValueError, match="agent='a#b': expected a name without '#'"):
        adapter.make_uid("7", "a#b")


def test_lengths_reach_the_rule(skyrl):
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    ours, _ = compute(skyrl, adapter.register_credit("opo"), [1.0, 0.0, 0.0], mask, ["a"] * 3)
    np.testing.assert_allclose(ours[:, 0], [1 - 4 / 7, -4 / 7, -4 / 7], atol=1e-6)


def test_padding_counts_nowhere_and_baselines_last(skyrl):
    """SkyRL's own padding repeats row 0 under the uids pad0, pad1, ...; the baseline must not see it."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch

    mask = torch.ones(2, 2).long()
    batch = TrainingInputBatch({"rewards": rewards_of([1.0, 0.0], mask), "response_mask": mask, "loss_mask": mask})
    batch.metadata = {"uids": ["a", "b"]}
    padded = pad_training_input_batch(batch, 3)
    assert len(padded["rewards"]) == len(padded.metadata["uids"]) == 5

    rule = RAECredit(decay=0.5)
    estimate = skyrl.AdvantageEstimatorRegistry.get(adapter.register_credit(rule, "mine"))
    for expected in ([1.0, 0.0], [0.75, -0.25]):  # the mean, 0.5, moved the baseline by half
        advantages, _ = estimate(padded["rewards"], padded["response_mask"], padded.metadata["uids"])
        np.testing.assert_allclose(advantages[:, 0], [*expected, 0, 0, 0], atol=1e-6)
    assert rule.baseline("episode", "agent") == pytest.approx(0.375)


def generated(questions, attempts, script):
    """A generator's step-wise output: for each attempt the calls of ``script``, as ``(agent, turn, reward)``."""
    from skyrl.train.generators.base import TrajectoryID

    rows = [
        (question, attempt, agent, turn, reward)
        for question in questions
        for attempt in range(attempts)
        for agent, turn, reward in script(question, attempt)
    ]
    lengths = [1 + row % 3 for row in range(len(rows))]
    ids = [
        TrajectoryID(instance_id=adapter.make_uid(question, agent, turn), repetition_id=attempt)
        for question, attempt, agent, turn, _ in rows
    ]
    output = {
        "prompt_token_ids": [[1, 2]] * len(rows),
        "response_ids": [[3] * length for length in lengths],
        "loss_masks": [[1] * length for length in lengths],
        "rewards": [float(reward) for *_, reward in rows],
        "rollout_logprobs": None,
        "stop_reasons": None,
        "trajectory_ids": ids,
        "is_last_step": [True] * len(rows),
    }
    return output, rows


@pytest.mark.parametrize("rule", ["dr_mas", "at_grpo", "grpo", "turn_returns", "rae"])
def test_agents_through_skyrls_trainer(skyrl, rule):
    """From a generator's output to advantages, in SkyRL's own methods; 4 processes add 3 rows of padding."""
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils.trainer_utils import validate_generator_output

    class Trainer(adapter.AgentUids, RayPPOTrainer):
        pass

    def script(question, attempt):
        return [
            ("solver", 0, attempt % 2),
            ("verifier", 0, 2 + attempt * (question == "b")),
            ("solver", 1, 3 * attempt),
        ][: 3 if question == "a" or attempt else 2]

    config = SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.algorithm.advantage_estimator={adapter.register_credit(rule)}",
            "generator.step_wise_trajectories=true",
            "generator.inference_engine.enable_ray_prometheus_stats=false",
            "generator.n_samples_per_prompt=3",
            "trainer.train_batch_size=2",
            "trainer.policy_mini_batch_size=1",
        ]
    )
    output, rows = generated(["a", "b"], 3, script)
    validate_generator_output(6, output, step_wise=True)
    uids = [each.instance_id for each in output["trajectory_ids"]]

    for kind in (RayPPOTrainer, Trainer):
        trainer = kind(config, None, SimpleNamespace(pad_token_id=0), None, None, None)
        trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 4)
        batch, uids_after = trainer.postprocess_generator_output(dict(output), uids)
        if kind is RayPPOTrainer:  # alone, it takes each uid for a prompt
            with pytest.raises(AssertionError):
                trainer.convert_to_training_input(batch, uids_after)
            continue
        data = trainer.convert_to_training_input(batch, uids_after)
        assert data.metadata["policy_mini_batch_boundaries"] == [(0, 9), (9, 17)]
        assert data.metadata["pad_size"] == 3
        data["values"] = None  # as the forward pass leaves it without a critic
        data = trainer.compute_advantages_and_returns(data)
    questions, attempts, agents, turns, rewards = zip(*rows, strict=True)
    trajectories = list(zip(questions, attempts, strict=True))
    columns = {"questions": questions, "actors": agents, "turns": turns}
    expected = credit_columns(rule, rewards, **columns, trajectories=trajectories)
    # Rules that compare or add up whole attempts would give something else without them.
    alone = np.allclose(credit_columns(rule, rewards, **columns), expected)
    assert alone == (rule in ("dr_mas", "at_grpo"))
    assert (np.abs(expected) > 0.1).sum() > 6
    mask = data["response_mask"].numpy()
    assert mask.sum(axis=1).tolist()[:17] == [len(each) for each in output["response_ids"]]
    spread = mask * np.concatenate([expected, [0, 0, 0]])[:, None]  # nothing for the padding
    np.testing.assert_allclose(data["advantages"], spread, atol=1e-6)


def batch_of(generator, rows=6):
    mask = ragged(generator, rows)
    old = -torch.rand(mask.shape, generator=generator) * 3
    # Ratios on both sides of every clip, and for dual clip some above 3.
    new = (old + 0.6 * torch.randn(mask.shape, generator=generator)).requires_grad_()
    rollout = old + 0.4 * torch.randn(mask.shape, generator=generator)
    advantages = torch.randn(rows, generator=generator)[:, None] * mask
    return new, old, advantages, mask, rollout


def both(skyrl, config, own, ours, seed):
    """(value, gradient, metrics) of SkyRL's loss and of turnwise's, on one batch scaled as SkyRL does."""
    new, old, advantages, mask, rollout = batch_of(torch.Generator().manual_seed(seed))
    advantages = skyrl.apply_loss_reduction_to_advantages_minibatch(advantages, mask, config.loss_reduction, 6, 9)
    found = []
    for name in (own, ours):
        given = copy.deepcopy(config)
        given.policy_loss_type = name
        value, metrics = skyrl.PolicyLossRegistry.get(name)(
            new, old, advantages, config=given, loss_mask=mask, rollout_logprobs=rollout
        )
        found.append((value, *torch.autograd.grad(value, new), metrics))
    return found


def assert_equal(own, ours, seed):
    assert abs(own[0] - ours[0]) <= 1e-6, f"seed {seed}"
    torch.testing.assert_close(ours[1], own[1], atol=1e-6, rtol=1e-6, msg=lambda text: f"seed {seed}: {text}")
    assert list(ours[2]) == list(own[2])
    assert ours[2] == pytest.approx(own[2], abs=1e-6), f"seed {seed}"


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_skyrls_own(skyrl, loss, settings):
    """Value, gradient and metrics, at SkyRL's defaults and with other settings, which matter."""
    name = adapter.register_loss(loss)
    assert name == f"turnwise_{loss}"
    config, usual = skyrl.AlgorithmConfig(), skyrl.AlgorithmConfig()
    for key, value in SETTINGS[settings].items():
        section, _, field = key.rpartition(".")
        place = getattr(config, section) if section else config
        assert getattr(place, field) != value or settings != "others"
        setattr(place, field, value)
    corrected, changed = settings in CORRECTIONS, 0.0
    for seed in range(5):
        own, ours = both(skyrl, config, loss, name, seed)
        if corrected:
            assert len(own[2]) > 4
            del own[2]["clip_ratio"], ours[2]["clip_ratio"]  # turnwise's leaves out the tokens that were dropped
        assert_equal(own, ours, seed)
        changed += abs(own[0] - both(skyrl, usual, loss, name, seed)[0][0]).item()
    assert (changed > 1e-4) == (settings != "defaults")


def test_a_variant_of_ops(skyrl):
    name = adapter.register_loss(ops.GMPO(0.3, 0.3), "gmpo")
    new, old, advantages, mask, _ = batch_of(torch.Generator().manual_seed(0))
    ours, _ = skyrl.PolicyLossRegistry.get(name)(new, old, advantages, skyrl.AlgorithmConfig(), mask)
    expected = ops.policy_loss(
        new.double(), old.double(), advantages.double(), mask=mask, variant=ops.GMPO(0.3, 0.3), backend="torch"
    )
    assert (ours / mask.sum()).item() == pytest.approx(expected.loss.item(), abs=1e-6)


def test_other_processes_get_them(skyrl):
    """SkyRL sends what is in its registries through Ray, which pickles by value."""
    adapter.register_credit("dr_mas")
    adapter.register_loss("regular")
    estimate, loss = (
        cloudpickle.loads(cloudpickle.dumps(registry.get(name)))
        for registry, name in (
            (skyrl.AdvantageEstimatorRegistry, "turnwise_dr_mas"),
            (skyrl.PolicyLossRegistry, "turnwise_regular"),
        )
    )
    advantages, _ = estimate(
        token_level_rewards=torch.tensor([[1.0], [0.0]]), response_mask=torch.ones(2, 1), index=["a", "a"]
    )
    advantage = 0.5**0.5
    assert advantages[:, 0].tolist() == pytest.approx([advantage, -advantage], abs=2e-6)
    value, _ = loss(
        torch.tensor([[0.1], [0.2]]), torch.zeros(2, 1), advantages, skyrl.AlgorithmConfig(), torch.ones(2, 1)
    )
    assert float(value) == pytest.approx(advantage * (math.exp(0.2) - math.exp(0.1)), abs=2e-6)


def test_what_it_refuses(skyrl):
    with pytest.raises(ValueError, match="states=None"):
        adapter.register_credit("gigpo")
    with pytest.raises(ValueError, match="unknown; did you mean 'dr_mas'"):
        adapter.register_credit("dr_mass")
    with pytest.raises(ValueError, match="name=None: expected the name to register RAECredit by"):
        adapter.register_credit(RAECredit())
    with pytest.raises(ValueError, match="expected no options, as rule is RAECredit"):
        adapter.register_credit(RAECredit(), "rae", decay=0.5)
    with pytest.raises(ValueError, match="loss='regulr': did you mean 'regular'"):
        adapter.register_loss("regulr")
    with pytest.raises(TypeError, match="loss=3: expected a name or a variant"):
        adapter.register_loss(3, "three")
    with pytest.raises(ValueError, match="does not compare tokens"):
        adapter.register_loss(ops.ClipCov(), "clip_cov")
    with pytest.raises(ValueError, match="proportional to the advantage"):
        adapter.register_loss(ops.Custom(lambda logprobs, old, advantages: (logprobs - old) ** 2), "mine")
    adapter.register_loss("regular")
    with pytest.raises(ValueError, match="already registered"):
        adapter.register_loss("regular")
