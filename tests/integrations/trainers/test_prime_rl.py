"""prime-rl's custom loss hook calls turnwise's loss, which equals prime-rl's default."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from turnwise import ops
from turnwise.integrations.trainers import prime_rl as adapter

from .record import assert_close, prime_rl_batch, read, record_prime_rl

RECORDED = read("prime_rl")
NAMES = {"dppo_mask_low": "low", "dppo_mask_high": "high"}


def settings_of(options):
    """The arguments of ``policy_loss`` for those of prime-rl's ``DefaultLossConfig``."""
    bounds = {NAMES[key]: value for key, value in options.items() if key in NAMES}
    return {"options": bounds} | {key: value for key, value in options.items() if key not in NAMES}


def inputs_of(row, weighted=False, dtype=torch.float32):
    """What the loss reads of prime-rl's ``LossInputs``, made as ``compute_loss`` makes it."""
    names = ("trainer_logprobs", "inference_logprobs", "advantages")
    streams = {name: torch.tensor(row[name], dtype=dtype) for name in names}
    mask, weights = torch.tensor(row["loss_mask"]), torch.tensor(row["rl_weights"], dtype=dtype)
    streams["trainer_logprobs"].requires_grad_()
    return SimpleNamespace(
        **streams, loss_mask=mask & (weights != 0) if weighted else mask, loss_weights=weights if weighted else None
    )


def loss_of(rows, weighted=False, loss="dppo", options=None, kl_tau=1e-3, dtype=torch.float32):
    """Sum of the sequences' losses over prime-rl's scale, 8 in the recording, with gradients."""
    found = [inputs_of(row, weighted, dtype) for row in rows]
    value = sum(adapter.sequence_loss(each, loss, options or {}, kl_tau)[0] for each in found) / 8
    return value.item(), [
        each.tolist() for each in torch.autograd.grad(value, [each.trainer_logprobs for each in found])
    ]


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: f"{record['options']}-{record['weighted']}")
def test_is_prime_rls_default(record):
    loss, gradients = loss_of(record["rows"], record["weighted"], **settings_of(record["options"]))
    assert loss == pytest.approx(record["loss"], abs=1e-6)
    for ours, own in zip(gradients, record["gradients"], strict=True):
        assert ours == pytest.approx(own, abs=1e-6)


def test_recording_covers_what_it_should():
    """Tokens that moved too far, sequences of one token, several weights in one sequence."""
    assert any(share > 0 for record in RECORDED for share in record["is_masked"])
    assert {record["weighted"] for record in RECORDED} == {False, True}
    assert any(len(set(row["rl_weights"]) - {0.0}) > 1 for record in RECORDED for row in record["rows"])
    assert {len(row["loss_mask"]) for row in RECORDED[0]["rows"]} == {1, 4, 7, 12}


def test_one_token_by_hand():
    """p = 0.5, q = 0.4, A = 2: the ratio is 1.25, and log(1.25)**2 costs a thousandth. A bound of 0.05 drops it."""
    row = {"trainer_logprobs": [-0.6931472], "inference_logprobs": [-0.9162907], "advantages": [2.0]}
    row |= {"loss_mask": [True], "rl_weights": [1.0]}
    penalty = 0.2231436**2
    loss, [[gradient]] = loss_of([row])
    assert loss * 8 == pytest.approx(-2.5 + 1e-3 * penalty, abs=1e-6)
    assert gradient * 8 == pytest.approx(-2.5 + 2e-3 * 0.2231436, abs=1e-6)
    loss, [[gradient]] = loss_of([row], options={"high": 0.05}, kl_tau=1.0)
    assert loss * 8 == pytest.approx(penalty, abs=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", ["ppo", "cispo", "reinforce", "sapo"])
def test_other_losses_are_sums_over_tokens(loss, weighted):
    """Each token alone, in float64 and times its weight, adds up to the sequence."""
    rows = prime_rl_batch(0)
    value, gradients = loss_of(rows, weighted, loss=loss, kl_tau=0.02)
    expected = 0.0
    for row, gradient in zip(rows, gradients, strict=True):
        given = inputs_of(row, weighted, torch.float64)
        total = 0.0
        for token in torch.nonzero(given.loss_mask).flatten().tolist():
            lp, old, a = (
                x[token].reshape(1, 1) for x in (given.trainer_logprobs, given.inference_logprobs, given.advantages)
            )
            one = ops.policy_loss(lp, old, a, variant=adapter.LOSSES[loss](), backend="torch").loss
            weight = given.loss_weights[token] if weighted else 1.0
            total = total + weight * (one + 0.02 * (lp - old).square().sum())
        if given.loss_mask.any():
            [exact] = torch.autograd.grad(total, given.trainer_logprobs)
            assert gradient == pytest.approx((exact / 8).tolist(), abs=1e-6)
            expected += total.item() / 8
    assert value == pytest.approx(expected, abs=2e-6)


def test_what_it_refuses():
    row = prime_rl_batch(0)[0] | {"loss_mask": [True] * 7, "rl_weights": [1.0, 0.5] * 3 + [1.0]}
    with pytest.raises(ValueError, match="expected one weight for all tokens, as loss='gspo'"):
        loss_of([row], weighted=True, loss="gspo")
    with pytest.raises(ValueError, match="loss='dpo': did you mean 'dppo'"):
        loss_of([row], loss="dpo")
    with pytest.raises(ValueError, match=r"unknown config key 'options.hgh'"):
        loss_of([row], options={"hgh": 0.3})
    with pytest.raises(ValueError, match=r"options.low=-1: expected a number >= 0"):
        loss_of([row], options={"low": -1})


@pytest.mark.needs("prime_rl")
def test_recording_is_what_prime_rl_does():
    assert_close(record_prime_rl(), RECORDED)


@pytest.mark.skipif(importlib.util.find_spec("prime_rl") is not None, reason="prime-rl is installed here")
def test_prime_rl_is_missing():
    with pytest.raises(ModuleNotFoundError, match="prime-rl is not installed here"):
        adapter.policy_loss(None)
