"""Training on a GPU: the same loop with weights and micro-batches there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from turnwise.run.build import train_from_config
from turnwise.train.model.micro_batch import pack
from turnwise.train.model.prefix_tree_attention import PrefixTreeMask, tree_attention
from turnwise.train.terms.columns.observations import Observed
from turnwise.train.terms.columns.routing_replay import RowExperts
from turnwise.train.validate import config_from_dict
from turnwise.types import AllowedTokens, CompletionColumn, RoutedExperts, RowColumn

from ..trained import SMALL

ON_GPU = {
    **SMALL,
    "device": "cuda",
    "update": {"lr": 1e-3, "ppo_epochs": 2, "num_minibatches": 2, "old_logprobs": "recompute"},
    "loss": {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "importance_correction": {"level": "token"}},
}


def test_a_micro_batch_moves_whole(random_batch):
    batch = random_batch(0, rows=4)
    ones, count = np.ones_like(batch.rollout_logprobs), len(batch.token_ids)
    columns = {
        "token_advantages": CompletionColumn(ones),
        "observation_mask": Observed(1 - batch.loss_mask),
        "group_index": RowColumn(np.arange(4)),
        "allowed": AllowedTokens(np.zeros(count, dtype=np.int64), np.ones((1, 8), dtype=np.uint8)),
        "routed_experts": RowExperts([RoutedExperts(np.zeros((n - 1, 1, 1))) for n in np.diff(batch.cu_seqlens)]),
    }
    micro = pack(replace(batch, columns=columns), np.array([0, 2]))
    moved = micro.to(torch.device("meta"))
    fields = {name: getattr(moved, name) for name in moved.__dataclass_fields__}
    parts = [fields, *map(vars, moved.columns.values())]
    tensors = [value for part in parts for value in part.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 12 + 6 and moved.columns.keys() == columns.keys()
    assert all(tensor.device.type == "meta" for tensor in tensors) and moved.lengths == micro.lengths
    assert micro.to(torch.device("cpu")) is micro


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["shared", "lora_per_actor", "model_per_actor"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_trains_and_resumes_on_a_gpu(tmp_path, level, dtype):
    config = {**ON_GPU, "run_dir": str(tmp_path), "policy_sharing": level, "policies": {"default": {"dtype": dtype}}}
    run = train_from_config(config_from_dict(config))
    for policy in run.trainer.policies.values():
        assert policy.device.type == "cuda" and policy.version == 2
        assert all(torch.isfinite(tensor).all() for _, tensor in policy.weights())
    resumed = train_from_config(config_from_dict({**config, "steps": 3}))
    assert all(policy.version == 3 for policy in resumed.trainer.policies.values())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_over_a_tree_on_a_gpu(kv_heads):
    """FlexAttention with the tree's mask is what the CPU computes."""
    tree = PrefixTreeMask([0, 300, 340, 420, 421, 600], [421, 340, 420, 421, 600])
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 600, 64, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    outputs, upstream = [], torch.randn(1, 600, 4, 64)
    for device in ("cpu", "cuda"):
        moved = [x.detach().to(device).requires_grad_() for x in inputs]
        out, _ = tree_attention(SimpleNamespace(is_causal=True), *moved, None, tree=tree)
        outputs.append([x.cpu() for x in (out, *torch.autograd.grad(out, moved, upstream.to(device)))])
    for here, there in zip(*outputs, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-2)  # its products may be TF32


@pytest.mark.gpu
def test_sampling_beside_training_on_a_gpu(tmp_path):
    loop = {"max_staleness": 1, "in_flight_updates": True}
    run = train_from_config(config_from_dict({**ON_GPU, "run_dir": str(tmp_path), "steps": 4, "loop": loop}))
    assert run.trainer.policies["default"].version == 4
