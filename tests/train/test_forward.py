from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from bench_compaction import TINY, counts, play
from torch import nn

from turnwise.train.model.forward import LAYOUTS, Forward, like_lengths
from turnwise.train.model.micro_batch import pack
from turnwise.train.model.prefix_tree import PrefixTree

SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# Family, what its config has beside SIZES, and whether its rows are packed and its log-probs read off hidden states.
FAMILIES = {
    "llama": ("llama", {}, True, True),
    "mistral, window": ("mistral", {"sliding_window": 4}, True, True),
    "qwen2, one layer with a window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        True,
        True,
    ),
    "qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, True, True),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 4}, True, True),
    "gpt2, learned positions": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        True,
        True,
    ),
    "phi, bias in the head": ("phi", {}, True, True),
    "granite, scaled logits": ("granite", {"logits_scaling": 4.0}, True, False),
    "gemma2, caps": ("gemma2", {"head_dim": 16, "sliding_window": 4, "final_logit_softcapping": 0.05}, False, True),
    "gemma3, capped logits": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 4, "final_logit_softcapping": 0.05},
        True,
        True,
    ),
    "lfm2, convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}, False, True),
    "bloom, no registry": ("bloom", {"n_layer": 2, "n_head": 2}, False, True),
}


def build(family: str, **options) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | options))


def forward_of(model) -> Forward:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return Forward(model)


def row_by_row(model, micro, temperatures=None):
    """Log-probs and entropies ``[N]`` by the model's own forward, each row alone, from all of its logits."""
    temperatures = micro.temperatures_B if temperatures is None else temperatures
    sources = micro.source_N.split(torch.diff(micro.cu_seqlens).tolist())
    start, distributions = 0, []
    for row, length in enumerate(micro.lengths):
        ids = micro.token_ids_T[None, start : start + length]
        logits = model(input_ids=ids, use_cache=False).logits[0]
        distributions.append(torch.log_softmax(logits[sources[row] - start] / temperatures[row], -1))
        start += length
    all_NV = torch.cat(distributions)
    return all_NV.gather(1, micro.targets_N[:, None])[:, 0], -(all_NV.exp() * all_NV).sum(-1)


