"""The learner of a Tinker server against :class:`LocalLearner`: same weights, same metrics, same random draws.

``Server`` computes here what the API's documentation says of its losses, with the sum of the hosted service and of
SkyRL, or with the means of SkyRL's JAX backend. ``tests/integrations/tinker`` has the real SkyRL.
"""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.inference.weights.lora import SharedBase
from turnwise.train.checkpoint.checkpoint import load_checkpoint
from turnwise.train.checkpoint.files import CheckpointError, CheckpointMismatch
from turnwise.train.config.cluster import SERVERS
from turnwise.train.config.policies import LoraConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.learner.local import LocalLearner
from turnwise.train.learner.tinker.learner import TinkerLearner
from turnwise.train.learner.tinker.remote import Passed, RemotePolicy
from turnwise.train.learner.tinker.wire import ServerLoss, WireRow, wire_rows
from turnwise.train.model.loading import peft_config
from turnwise.train.model.micro_batch import pack
from turnwise.train.model.policy import Policy
from turnwise.train.terms.registry import Terms
from turnwise.train.terms.term import Part
from turnwise.types import TrainingBatch
from turnwise.types.prompts import NO_TOKENS

from .sharded_ranks import make_batch as siblings
from .sharded_ranks import make_lm

NAMES = ("solver", "reviser")
UPDATE = {"lr": 3e-3, "schedule": "linear", "min_lr_ratio": 0.1, "warmup": 1, "ppo_epochs": 2, "num_minibatches": 2}


def config_of(server: str = "skyrl-jax", **changes: Any) -> TrainConfig:
    policies = {name: {"path": "somewhere", "lora": {"rank": 4}} for name in NAMES}
    return TrainConfig(
        policies=policies,
        learner={"type": "tinker", "tinker": {"server": server}},
        rollout={"client": "tinker"},
        **{"update": UPDATE, **changes},
    )


def make_policies(config: TrainConfig) -> dict[str, Policy]:
    """Make adapters that differ from each other and from their base."""
    shared = SharedBase(make_lm())
    models = {name: shared.add_adapter(name, peft_config(LoraConfig(rank=4)), seed) for seed, name in enumerate(NAMES)}
    policies = {name: Policy(name, model, config.optimizer_of(name), total_steps=20) for name, model in models.items()}
    for seed, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policies[name].trained_parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return policies


def make_batch(seed: int = 0) -> TrainingBatch:
    """Rows of unequal lengths of both policies and two actors each, with holes in their masks."""
    batch = siblings(6, 3, seed)
    # Far from the policy, so that ratios reach both clips.
    logprobs = -5.5 + np.random.default_rng(seed).normal(size=len(batch.loss_mask))
    return replace(
        batch,
        target_logprobs=logprobs.astype(np.float32) * batch.loss_mask,
        temperatures=np.ones(len(batch), np.float32),
        policy_index=np.arange(len(batch)) % 2,
        policies=list(NAMES),
    )


class Server:
    """An adapter on a server, in torch. It knows the API's losses, and how its kind reduces and clips."""

    def __init__(self, policy: Policy, kind: str) -> None:
        self.policy, self.kind, self.rank, self.rows = policy, kind, 4, 0
        self.sent: list[list[WireRow]] = []
        self.waiting: list[Any] = []
        self.states: dict[str, Any] = {}
        parameters = policy.trained_parameters()
        self.adam = torch.optim.AdamW(parameters)

    def forward_backward(self, rows: list[WireRow], loss: ServerLoss) -> Any:
        """Work on the rows when the answer is awaited, or else when the update comes."""
        self.sent.append(rows)
        work = functools.cache(functools.partial(self._work, rows, loss))
        self.waiting.append(work)
        return work

    def _work(self, rows: list[WireRow], loss: ServerLoss) -> Passed:
        found, total = [], torch.zeros(())
        for row in rows:
            ids = torch.from_numpy(row.token_ids)
            logits = self.policy.model(input_ids=ids[None, :-1]).logits[0]
            logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            advantages, ratio = torch.from_numpy(row.advantages), (logprobs - torch.from_numpy(row.logprobs)).exp()
            clipped = ratio.clamp(loss.settings["clip_low_threshold"], loss.settings["clip_high_threshold"])
            token = {
                "ppo": torch.minimum(ratio * advantages, clipped * advantages),
                "cispo": clipped.detach() * logprobs * advantages,
            }[loss.name]
            total = total - (token.mean() if SERVERS[self.kind].means else token.sum())
            found.append(logprobs.detach().numpy())
        total.backward()
        self.rows += len(rows)
        return Passed(found, {} if SERVERS[self.kind].means else {"loss:sum": float(total.detach())})

    def optim_step(self, adam: dict[str, float]) -> Any:
        # SkyRL's engine looks for passes, then for updates: both may have come in between, and the update goes first.
        for work in self.waiting if not SERVERS[self.kind].reorders else ():
            work()
        self.waiting = []
        assert self.rows, "an update before its pass"
        parameters = self.policy.trained_parameters()
        for parameter in parameters if SERVERS[self.kind].means else ():
            parameter.grad /= self.rows
        most = adam["grad_clip_norm"] if SERVERS[self.kind].clips else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, most))
        betas = (adam["beta1"], adam["beta2"])
        self.adam.param_groups[0].update(
            lr=adam["learning_rate"], betas=betas, eps=adam["eps"], weight_decay=adam["weight_decay"]
        )
        self.adam.step()
        self.adam.zero_grad()
        self.rows = 0
        return lambda: {"skyrl.ai/grad_norm": norm}

    def save_for_sampler(self, name: str) -> str:
        return f"tinker://model/{name}"

    def save_state(self, name: str) -> Any:
        weights = {key: tensor.clone() for key, tensor in self.policy.weights()}
        self.states[f"tinker://{name}"] = weights, copy.deepcopy(self.adam.state_dict())
        return lambda: f"tinker://{name}"

    def load_state(self, path: str) -> None:
        weights, adam = self.states[path]
        with torch.no_grad():
            for key, tensor in self.policy.weights():
                tensor.copy_(weights[key])
        self.adam.load_state_dict(adam)


