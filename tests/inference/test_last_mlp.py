"""The last layer's MLP at some places: equal results and gradients there, and no more work than asked for."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise.inference.common.hf_model import last_mlp_at

PLACES = torch.tensor([2, 3, 9, 13])  # of two rows of seven tokens


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().eval().get_decoder()


def hidden(decoder):
    tokens = torch.arange(14).view(2, 7)
    return decoder(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)


def test_the_places_have_equal_states_and_gradients(decoder):
    weight = torch.randn(len(PLACES), 16, dtype=torch.float64)
    whole = hidden(decoder)[PLACES]
    expected = torch.autograd.grad((whole * weight).sum(), list(decoder.parameters()))
    with last_mlp_at(decoder, PLACES):
        part = hidden(decoder)[PLACES]
    torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((part * weight).sum(), list(decoder.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_mlp_sees_only_the_places_and_only_inside(decoder):
    seen = []
    decoder.layers[-1].mlp.up_proj.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[:-1].numel()))
    whole = hidden(decoder)
    with last_mlp_at(decoder, PLACES):
        hidden(decoder)
    assert torch.equal(hidden(decoder), whole)
    assert seen == [14, 4, 14]


def test_another_threads_calls_are_whole(decoder):
    whole, other = hidden(decoder), []
    with last_mlp_at(decoder, PLACES):
        thread = threading.Thread(target=lambda: other.append(hidden(decoder)))
        thread.start()
        thread.join()
    assert torch.equal(other[0], whole)
