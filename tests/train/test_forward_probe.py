from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from turnwise.inference.common.hf_model import context_length
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import trial
from turnwise.train.model.packed_attention import packed_attention
from turnwise.train.model.prefix_tree_attention import ATTENTION, tree_attention
from turnwise.train.model.support import causal_lm, fusing_unsupported_reason, packing_unsupported_reason

from .test_forward import SIZES


def build(family: str, attention: str | None = None, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | options)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.fixture
def attention():
    """Puts another function in the place of the packed attention."""
    yield lambda function: AttentionInterface.register(ATTENTION, function)
    AttentionInterface.register(ATTENTION, tree_attention)


def test_a_stream_whose_rows_see_each_other_is_found_out(attention):
    def leaking(module, query, key, value, mask, *, packing=None, **kwargs):
        if packing is not None:
            packing.windows.append(kwargs.get("sliding_window"))
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)

    model = build("llama")
    attention(leaking)
    assert "packed rows differ from each alone" in packing_unsupported_reason(model)
    assert model.config._attn_implementation == "sdpa"
    attention(packed_attention)
    assert packing_unsupported_reason(model) == ""
    assert model.config._attn_implementation == ATTENTION


def test_a_window_that_the_attention_is_not_told_is_found_out(attention):
    def untold(module, query, key, value, mask, *, sliding_window=None, **kwargs):
        return packed_attention(module, query, key, value, mask, **kwargs)

    attention(untold)
    found = packing_unsupported_reason(build("mistral", sliding_window=40))
    assert found == "a layer of kind 'sliding_attention' has the window None"
    assert packing_unsupported_reason(build("mistral", sliding_window=None)) == ""


def test_a_chosen_attention_stays_and_is_not_packed():
    model = build("llama", "eager")
    assert packing_unsupported_reason(model) == "its attention 'eager' would score all pairs of a stream"
    assert model.config._attn_implementation == "eager"
    # What can not be is told once each.
    with pytest.warns(RuntimeWarning) as told:
        Forward(build("granite", "eager", logits_scaling=4.0))
    assert [str(warning.message).split(",")[0] for warning in told if warning.category is RuntimeWarning] == [
        "GraniteForCausalLM: log-probs are read from logits",
        "GraniteForCausalLM: rows are padded",
    ]


@pytest.mark.parametrize(
    ("family", "options", "obstacle"),
    [
        ("llama", {}, ""),
        ("llama", {"tie_word_embeddings": True}, ""),
        ("granite", {"logits_scaling": 1.0}, ""),
        ("granite", {"logits_scaling": 4.0}, "it changes its logits after its head"),
        ("gemma2", {"head_dim": 16}, ""),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 0.1}, ""),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": None}, ""),
    ],
)
def test_the_head_reads_the_last_hidden_states_alone(family, options, obstacle):
    assert fusing_unsupported_reason(build(family, **options)) == obstacle


def test_a_head_that_is_more_than_a_matrix_is_found_out():
    model = build("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    assert fusing_unsupported_reason(model) == "its head is a Sequential, not a plain Linear"
    model = build("llama")
    model.model.norm.register_forward_hook(lambda *_: None)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    assert fusing_unsupported_reason(model) == "it changes its last hidden states before its head"


def test_the_trial_leaves_no_trace():
    model = build("llama").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    Forward(model)
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.model._forward_hooks and not model.lm_head._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_prompt_learning_and_other_modules_are_refused():
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(TypeError, match="PROMPT_TUNING adds tokens to a prompt"):
        causal_lm(peft.get_peft_model(build("llama"), config))
    with pytest.raises(TypeError, match="model is a Linear: expected a Hugging Face causal LM"):
        causal_lm(nn.Linear(2, 2))


@pytest.mark.parametrize("broken", ["output", "module"])
def test_a_decoder_of_another_kind_leaves_padded_rows(broken, monkeypatch):
    """Some models name their head or themselves as the decoder; nothing of them is refused for it."""
    model = build("llama")
    decoder = model.lm_head if broken == "module" else model
    monkeypatch.setattr(model, "get_decoder", lambda: decoder)
    assert "gives no hidden states" in packing_unsupported_reason(model)
    with pytest.warns(RuntimeWarning, match="rows are padded"):
        forward = Forward(model)
    assert not forward.packed and not forward.fused


def test_rows_end_where_longrope_changes():
    """The frequencies would be those of the longest row of a pass."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = build("phi3", **sizes, original_max_position_embeddings=16, rope_scaling=factors)
    assert context_length(model.config) == 16 and context_length(build("llama").config) == 64
    with pytest.warns(RuntimeWarning, match="rows have at most 16 tokens, as longer ones would change"):
        forward = Forward(model)
    device = torch.device("cpu")
    assert torch.isfinite(forward(trial(200, 16, device))[0]).all()
    with pytest.raises(ValueError, match="a row of 18 tokens: Phi3ForCausalLM changes"):
        forward(trial(200, 18, device))