def make_learner(config: TrainConfig, policies: dict[str, Policy]) -> TinkerLearner:
    kind = config.learner.tinker.server
    remote = {name: RemotePolicy(name, config.optimizer_of(name), total_steps=20) for name in NAMES}
    adapters: Any = {name: Server(policy, kind) for name, policy in policies.items()}
    return TinkerLearner(remote, adapters, config, "somewhere")


def train(learner: Any, batches: int = 2) -> list[dict[str, dict[str, float]]]:
    rng = np.random.default_rng(7)
    steps = range(batches)
    shares = [dict.fromkeys(NAMES, 0.1 * (seed + 1)) for seed in steps]
    return [learner.update(make_batch(seed), NAMES, shares[seed], rng, lambda *_: None).metrics for seed in steps]


CASES = {
    "token-mean": {"type": "clip-higher"},
    "seq-mean-token-sum": {"type": "ppo", "options": {"low": 0.1, "high": 0.3}},
    "seq-mean-token-mean": {"type": "cispo"},
    "seq-mean-token-sum-norm": {"type": "reinforce", "max_length": 12},
    "agent-mean": {"type": "clip-higher"},
}
"""A loss for each aggregation."""


# Each aggregation once, and each server.
QUICK = set(zip(CASES, itertools.cycle(SERVERS)))


@pytest.mark.parametrize(
    ("aggregation", "server"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product(CASES, SERVERS)
    ],
)
def test_trains_as_the_local_learner(server: str, aggregation: str) -> None:
    # Only the hosted service clips as it is asked to.
    update = {**UPDATE, "max_grad_norm": 0.05 if SERVERS[server].clips else 1e6}
    config = config_of(server, loss={"aggregation": aggregation, **CASES[aggregation]}, update=update)
    before, here, there = (make_policies(config) for _ in range(3))
    local, remote = LocalLearner(here, config), make_learner(config, there)
    expected, found = train(local, batches=1), train(remote, batches=1)
    for name in NAMES:
        start, mine, theirs = (
            torch.cat([w.flatten() for _, w in each[name].weights()]) for each in (before, here, there)
        )
        # Adam divides rounding errors by the roots of the smallest gradients.
        assert float((theirs - mine).norm() / (mine - start).norm()) < 2e-3
        for measured, got in zip(expected, found, strict=True):
            # The server's rows share no prefixes, and it returns no entropies.
            wanted = {key: value for key, value in measured[name].items() if "entropy" not in key}
            wanted["unique_token_share"] = 1.0
            assert got[name] == pytest.approx(wanted, rel=2e-3, abs=2e-5)
        assert remote.policies[name].version == 1 and remote.policies[name].updates == 4


def test_a_worked_example_of_advantages_on_the_wire() -> None:
    """Two rows of 2 and 1 trained tokens: the token mean weighs each token by a third.

    The log-prob of a token that doesn't train stays here. On the server its ratio could overflow, and infinity times an
    advantage of 0 is no number.
    """
    batch = replace(
        make_batch(),
        contexts=[NO_TOKENS] * 2, targets=np.array([1, 2, 3, 4, 1, 2, 5]), cu_targets=np.array([0, 4, 7]),
        target_mask=np.array([0, 0, 1, 1, 0, 0, 1], np.uint8),
        target_logprobs=np.array([0, -200, -1, -2, 0, 0, -3], np.float32),
        advantages=np.array([3, -6], np.float32), temperatures=np.ones(2, np.float32),
        actor_index=np.zeros(2, np.int64), policy_index=np.zeros(2, np.int64),
    )  # fmt: skip
    rows, micro = np.arange(2), pack(batch, np.arange(2))
    terms = Terms().begin(config_of().loss, ["actor"])
    (part,) = terms.minibatch(None, [Part(micro, micro.rollout_logprobs_N)])
    weights = terms["policy_loss"].token_weights(part)
    first, second = wire_rows(batch, rows, micro, weights, SERVERS["hosted"])
    assert first.token_ids.tolist() == [1, 2, 3, 4] and second.token_ids.tolist() == [1, 2, 5]
    assert first.advantages == pytest.approx([0, 1, 1]) and second.advantages == pytest.approx([0, -2])
    assert first.logprobs.tolist() == [0, -1, -2] and second.logprobs.tolist() == [0, -3]
    # A server of means divides by the row's 3 or 2 targets, and by 2 rows.
    first, second = wire_rows(batch, rows, micro, weights, SERVERS["skyrl-jax"])
    assert first.advantages == pytest.approx([0, 6, 6]) and second.advantages == pytest.approx([0, -8])


