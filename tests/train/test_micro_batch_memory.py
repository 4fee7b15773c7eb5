"""``update.micro_batch_tokens = "auto"`` follows from the machine's memory; an error of the memory halves it."""

from __future__ import annotations

import copy
import resource
import warnings

import numpy as np
import pytest
import torch

from turnwise.inference.common.hf_model import recompute_layers
from turnwise.train.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.model import policy as policy_module
from turnwise.train.model.policy import Policy
from turnwise.train.model.support import linear_bytes_per_token
from turnwise.train.update.update import update_policy
from turnwise.train.validate import config_from_dict
from turnwise.utils.memory import is_out_of_memory, memory_capacity

from .test_forward import build

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)
ERRORS = [MemoryError(), RuntimeError(ALLOCATOR), RuntimeError("std::bad_alloc"), torch.OutOfMemoryError("CUDA out of")]


def make(tokens: int | str = "auto", **sizes) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return Policy("solver", build("llama", **sizes), UpdateConfig(micro_batch_tokens=tokens), total_steps=9)


def run(policy: Policy, batch, tokens: int | str = "auto") -> dict[str, float]:
    settings = UpdateConfig(micro_batch_tokens=tokens)
    batch.policies[:] = ["solver"]
    return update_policy(policy, batch, settings, LossConfig(), np.random.default_rng(0))


def memory_of(monkeypatch, size: float) -> None:
    monkeypatch.setattr(policy_module, "memory_capacity", lambda: size)


def test_auto_is_the_default_and_an_integer_stays():
    assert UpdateConfig().micro_batch_tokens == "auto"
    assert config_from_dict({"update": {"micro_batch_tokens": 64}}).update.micro_batch_tokens == 64
    for wrong in ("all", 0, True, 2.5):
        with pytest.raises(ValueError, match=r"update\.micro_batch_tokens"):
            config_from_dict({"update": {"micro_batch_tokens": wrong}})
    assert make().micro_batch_tokens(77) == 77


def test_the_size_follows_from_memory_and_model(monkeypatch):
    """A quarter of what weights and AdamW leave, over twice the kept bytes of a token, as a power of two."""
    per_token = make().forward.bytes_per_token()
    held = 20 * sum(parameter.numel() for parameter in make().model.parameters())
    for tokens, expected in ((1000, 512), (1030, 1024), (10, 128), (10**9, 16384)):
        memory_of(monkeypatch, held + 4 * 2 * per_token * tokens)
        assert make().micro_batch_tokens("auto") == expected
    memory_of(monkeypatch, held + 8 * per_token * 1030)
    assert make(intermediate_size=256).micro_batch_tokens("auto") < 1024, "a wider model keeps more"


def test_the_kept_bytes_are_those_of_a_pass(random_batch):
    """They are counted once, draw nothing, leave no gradient, and grow with depth and without recomputation."""
    policy, state = make(num_hidden_layers=4), torch.get_rng_state()
    found = policy.forward.bytes_per_token()
    assert torch.equal(torch.get_rng_state(), state) and policy.forward.bytes_per_token() == found
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert 1.5 < found / make().forward.bytes_per_token() < 2.5, "twice the layers"
    recompute_layers(policy.model)
    policy.forward._bytes_per_token = None
    assert policy.forward.bytes_per_token() < 0.5 * found
    hidden, layers, widest = 32, 4, 64
    assert found > layers * 4 * (2 * hidden + 2 * widest), "at least the inputs of the linear layers, in float32"


def test_a_checkpoint_keeps_the_size(monkeypatch, tmp_path):
    memory_of(monkeypatch, 1e9)
    one = make()
    size = one.micro_batch_tokens("auto")
    save_checkpoint(tmp_path, 1, {"solver": one}, {})
    memory_of(monkeypatch, 1e7)
    other = make()
    load_checkpoint(list_checkpoints(tmp_path)[-1], {"solver": other})
    assert other.micro_batch_tokens("auto") == size > make().micro_batch_tokens("auto")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_the_memory_halves_micro_batches_once(monkeypatch, random_batch, error):
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("shapes differ"))
    batch, sizes = random_batch(0, rows=12), []
    policy, expected = make(), make()
    own = policy.read

    def limited(micro, needs):
        sizes.append(micro.num_tokens)
        if micro.num_tokens > limit:
            raise error
        return own(micro, needs)

    limit = 40
    monkeypatch.setattr(policy, "read", limited)
    with pytest.warns(RuntimeWarning, match=r"policy 'solver': memory ran out.*update.micro_batch_tokens is halved"):
        metrics = run(policy, batch, 64)
    assert max(sizes) > limit and policy.micro_batch_tokens(64) == 32 and metrics["updates"] == 1
    # The update is that of the smaller micro-batches, with nothing of the failed ones.
    run(expected, copy.deepcopy(batch), 32)
    for (name, got), (_, want) in zip(policy.weights(), expected.weights(), strict=True):
        assert torch.equal(got, want), name
    limit = 4
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else MemoryError
    with pytest.raises(kind, match=r"a micro-batch of \d+ tokens doesn't fit the memory.*update\.micro_batch_tokens"):
        run(policy, batch, 64)
    assert policy.extra_state()["halved"] is True


def test_another_error_is_raised_as_it_is(monkeypatch, random_batch):
    policy = make()
    monkeypatch.setattr(policy, "read", lambda micro, needs: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        run(policy, random_batch(0, rows=3))


def test_the_capacity_is_that_of_the_limits(monkeypatch):
    assert 1e8 < memory_capacity() < 1e14
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5_000_000, 9))
    assert memory_capacity() == 5_000_000


@pytest.mark.parametrize("sizes", [{}, {"num_hidden_layers": 6}, {"hidden_size": 128, "intermediate_size": 512}])
def test_the_estimate_without_a_pass_is_near_what_a_pass_keeps(sizes):
    policy = make(**sizes)
    assert 0.5 < policy.forward.bytes_per_token() / linear_bytes_per_token(policy.model) < 2
