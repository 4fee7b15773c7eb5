"""``--dry-run`` asks the models of a config what they are, and refuses by name what they can't do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from turnwise.inference import TransformersClient
from turnwise.run.checks import check_config, dry_run, task_of
from turnwise.run.models import TRIED, ask_models, describe_models
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import attach_adapters, build_policies
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import load_models
from turnwise.train.validate import config_from_dict
from turnwise.types import ModelRequest, Sampling

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mistral": SIZES,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "llama": {**SIZES, "tie_word_embeddings": False},
    "qwen3": {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": {
        **SIZES, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokenizer, found = build_tokenizer(["hello 0123456789"]), {}
    for kind, sizes in KINDS.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **sizes, vocab_size=len(tokenizer), pad_token_id=0)
        AutoModelForCausalLM.from_config(config).save_pretrained(found[kind])
        tokenizer.save_pretrained(found[kind])
    return found


def config_of(folders: dict[str, Path], kind: str, *, layout: str = "auto", **policy: Any) -> Any:
    policies = {"default": {"path": str(folders.get(kind, kind)), **policy}}
    settings = {"task": "lookup", "policies": policies, "rollout": {"group_size": 2}}
    return config_from_dict({**settings, "update": {"sequence_layout": layout}})


@pytest.mark.parametrize(
    ("kind", "policy", "told"),
    [
        ("gpt2", {}, "GPT2LMHeadModel, 36,000 weights in float32, 576 kB with"),
        ("gpt2", {}, "dropout off (resid_pdrop = 0.1, embd_pdrop = 0.1, attn_pdrop = 0.1)"),
        ("gpt2", {"dropout": True}, "dropout on (resid_pdrop"),
        ("gpt2", {"dropout": True}, "packed, not shared, as its attention drops weights out"),
        ("gpt2", {}, "context 64; "),
        ("mistral", {}, "rows packed, not shared, as its attention has a sliding window"),
        ("bloom", {}, "no limit of context; rows padded, as its attention"),
        ("mamba", {}, "sampled here without a cache, as a pass with a cache fails"),
        ("qwen3", {"lora": {"target_modules": ["q_proj", "lm_head"]}, "dtype": "bfloat16"}, "in bfloat16"),
        ("llama", {"lora": {"dropout": 0.5}}, "dropout off (lora_dropout = 0.5)"),
    ],
)
def test_the_facts_of_a_model(folders: Any, kind: str, policy: Any, told: str) -> None:
    if policy.get("lora", {}).get("target_modules"):
        kind = "llama"
    [line] = describe_models(config_of(folders, kind, **policy), lambda: (None, None))
    assert told in line
    assert line.startswith("model of 'default': ")


def test_the_bytes_of_training_by_hand(folders: Any) -> None:
    def held(**policy: Any) -> float:
        [asked] = ask_models(config_of(folders, "llama", **policy), lambda: (None, None))
        return asked.bytes

    weights = AutoModelForCausalLM.from_pretrained(folders["llama"]).num_parameters()
    assert held() == 16 * weights and held(dtype="bfloat16") == 18 * weights
    assert held(trainable=False, dtype="bfloat16") == 2 * weights
    lora = {"rank": 2, "target_modules": ["q_proj"]}
    assert held(lora=lora, dtype="bfloat16") == 2 * weights + 16 * 2 * 2 * (32 + 32)


@pytest.mark.parametrize(
    ("kind", "how", "error"),
    [
        ("bloom", {"layout": "packed"}, r"'update.sequence_layout' = 'packed': BloomForCausalLM .* doesn't support it"),
        ("mistral", {"layout": "trie"}, "'update.sequence_layout' = 'trie': .*sliding window"),
        ("gpt2", {"layout": "trie", "dropout": True}, "'update.sequence_layout' = 'trie': .*drops weights out"),
        ("qwen3", {"lora": {"target_modules": ["embed_tokens"]}}, "'policies.default.lora.target_modules'.* ties its"),
        ("qwen3", {"lora": {"target_modules": ["q_prj"]}}, "'policies.default.lora.target_modules': .*'q_proj'"),
        ("qwen3_moe", {"lora": {"target_modules": ["experts"]}}, "'policies.default.lora.target_modules' = .*experts"),
        ("qwen3", {"lora": {"target_modules": ["norm"]}}, "'policies.default.lora.target_modules' = .*not supported"),
        (
            "mamba",
            {"lora": {"target_modules": ["dt_proj"]}},
            "'policies.default.lora.target_modules': .*runs none of them",
        ),
        ("./nowhere", {}, "'policies.default.path' = './nowhere'"),
    ],
)
def test_what_a_model_cant_do_is_refused_by_its_key(folders: Any, kind: str, how: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        dry_run(config_of(folders, kind, **how))


def test_a_template_that_shows_no_tools_is_refused_before_the_model_is_loaded(folders: Any, tmp_path: Path) -> None:
    """The actor of ``lookup`` has a tool."""
    assert "# credit.rule = 'task' is 'grpo' for task 'lookup'" in dry_run(config_of(folders, "llama"))
    shutil.copytree(folders["llama"], tmp_path / "plain")
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    (tmp_path / "plain" / "chat_template.jinja").write_text(template)
    config = config_of(folders, str(tmp_path / "plain"))
    error = r"'policies.default.path' = '.*plain': actor 'solver' has tools, and the model's chat template renders no"
    with pytest.raises(ConfigError, match=error):
        dry_run(config)
    (tmp_path / "plain" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=error):
        check_config(config, task_of(config), warm=False)


def test_a_dry_run_says_who_is_frozen_and_only_what_an_episode_serves(folders: Any) -> None:
    actors = {"proposer": "default", "reviser": "judge"}
    policies = {"default": {}, "judge": {"trainable": False}}
    settings = {"task": "sudoku", "rollout": {"branches": 2}}
    told = dry_run(config_from_dict({**settings, "actors": actors, "policies": policies}))
    assert "# actor 'reviser' plays with policy 'judge', which is frozen: it does not train\n" in told
    assert "# actor 'proposer' plays with policy 'default'\n" in told
    assert "# rewards of episode 'lookup': invalid_cost = 0.0\n" in dry_run(config_of(folders, "llama"))


def test_a_model_of_the_hub_is_not_downloaded(folders: Any) -> None:
    [line] = describe_models(config_of(folders, "nobody/has-this"), lambda: (None, None))
    assert line == "model of 'default': 'nobody/has-this' is not on this machine, so it was not checked"


def test_a_large_model_is_asked_without_its_weights(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.run.models.TRIED", 100)
    assert TRIED > 100
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("read"))
    [line] = describe_models(config_of(folders, "mistral"), lambda: (None, None))
    assert "context 64; its rows are tried when the run starts" in line


async def test_an_adapter_on_an_untied_embedding_samples_trains_and_merges(folders: Any, random_rows: Any) -> None:
    config = config_of(folders, "llama", lora={"rank": 2, "target_modules": ["embed_tokens", "q_proj"]})
    models = attach_adapters(load_models(config.policies, lambda: (None, None)), config.policies, seed=0)
    policy = build_policies(config, models)["default"]
    tokenizer = build_tokenizer(["hello 0123456789"])
    client = TransformersClient(models, tokenizer)
    [response] = await client.generate([ModelRequest([9, 7, 5], Sampling(max_tokens=4, seed=0), policy="default")])
    assert len(response.logprobs) == len(response.completion_token_ids)
    before = [parameter.detach().clone() for parameter in policy.trained_parameters()]
    for _ in range(2):
        models["default"](random_rows, labels=random_rows).loss.backward()
        policy.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, policy.trained_parameters(), strict=True))
    merged = build_from(models["default"])
    with torch.no_grad():
        torch.testing.assert_close(merged(random_rows).logits, models["default"](random_rows).logits)
    await client.close()


@pytest.fixture
def random_rows() -> torch.Tensor:
    return torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(0))


def build_from(adapted: Any) -> Any:
    """A plain model with the merged weights."""
    plain = AutoModelForCausalLM.from_config(adapted.config).eval()
    plain.load_state_dict(adapted.shared.merged_weights(adapted))
    return plain


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "mamba", "llama"])
def test_all_linear_is_every_plain_linear_layer_of_the_decoder(folders: Any, kind: str, random_rows: Any) -> None:
    expected = {
        "gpt2": {"c_attn", "c_proj", "c_fc"},
        "qwen3_moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "mamba": {"in_proj", "x_proj"},
        "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    }
    config = config_of(folders, kind, lora={"rank": 2})
    [model] = attach_adapters(load_models(config.policies, lambda: (None, None)), config.policies, seed=0).values()
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters()}
    assert names == expected[kind]
    model.requires_grad_(True)(random_rows, labels=random_rows).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_tiny_model_is_asked_too() -> None:
    told = dry_run(config_from_dict({"task": "lookup", "rollout": {"group_size": 2}}))
    assert told.startswith("# model of 'default': Qwen3ForCausalLM, ")
    assert "rows shared; no logits" in told.splitlines()[0]
    assert build_model(build_tokenizer([])).num_parameters() > 0