def test_a_policy_without_rows_and_one_out_of_phase_do_not_train() -> None:
    config = config_of()
    learner = make_learner(config, make_policies(config))
    batch = make_batch()
    batch.policy_index[:] = 0
    rng = np.random.default_rng(0)
    updated = learner.update(batch, ["solver", "reviser"], {}, rng, lambda *_: None)
    assert updated.metrics["reviser"] == {} and updated.trained == updated.moved == {"solver"}
    assert learner.update(batch, ["reviser"], {}, rng, lambda *_: None).trained == set()
    assert [policy.version for policy in learner.policies.values()] == [1, 0]
    # A server takes each name once, and a rewound run publishes a version again.
    config = config_of()
    learner = make_learner(config, make_policies(config))
    paths = [learner.send("solver", list) for _ in range(2)]
    assert [[name for name, _ in one] for one in paths] == [["sampler_path"]] * 2 and paths[0] != paths[1]


def test_a_server_of_another_kind_is_noticed_before_a_weight_changes() -> None:
    for wrong, right in itertools.permutations(["hosted", "skyrl-jax"]):
        config = config_of(wrong)
        policies = make_policies(config)
        learner = make_learner(config, policies)
        for adapter in learner.adapters.values():
            adapter.kind = right
        before = {name: policy.fingerprint() for name, policy in policies.items()}
        with pytest.raises(ValueError, match=f"'learner.tinker.server' = '{wrong}': .* expected .*{right}"):
            train(learner)
        assert before == {name: policy.fingerprint() for name, policy in policies.items()}


def test_bad_rows_are_not_sent() -> None:
    config = config_of()
    learner = make_learner(config, make_policies(config))
    rng = np.random.default_rng(0)
    batch = make_batch()
    batch.advantages[2] = float("nan")
    with pytest.raises(FloatingPointError, match="'solver': nothing was sent: 1 rows are not finite: row 2"):
        learner.update(batch, NAMES, {}, rng, lambda *_: None)
    batch = make_batch()
    batch.temperatures[1] = 0.7
    with pytest.raises(ValueError, match=r"'reviser': rows sampled at temperatures \[0\.69.*, 1\.0\].* trains at 1"):
        learner.update(batch, ["reviser"], {}, rng, lambda *_: None)
    assert not any(adapter.sent for adapter in learner.adapters.values())
    config = config_of()
    policies = make_policies(config)
    learner = make_learner(config, policies)
    with torch.no_grad():
        next(iter(policies["solver"].trained_parameters())).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"'solver': loss is nan.* can't undo an update: resume from"):
        train(learner)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    config = config_of()
    whole = make_learner(config, make_policies(config))
    train(whole, batches=1)
    saved = whole.save(tmp_path, 1, {"of": "the run"})
    after = torch.rand(1)
    rng, shares = np.random.default_rng(5), dict.fromkeys(NAMES, 0.5)
    expected = whole.update(make_batch(3), NAMES, shares, rng, lambda *_: None).metrics
    # Another process: new adapters on the same server.
    parts = make_learner(config, make_policies(config))
    for name, adapter in parts.adapters.items():
        adapter.states = whole.adapters[name].states  # type: ignore[attr-defined]
    torch.manual_seed(99)
    assert parts.load(saved) == (1, {"of": "the run"})
    assert torch.equal(torch.rand(1), after)
    assert parts.update(make_batch(3), NAMES, shares, np.random.default_rng(5), lambda *_: None).metrics == expected
    assert [policy.version for policy in parts.policies.values()] == [2, 2]


def test_a_checkpoint_of_other_policies_is_refused(tmp_path: Path) -> None:
    config = config_of()
    learner = make_learner(config, make_policies(config))
    saved = learner.save(tmp_path, 0, {})
    learner.adapters["solver"].rank = 8
    with pytest.raises(CheckpointMismatch, match=r"adapters \{'reviser': 4, 'solver': 4\}, the run has .*'solver': 8"):
        learner.load(saved)
    with pytest.raises(
        CheckpointMismatch, match=r"format 6 \(a Tinker server holds its weights\); expected format 4 or 5"
    ):
        load_checkpoint(saved, make_policies(config))
    (saved / "tinker.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tinker.json is damaged"):
        learner.load(saved)