def gradient(model, value) -> torch.Tensor:
    grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def relative(got, expected) -> float:
    return float((got - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_models_own_forward_row_by_row(name, random_batch):
    family, options, packed, fused = FAMILIES[name]
    model = build(family, **options).double().train()
    own = copy.deepcopy(model)
    batch = random_batch(0, rows=9)
    batch.temperatures[:] = 0.7
    micro = pack(batch, np.arange(9)[::-1].copy())
    forward = forward_of(model)
    assert (forward.packed, forward.fused) == (packed, fused)
    assert all(module.training for module in model.modules())
    logprobs, entropies = forward(micro, entropy=True)
    expected, expected_entropies = row_by_row(own, micro)
    assert relative(logprobs, expected) < 1e-10 and relative(entropies, expected_entropies) < 1e-10
    weights = torch.randn(len(expected), dtype=torch.float64)
    got = gradient(model, (logprobs * weights + entropies).sum())
    assert relative(got, gradient(own, (expected * weights + expected_entropies).sum())) < 1e-7


TREES = [name for name in FAMILIES if FAMILIES[name][2] and not {"sliding_window"} & set(FAMILIES[name][1])]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", TREES)
def test_what_rows_share_is_computed_once_and_nothing_changes(family, seed, tree_batch):
    """Log-probs, entropies and all gradients: siblings, turns, ends within others, twins, empty completions."""
    name, options, _, fused = FAMILIES[family]
    model = build(name, **options).double()
    own = copy.deepcopy(model)
    batch = tree_batch(seed)
    rows = np.random.default_rng(seed).permutation(len(batch))
    shared, alone = pack(batch, rows, trie=PrefixTree(batch.token_ids, batch.cu_seqlens, rows)), pack(batch, rows)
    assert shared.num_tokens < 0.5 * alone.num_tokens
    forward = forward_of(model)
    assert forward.trie_share == 0.9 and forward.fused == fused
    logprobs, entropies = forward(shared, entropy=True)
    expected, expected_entropies = row_by_row(own, alone)
    assert relative(logprobs, expected) < 1e-10 and relative(entropies, expected_entropies) < 1e-10
    weights = torch.randn(len(expected), dtype=torch.float64)
    got = gradient(model, (logprobs * weights + entropies).sum())
    # most models have float32 within, in norms and rotary angles, whatever their dtype
    tolerance = 1e-10 if family.startswith(("gpt2", "phi")) else 1e-6
    assert relative(got, gradient(own, (expected * weights + expected_entropies).sum())) < tolerance


def test_histories_that_were_rewritten_train_as_their_calls_apart():
    """An agent that compacts its chat three times, asks a sub-agent and clears results, played by the arena."""
    batch = play(TINY)
    assert len(batch) == TINY.attempts * (4 * (TINY.turns + 2) + 3), "each call trains"
    found = counts(batch)
    assert found["trie"] < 0.7 * found["row per history"] and found["trie"] < 0.4 * found["calls apart"]
    model = build("qwen3", head_dim=16, vocab_size=300, max_position_embeddings=256).double()
    own = copy.deepcopy(model)
    rows = np.arange(len(batch))
    shared, alone = pack(batch, rows, trie=PrefixTree(batch.token_ids, batch.cu_seqlens, rows)), pack(batch, rows)
    expected, _ = row_by_row(own, alone)
    logprobs, _ = Forward(model, "trie")(shared)
    advantages = torch.from_numpy(batch.advantages).double()[torch.repeat_interleave(torch.diff(alone.cu_seqlens))]
    assert advantages.abs().min() > 0 and relative(logprobs, expected) < 1e-10
    got = gradient(model, (logprobs * advantages).sum())
    assert relative(got, gradient(own, (expected * advantages).sum())) < 1e-6  # Qwen3's norms are float32 within


def test_a_trie_in_bfloat16_with_checkpointing_and_adapters(tree_batch):
    import peft

    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    batch = tree_batch(0)
    rows = np.arange(len(batch))
    shared, alone = pack(batch, rows, trie=PrefixTree(batch.token_ids, batch.cu_seqlens, rows)), pack(batch, rows)
    model = peft.get_peft_model(build("qwen3", head_dim=16).double(), config)
    expected = _adapter_gradient(model, row_by_row(model, alone)[0])
    model.train().gradient_checkpointing_enable()
    model.enable_input_require_grads()
    forward = Forward(model)
    assert relative(_adapter_gradient(model, forward(shared)[0]), expected) < 1e-6
    forward = Forward(model.bfloat16())
    off = [relative(_adapter_gradient(model, forward(micro)[0]), expected) for micro in (shared, alone)]
    assert off[0] < 1.3 * off[1] < 0.2


def _adapter_gradient(model, logprobs):
    gradients = torch.autograd.grad(logprobs.mean(), [p for p in model.parameters() if p.requires_grad])
    return torch.cat([gradient.double().flatten() for gradient in gradients])


@pytest.mark.parametrize("family", ["mistral, window", "gemma3", "lfm2, convolutions", "bloom, no registry"])
def test_a_model_that_can_take_no_trie_says_so(family, tree_batch):
    name, options, packed, _ = FAMILIES[family]
    forward = forward_of(build(name, **options))
    assert (forward.packed, forward.trie_share) == (packed, 0.0)
    with pytest.raises(ValueError, match=r"layout='trie': \w+ doesn't support it, as .*(window|packed|attention)"):
        Forward(build(name, **options), "trie")


def test_layouts_and_padding(random_batch):
    model = build("llama")
    found = {layout: Forward(model, layout) for layout in LAYOUTS}
    assert {layout: (f.packed, f.trie_share) for layout, f in found.items()} == {
        "auto": (True, 0.9), "trie": (True, 1.0), "packed": (True, 0.0), "padded": (False, 0.0)
    }  # fmt: skip
    with pytest.raises(ValueError, match="layout='packed': Lfm2ForCausalLM doesn't support it"):
        Forward(build("lfm2", layer_types=["conv", "full_attention"]), "packed")
    # Padding is bounded.
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = tuple(int(x) for x in rng.integers(1, 1000, rng.integers(1, 40)))
        groups = like_lengths(lengths)
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        for group in groups:
            assert max(lengths[i] for i in group) * len(group) <= 1.25 * sum(lengths[i] for i in group)
    assert like_lengths((100, 99, 98)) == [[0, 1, 2]]


@pytest.mark.parametrize("layout", ["packed", "padded", "trie"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_float32_is_exact_to_rounding(layout, fused, tied, tree_batch):
    model = build("qwen3", head_dim=16, tie_word_embeddings=tied)
    own = copy.deepcopy(model).double()
    batch = tree_batch(1)
    rows = np.arange(len(batch))
    micro = pack(batch, rows)
    forward = Forward(model)
    forward.packed, forward.fused = layout != "padded", fused
    trie = PrefixTree(batch.token_ids, batch.cu_seqlens, rows) if layout == "trie" else None
    logprobs, _ = forward(pack(batch, rows, trie=trie))
    expected, _ = row_by_row(own, micro)
    assert logprobs.dtype == torch.float32 and relative(logprobs, expected) < 1e-6
    weights = torch.randn(len(expected))
    got = gradient(model, (logprobs * weights).sum())
    assert relative(got, gradient(own, (expected * weights).sum())) < 1e-5


@pytest.mark.parametrize("packed", [True, False])
def test_each_row_has_its_own_temperature(packed, random_batch):
    model = build("llama").double()
    batch = random_batch(2, rows=8)
    batch.temperatures[:] = [1.0, 0.5, 0.0, 1.3, 0.5, 1.0, 2.0, 0.5]
    micro = pack(batch, np.arange(8))
    forward = Forward(model)
    forward.packed = packed
    greedy_as_one = torch.where(micro.temperatures_B > 0, micro.temperatures_B, 1.0).double()
    for got, expected in zip(forward(micro, entropy=True), row_by_row(model, micro, greedy_as_one), strict=True):
        assert relative(got, expected) < 1e-7  # the temperatures are float32
    assert forward(micro)[1] is None


def test_rows_without_completion_tokens_and_no_logits(random_batch):
    model = build("llama")
    batch = random_batch(0, rows=1)
    batch.target_mask[:] = 0
    for packed in (True, False):
        forward = Forward(model)
        forward.packed = packed
        assert forward(pack(batch, [0]))[0].shape == (0,)
    model = build("qwen3", head_dim=16)
    forward = Forward(model)
    model.lm_head.forward = None  # the head itself is never called: calling None would raise
    forward(pack(random_batch(0, rows=5), np.arange(5)))[0].sum().backward()
    assert model.lm_head.weight.grad is not None


def test_gradient_checkpointing_changes_nothing(random_batch):
    grads = []
    for checkpointing in (False, True):
        model = build("qwen3", head_dim=16).double().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        counted = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
        forward = Forward(model)
        counted.clear()
        micro = pack(random_batch(0, rows=9), np.arange(9))
        grads.append(gradient(model, forward(micro)[0].sum()))
        assert len(counted) == 1 + checkpointing
    assert relative(grads[1], grads[0]) < 1e-12


def test_bfloat16_stays_near_float32(random_batch):
    model = build("qwen3", head_dim=16)
    micro = pack(random_batch(0, rows=9), np.arange(9))
    narrow = Forward(copy.deepcopy(model).bfloat16())
    assert narrow.packed and narrow.fused
    logprobs, _ = narrow(micro)
    expected, _ = row_by_row(model, micro)
    assert logprobs.dtype == torch.float32 and relative(logprobs, expected) < 5e-3
    got = gradient(narrow.model, logprobs.mean()).float()
    assert relative(got, gradient(model, expected.mean())) < 0.05


@pytest.mark.parametrize(("targets", "fused"), [("all-linear", True), (["q_proj", "lm_head"], False)])
def test_adapters_take_part_and_get_the_gradient(targets, fused, random_batch):
    import peft

    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(build("qwen3", head_dim=16).double(), config)
    forward = forward_of(model)
    assert forward.packed and forward.fused == fused
    micro = pack(random_batch(0, rows=9), np.arange(9))
    logprobs, _ = forward(micro)
    expected, _ = row_by_row(model, micro)
    assert relative(logprobs, expected) < 1e-10
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    got, wanted = (torch.autograd.grad(values.sum(), adapters) for values in (logprobs, expected))
    assert all(relative(*pair) < 1e-9 for pair in zip(got, wanted, strict=True))
    with model.disable_adapter():
        assert relative(forward(micro)[0], expected) > 1e-4


def test_a_saved_model_does_not_know_of_the_packing(tmp_path):
    from transformers import AutoModelForCausalLM

    model = build("llama")
    Forward(model)
    model.save_pretrained(tmp_path)
    assert "turnwise" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(200, (2, 12))
    torch.testing.assert_close(model(ids).logits, again(ids).logits)
    assert torch.equal(
        model.generate(ids, max_new_tokens=5, do_sample=False), again.generate(ids, max_new_tokens=5, do_sample=False)
    )
