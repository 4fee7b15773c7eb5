from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise.ops import GSPO, Clip, Custom, KLCov, policy_loss
from turnwise.train.config.optimization import CorrectionConfig, KLConfig, LossConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.micro_batch import micro_batches
from turnwise.train.terms.loss_types import make_variant, registry
from turnwise.train.terms.policy_loss import with_sample_sizes
from turnwise.train.terms.registry import Terms, check_loss
from turnwise.train.terms.term import Part
from turnwise.train.validate import load_config
from turnwise.types.passes import Read

OWN = """
def mean(logprobs, old_logprobs, advantages):
    return (advantages * logprobs).mean()

def broken(logprobs, old_logprobs, advantages):
    return logprobs + no_such_name
"""


def one_micro(batch):
    (micro,) = micro_batches(batch, np.arange(len(batch)), 10**6)
    return micro


def call(config, micro, logprobs_N, old_N, entropies_N=None, reference_N=None):
    terms = Terms().begin(config, ["first", "second"])
    (part,) = terms.minibatch(None, [Part(micro, old_N)])
    return terms.loss(Read(logprobs_N, entropies_N, reference_N=reference_N), part)[0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_stale_batch_gets_the_truncated_weights(random_batch, level):
    """Rows sampled by weights that gave each token 1.5 times, or half, the trainer's probability."""
    batch = random_batch(1, rows=8)
    micro = one_micro(batch)
    mask, row = micro.mask_N.bool(), micro.row_N
    old = micro.rollout_logprobs_N + torch.where(row % 2 == 0, math.log(1.5), math.log(0.5))
    config = LossConfig(type="ppo", importance_correction=CorrectionConfig(level=level, cap=2.0, bounds=(0.3, 8.0)))
    logprobs = old.clone().requires_grad_()
    out = call(config, micro, logprobs, old)
    out.loss.backward()
    tokens_B = torch.zeros(8).index_add(0, row, mask.float())
    raw_B = torch.where(torch.arange(8) % 2 == 0, 1.5, 0.5)
    raw_B = raw_B if level == "token" else raw_B**tokens_B
    weight_B = torch.where((raw_B < 0.3) | (raw_B > 8.0), 0.0, raw_B.clamp(max=2.0))
    assert level == "token" or {0.0, 2.0} <= set(weight_B.tolist()), weight_B
    want = -(weight_B * micro.advantages_B)[row] * mask / mask.sum()
    torch.testing.assert_close(logprobs.grad, want, rtol=1e-4, atol=1e-6)
    mismatch = torch.where(row % 2 == 0, 1.5, 0.5)[mask].log()
    assert float(out.metrics["mismatch_kl"]) == pytest.approx(float(-mismatch.mean()), rel=1e-4)
    weights = weight_B[row][mask]
    ess = float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))
    assert with_sample_sizes({k: float(v) for k, v in out.metrics.items()})["ess"] == pytest.approx(ess, rel=1e-4)
    assert float(out.metrics["rejected"]) == pytest.approx(float((weight_B[row][mask] == 0).float().mean()), abs=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_kl_term_is_weighted_by_the_ratio_where_asked(random_batch, weighted):
    """Twice as likely as when sampled, and half as likely under the reference: k3 is ``1/2 + ln 2 - 1``."""
    micro = one_micro(random_batch(1, rows=4))
    old = micro.rollout_logprobs_N
    lp, kl = old + math.log(2), 0.5 + math.log(2) - 1
    config = LossConfig(type="gpg", kl=KLConfig(coef=0.25, importance_weighted=weighted))
    out, plain = (call(config, micro, lp, old, reference_N=reference) for reference in (old, lp))
    assert float(out.loss - plain.loss) == pytest.approx(0.25 * kl * (2 if weighted else 1), rel=1e-4)
    assert float(out.metrics["kl"]) == pytest.approx(kl, rel=1e-5)


def test_the_samplers_own_logprobs_are_not_compared_with_themselves(random_batch):
    micro = one_micro(random_batch(1, rows=4))
    assert "ess" not in call(LossConfig(), micro, micro.rollout_logprobs_N, micro.rollout_logprobs_N).metrics
    # Every kind with every correction that goes with it is fine.
    for correction in (None, CorrectionConfig(level="sequence")):
        for kind in ("ppo", "gspo", "gmpo", "clip-cov", "kl-cov", "sapo"):
            assert check_loss(LossConfig(type=kind, importance_correction=correction, kl=KLConfig(coef=0.1))) == []


@pytest.mark.parametrize("aggregation", ["token-mean", "agent-mean", "seq-mean-token-mean"])
def test_entropy_is_taken_from_the_loss_the_way_it_is_aggregated(random_batch, aggregation):
    micro = one_micro(random_batch(2, rows=9))
    old = micro.rollout_logprobs_N
    entropies = (torch.rand(len(old), generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    plain = call(LossConfig(aggregation=aggregation), micro, old, old, entropies)
    bonus = call(LossConfig(aggregation=aggregation, entropy_coef=0.25), micro, old, old, entropies)
    bonus.loss.backward()
    mask, row = micro.mask_N.double(), micro.row_N
    lengths_B = torch.zeros(9).double().index_add(0, row, mask)
    actor = micro.actor_ids_B[row]
    tokens_A = torch.zeros(2).double().index_add(0, actor, mask)
    weight = {
        "token-mean": torch.ones_like(mask) / mask.sum(),
        "agent-mean": 1 / tokens_A[actor] / 2,
        "seq-mean-token-mean": 1 / lengths_B[row] / 9,
    }[aggregation]
    mean = float((entropies.detach().double() * mask * weight).sum())
    assert float(bonus.loss.detach()) == pytest.approx(float(plain.loss.detach()) - 0.25 * mean, abs=1e-5)
    torch.testing.assert_close(entropies.grad.double(), -0.25 * mask * weight, rtol=1e-5, atol=1e-8)
    assert float(plain.metrics["entropy"]) == pytest.approx(
        float((entropies.detach() * mask).sum() / mask.sum()), rel=1e-5
    )


def test_tokens_are_singled_out_among_the_whole_minibatch(random_batch):
    batch = random_batch(4, rows=20)
    loss = Terms().begin(LossConfig(type="kl-cov", options={"share": 0.1}), batch.actors)["policy_loss"]
    assert isinstance(loss.variant, KLCov)
    logprobs = torch.randn(len(batch.token_ids), generator=torch.Generator().manual_seed(1))
    chosen = []
    for budget in (1, 40, 10**6):
        micros = list(micro_batches(batch, np.arange(20), budget))
        got = loss.select(micros, [logprobs[m.token_N] for m in micros], [logprobs[m.token_N] for m in micros])
        assert [len(part) for part in got] == [len(micro.mask_N) for micro in micros]
        chosen.append({int(t) for part, micro in zip(got, micros, strict=True) for t in micro.token_N[part]})
    assert len(chosen[0]) == int(0.1 * int(one_micro(batch).mask_N.sum())) > 1
    assert chosen[0] == chosen[1] == chosen[2]


def test_a_draw_does_not_depend_on_the_order_of_the_micro_batches(random_batch):
    batch = random_batch(4, rows=20)
    config = LossConfig(type="clip-cov", options={"share": 0.1, "lower": -9.0, "upper": 9.0})
    loss = Terms().begin(config, batch.actors)["policy_loss"]
    logprobs = torch.randn(len(batch.token_ids), generator=torch.Generator().manual_seed(1))
    chosen = []
    for direction in (1, -1):
        micros = list(micro_batches(batch, np.arange(20), 30))[::direction]
        streams = [logprobs[micro.token_N] for micro in micros]
        torch.manual_seed(0)
        got = loss.select(micros, streams, streams)
        chosen.append({int(t) for part, micro in zip(got, micros, strict=True) for t in micro.token_N[part]})
    assert len(micros) > 2 and chosen[0] == chosen[1] != set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "gmpo", "importance_correction": {}}, "level='sequence', as GMPO has one ratio per sequence"),
        ({"importance_correction": {"bounds": [2.0, 1.0]}}, r"ImportanceCorrection.bounds=\(2.0, 1.0\)"),
        ({"type": "own_loss_of_test:mean"}, r"type 'own_loss_of_test:mean'.*expected the loss of each token"),
        ({"type": "own_loss_of_test:broken"}, r"tried on four tokens: NameError: .*no_such_name"),
        (
            {"kl": {"coef": 0.1, "importance_weighted": True, "estimator": "k3+"}},
            r"KL.importance_weighted=True: .*'k3\+'",
        ),
        (
            {"kl": {"coef": 0.1, "importance_weighted": True, "apply_to": "reward"}},
            r"'loss.kl.importance_weighted' = true: expected false with loss.kl.apply_to = 'reward'",
        ),
        ({"kl": {"target": 0.1}}, r"'loss.kl.target': needs loss.kl.coef > 0"),
    ],
)
def test_what_can_not_be_is_found_before_anything_starts(tmp_path, monkeypatch, options, message):
    (tmp_path / "own_loss_of_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, {"loss": options, "update.old_logprobs": "recompute", "checkpoint.keep_best": True})
    assert "checkpoint.keep_best" in str(caught.value), "all problems are told at once"


OWN_TYPES = """
import torch
from turnwise.ops import Clip

def ppo(logprobs, old_logprobs, advantages, low=0.2, high=0.2):
    ratio = (logprobs - old_logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))

def strict(logprobs, old_logprobs, advantages, *, power):
    return -advantages * logprobs ** power

class Scaled:
    def __init__(self, by=1.0):
        if by <= 0:
            raise ValueError(f"by={by!r}: expected a number > 0")
        self.by = by

    def __call__(self, logprobs, old_logprobs, advantages):
        return -self.by * advantages * logprobs

class Silent:
    pass

class WideClip(Clip):
    pass

answer = 42
"""


@pytest.fixture
def own_losses(tmp_path, monkeypatch):
    """The name of a module of losses in PYTHONPATH, as a user's own is."""
    (tmp_path / "own_losses_of_test.py").write_text(OWN_TYPES)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_losses_of_test"


@pytest.mark.parametrize("kind", sorted(registry))
def test_every_name_makes_a_loss(kind):
    made = make_variant(LossConfig(type=kind, options={"beta": 0.05} if kind == "dro" else {}))
    assert made.compiled == (kind not in ("dppo", "dro", "vespo"))


def test_what_a_loss_needs_and_its_options():
    (problem,) = check_loss(LossConfig(type="luspo"))
    assert "aggregation='token-mean': expected 'seq-mean-token-sum' or" in problem
    assert check_loss(LossConfig(type="luspo", aggregation="seq-mean-token-sum")) == []
    (problem,) = check_loss(LossConfig(type="dro"))
    assert "'beta'" in problem
    # Options go to the loss.
    assert make_variant(LossConfig(type="clip-higher")) == Clip(0.2, 0.28)
    assert make_variant(LossConfig(type="clip-higher", options={"high": 0.4, "dual_clip": 3.0})) == Clip(0.2, 0.4, 3.0)
    assert make_variant(LossConfig(type="turnwise.ops:GSPO", options={"low": 0.1})) == GSPO(low=0.1)


def test_functions_and_classes_of_ones_own(own_losses):
    streams = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.0]), torch.tensor([1.0, -3.0])
    loss = make_variant(LossConfig(type=f"{own_losses}:ppo", options={"high": 0.5}))
    assert isinstance(loss, Custom)
    assert loss.function(*streams).tolist() == pytest.approx([-1.5, 3.0])
    scaled = make_variant(LossConfig(type=f"{own_losses}:Scaled", options={"by": 2.0}))
    assert scaled.function(*streams).tolist() == [2.0, -12.0]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pppo", {}, r"'loss.type' = 'pppo': unknown; did you mean 'ppo'\?"),
        ("ppo", {"hihg": 0.3}, r"unknown config key 'loss.options.hihg'; did you mean 'high'\?"),
        ("ppo", {"low": -1}, r"config key 'loss.options' = \{'low': -1\}: Clip.low=-1"),
        ("own_losses_of_test:ppo", {"hihg": 0.3}, r"unknown config key 'loss.options.hihg'; did you mean 'high'\?"),
        ("own_losses_of_test:ppo", {"advantages": 0.3}, r"unknown config key 'loss.options.advantages'"),
        ("own_losses_of_test:strict", {}, r"config key 'loss.options' = \{\}: missing a required .*'power'"),
        ("own_losses_of_test:Scaled", {"by": 0}, r"config key 'loss.options' = \{'by': 0\}: by=0: expected"),
        ("own_losses_of_test:Silent", {}, r"'own_losses_of_test:Silent': expected a function of .*, got <class"),
        ("own_losses_of_test:answer", {}, r"'own_losses_of_test:answer': expected a function of .*, got 42"),
        ("os:system", {}, r"'os:system': expected a function of .*, got <built-in function system>"),
        ("subprocess:run", {"shell": True}, r"'subprocess:run': expected a function of .*, got <function run"),
        ("subprocess:Popen", {"args": ["true"]}, r"'subprocess:Popen': expected a function of .*, got <class"),
    ],
)
@pytest.mark.usefixtures("own_losses")
def test_what_makes_no_loss_is_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make_variant(LossConfig(type=kind, options=options))


def test_the_loss_of_the_documentation_is_that_of_its_formula(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    module = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "# my_losses.py" in block)
    section = next(block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "my_losses:" in block)
    (tmp_path / "my_losses.py").write_text(module)
    (tmp_path / "run.toml").write_text(section)
    monkeypatch.syspath_prepend(tmp_path)
    own = make_variant(load_config(tmp_path / "run.toml").loss)
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 50, generator=generator).unbind()
    cut = {"cu_seqlens": torch.tensor([0, 20, 50])}
    got = policy_loss(logprobs, old, advantages, variant=own, **cut)
    want = policy_loss(logprobs, old, advantages, variant=Clip(0.2, 0.3), **cut)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
