"""What an export writes: configs that transformers takes, and merged weights that hold the update."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from turnwise.inference.weights.lora import SharedBase
from turnwise.train import ConfigError
from turnwise.train.config.policies import LoraConfig, PolicyConfig
from turnwise.train.model.export import export_model
from turnwise.train.model.loading import check_models, load_model, peft_config

GENERATION = {
    "written as it is": ({"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 5]}, {}, ""),
    "a temperature without sampling": (
        {"temperature": 0.6, "top_p": 0.9, "max_length": 64, "eos_token_id": 2}, {"do_sample": True}, "do_sample = true"
    ),
    "greedy with a temperature": ({"do_sample": False, "top_k": 5}, {"top_k": None}, "exports top_k is left out"),
    "beams that are not there": (
        {"num_beams": 1, "length_penalty": 2.0, "eos_token_id": 2}, {"length_penalty": None}, "length_penalty is left"
    ),
    "two faults": (
        {"temperature": 0.6, "pad_token_id": -1, "eos_token_id": 2}, {"pad_token_id": None, "do_sample": True},
        "do_sample = true is added and pad_token_id is left out",
    ),
}  # fmt: skip
"""Settings beside a base; what an export has instead; and what is told of it at the start."""


@pytest.fixture
def base(small_model, tmp_path):
    model, tokenizer = small_model()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("case", GENERATION)
@pytest.mark.parametrize("lora", [False, True])
def test_a_generation_config_is_written_or_mended_and_told(base, tmp_path, case, lora):
    given, changed, told = GENERATION[case]
    (base / "generation_config.json").write_text(json.dumps(given))
    policies = {"default": PolicyConfig(path=str(base))}
    with pytest.warns(RuntimeWarning, match=f"'policies.default.path'.*{told}") if told else nullcontext():
        tokenizer = check_models(policies, lambda: None).common()
    model = load_model(str(base), "float32", lambda: None)
    if lora:
        model = SharedBase(model, str(base)).add_adapter("default", peft_config(LoraConfig(rank=2)), 0)
    export_model(model, tokenizer, tmp_path / "out")
    written = GenerationConfig.from_pretrained(tmp_path / "out" / ("merged" if lora else ""))
    expected = {**given, **changed}
    assert {key: getattr(written, key) for key in expected} == expected


def test_settings_for_sampling_in_the_config_of_a_model_are_moved(small_model, tmp_path):
    model, tokenizer = small_model()
    model.config.temperature, model.config.no_repeat_ngram_size = 0.7, 3
    export_model(model, tokenizer, tmp_path)
    written = GenerationConfig.from_pretrained(tmp_path)
    assert (written.temperature, written.no_repeat_ngram_size, written.do_sample) == (0.7, 3, True)
    assert "temperature" not in json.loads((tmp_path / "config.json").read_text())


def test_an_export_draws_no_bar_and_leaves_those_of_others(small_model, tmp_path, capfd):
    model, tokenizer = small_model()
    export_model(model, tokenizer, tmp_path)
    assert "%|" not in capfd.readouterr().err
    model.save_pretrained(tmp_path)
    assert "%|" in capfd.readouterr().err


@pytest.mark.parametrize("part", ["tokenizer", "config.json"])
def test_what_can_not_be_written_is_refused_before_the_run(base, part, monkeypatch):
    def refuse(self, *arguments, **options):
        raise TypeError("a set is not JSON serializable")

    name = "PreTrainedTokenizerBase" if part == "tokenizer" else "PreTrainedConfig"
    monkeypatch.setattr(f"transformers.{name}.save_pretrained", refuse)
    with pytest.raises(
        ConfigError, match=f"'policies.default.path' = .*its {part} can't be exported: TypeError: a set"
    ):
        check_models({"default": PolicyConfig(path=str(base))}, lambda: None)


@pytest.mark.parametrize(("dtype", "size", "wide"), [
    (torch.float32, 1e-6, False), (torch.bfloat16, 1e-6, True),
    (torch.float16, 1e-6, True), (torch.bfloat16, 0.3, False),
])  # fmt: skip
def test_a_merged_model_holds_the_update_of_its_adapter(base, small_model, tmp_path, dtype, size, wide):
    start = load_model(str(base), "float32", lambda: None).to(dtype)
    start.config.dtype = dtype
    weights = {name: tensor.clone().float() for name, tensor in start.state_dict().items()}
    shared = SharedBase(start, str(base))
    adapted = shared.add_adapter("solver", peft_config(LoraConfig(rank=2)), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    lost = shared.lost_in_merge(adapted)
    assert (lost > 0.2) == wide and lost == pytest.approx(0.0 if not wide else lost, abs=0.02)
    told = pytest.warns(RuntimeWarning, match=f"would lose {lost:.0%} of the update of adapter 'solver'")
    with told if wide else warnings.catch_warnings():
        export_model(adapted, small_model()[1], tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert merged.dtype == (torch.float32 if wide else dtype)
    exact = dict(shared._deltas(adapted))
    for name, tensor in merged.state_dict().items():
        moved = tensor.float() - weights[name]
        if name in exact:
            assert float((moved * exact[name]).sum() / exact[name].square().sum()) == pytest.approx(1, abs=0.05)
        else:
            assert not moved.any()
