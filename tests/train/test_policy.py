from __future__ import annotations

import math

import pytest
import torch

from turnwise.train.config import UpdateConfig
from turnwise.train.policy import Policy, named_weights


def test_the_rate_warms_up_and_falls_to_its_floor(small_model):
    config = UpdateConfig(lr=1e-3, warmup=2, min_lr_ratio=0.1)
    policy = Policy("default", small_model()[0], config, total_steps=10)
    rates = []
    for _ in range(12):
        rates.append(policy.optimizer.param_groups[0]["lr"] / 1e-3)
        for parameter in policy.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        policy.step()
    falling = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(9)]
    assert rates == pytest.approx([0.5, 1.0, *falling, 0.1])


def test_the_gradient_is_clipped_and_cleared(small_model):
    policy = Policy("default", small_model()[0], UpdateConfig(max_grad_norm=0.5), total_steps=1)
    for parameter in policy.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    assert policy.step() == pytest.approx(math.sqrt(count), rel=1e-4)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_tied_weights_are_named_once_and_the_fingerprint_sees_a_change(small_model):
    model, _ = small_model()
    names = [name for name, _ in named_weights(model)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    policy = Policy("default", model, UpdateConfig(), total_steps=1)
    before = policy.fingerprint()
    assert policy.fingerprint() == before
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    assert policy.fingerprint() != before
