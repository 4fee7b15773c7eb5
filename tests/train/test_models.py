from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from turnwise.arena import Arena
from turnwise.chat import ChatFormat
from turnwise.inference import TransformersClient
from turnwise.inference.common.hf_model import recomputes
from turnwise.inference.common.model_files import read_config, read_generation_config, read_model, read_tokenizer
from turnwise.inference.weights.lora import AdaptedModel, activated, shared_bases
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.checkpoint.files import CheckpointError, read_tensors, write_tensors
from turnwise.train.config.policies import LoraConfig, PolicyConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import (
    attach_adapters,
    check_models,
    check_targets,
    load_model,
    load_models,
    load_references,
    sharing,
)
from turnwise.types import Actor

LORA = LoraConfig(rank=2)


def never():
    raise AssertionError("no policy is tiny")


def save(folder, text="add the digits", **sizes):
    tokenizer = build_tokenizer([text] * 3, vocab_size=270)
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, **{"hidden_size": 32, "num_hidden_layers": 1, **sizes}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "two", num_hidden_layers=2)


def storages(model):
    return {parameter.data_ptr() for parameter in model.parameters()}


def test_who_shares_a_base():
    policies = {
        "a": PolicyConfig(path="m", lora=LORA),
        "b": PolicyConfig(path="m", lora=LORA, trainable=False),
        "half": PolicyConfig(path="m", dtype="bfloat16", lora=LORA),
        "still": PolicyConfig(path="m", trainable=False),
        "full": PolicyConfig(path="m"),
        "twin": PolicyConfig(path="m"),
        "other": PolicyConfig(path="n", lora=LORA),
    }
    alone = [["half"], ["full"], ["twin"], ["other"]]
    assert sorted(sharing(policies)) == sorted([["a", "b", "still"], *alone])
    assert sorted(sharing(policies, share_frozen=False)) == sorted([["a", "b"], ["still"], *alone])


def test_one_copy_of_a_shared_base(one, two):
    policies = {
        "a": PolicyConfig(path=one, lora=LORA),
        "b": PolicyConfig(path=one, lora=LoraConfig(rank=4, target_modules=["q_proj"])),
        "c": PolicyConfig(path=one, lora=LORA),
        "still": PolicyConfig(path=one, trainable=False),
        "full": PolicyConfig(path=one),
        "other": PolicyConfig(path=two, lora=LORA),
    }
    models = attach_adapters(load_models(policies, never), policies, seed=0)
    assert list(models) == list(policies)
    base, other = shared_bases(models.values())
    for name in ("a", "b", "c", "still"):
        assert storages(models[name].activate()) == storages(base.model), name
    assert models["other"].shared is other and not isinstance(models["full"], AdaptedModel)
    for name in ("full", "other"):
        assert storages(models[name].activate() if name == "other" else models[name]).isdisjoint(storages(base.model))
    ids = torch.tensor([[1, 2, 3]])
    expected = models["full"](ids).logits
    for name in ("a", "b", "still"):
        assert torch.equal(models[name](ids).logits, expected), "adapters begin without effect"
    first = {name: next(models[name].parameters()) for name in "abc"}
    assert not torch.equal(first["a"][:2], first["b"][:2]), "each is drawn anew"
    assert first["a"].shape == first["c"].shape and not torch.equal(first["a"], first["c"])


def test_gradient_checkpointing_of_a_base_and_of_a_model(one, two):
    policies = {
        "a": PolicyConfig(path=one, lora=LORA),
        "b": PolicyConfig(path=one, lora=LORA, gradient_checkpointing=True),
        "c": PolicyConfig(path=one),
        "d": PolicyConfig(path=one, gradient_checkpointing=True),
    }
    models = attach_adapters(load_models(policies, never), policies, seed=0)
    assert [recomputes(activated(model)) for model in models.values()] == [True, True, False, True]
    policies = {
        "a": PolicyConfig(path=one, reference=two),
        "b": PolicyConfig(path=one, reference=two, lora=LORA),
        "c": PolicyConfig(path=two, reference=one),
        "still": PolicyConfig(path=two, reference=one, trainable=False),
        "plain": PolicyConfig(path=one),
    }
    # References are loaded once each.
    references = load_references(policies, never)
    assert references.keys() == {"a", "b", "c"}
    assert references["a"] is references["b"] is not references["c"]
    assert (references["a"].config.num_hidden_layers, references["c"].config.num_hidden_layers) == (2, 1)


def test_the_tiny_model_is_equal_for_all():
    tokenizer = build_tokenizer(["abc"], vocab_size=270)

    def tiny():
        return tokenizer, build_model(tokenizer, hidden_size=32, num_hidden_layers=1, seed=3)

    policies = {"a": PolicyConfig(), "b": PolicyConfig(dtype="bfloat16")}
    assert check_models(policies, tiny).common() is tokenizer
    models = load_models(policies, tiny)
    assert {parameter.dtype for parameter in models["b"].parameters()} == {torch.bfloat16}
    for a, b in zip(models["a"].parameters(), models["b"].parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b) and a.data_ptr() != b.data_ptr()


def test_all_that_is_wrong_with_paths_is_told_at_once(tmp_path, one):
    short = tmp_path / "short"
    save(short)
    build_model(build_tokenizer(["a"], vocab_size=261), hidden_size=32, num_hidden_layers=1).save_pretrained(short)
    policies = {
        "a": PolicyConfig(path=one),
        "c": PolicyConfig(path="no/such/folder"),
        "d": PolicyConfig(path=one, reference=str(short)),
    }
    with pytest.raises(ConfigError) as error:
        check_models(policies, never)
    first, second = str(error.value).splitlines()
    assert "'policies.c.path' = 'no/such/folder'" in first
    assert f"'policies.d.reference' = {str(short)!r}: the model embeds 261 tokens, its tokenizer has 2" in second


def test_policies_of_one_family_share_a_tokenizer_and_others_have_their_own(tmp_path, one, two):
    unlike, plain = save(tmp_path / "unlike", text="quite other words"), save(tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    policies = {"a": PolicyConfig(path=one), "b": PolicyConfig(path=unlike), "c": PolicyConfig(path=two)}
    policies |= {"tiny": PolicyConfig(), "plain": PolicyConfig(path=plain)}
    found = check_models(policies, lambda: (build_tokenizer(["tiny"], vocab_size=270), None))
    assert found["a"] is found["c"] is found["plain"] is found["c@past1"]
    assert found["b"].get_vocab() == read_tokenizer(unlike).get_vocab() != found["tiny"].get_vocab()
    # An equal vocabulary with another template is another chat format.
    other = read_tokenizer(two)
    other.chat_template += " "
    other.save_pretrained(tmp_path / "other")
    read_config(two).save_pretrained(tmp_path / "other")
    found = check_models({"a": PolicyConfig(path=one), "b": PolicyConfig(path=str(tmp_path / "other"))}, never)
    assert not found.alike("a", "b") and found["b"].chat_template == other.chat_template
    with pytest.raises(ConfigError, match=r"'policies.b.path' = .*: its tokenizer has no chat template"):
        check_models({"a": PolicyConfig(path=unlike), "b": PolicyConfig(path=plain)}, never)


def test_paths_that_can_not_be(tmp_path, monkeypatch):
    # A folder that is not there is told so.
    with pytest.raises(ConfigError, match=r"'policies.a.path' = '.*/none': there is no such folder"):
        check_models({"a": PolicyConfig(path=str(tmp_path / "none"))}, never)
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("models/none", "runs/one/policies/default"):
        with pytest.raises(ConfigError, match=f"'policies.a.path' = '{path}': there is no such folder"):
            check_models({"a": PolicyConfig(path=path)}, never)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"'nobody/none': there is no folder of this name, and as a name of the Hub"):
        check_models({"a": PolicyConfig(path="nobody/none")}, never)
    # An instruction model is asked for.
    tokenizer = build_tokenizer(["abc"], vocab_size=270)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    build_model(tokenizer, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        check_models({"a": PolicyConfig(path=str(tmp_path))}, never)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "tokenizer.json"])
def test_files_of_absurd_size_are_refused(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**31)
    with pytest.raises(ConfigError, match=f"{name} has 2147483648 bytes: expected at most"):
        check_models({"a": PolicyConfig(path=str(tmp_path))}, never)


@pytest.mark.parametrize(
    "read", [read_config, read_tokenizer, read_generation_config, lambda path: read_model(path, "float32")]
)
@pytest.mark.parametrize("name", ["config.json", "model-00001-of-2.safetensors"])
def test_every_reader_of_a_models_files_refuses_absurd_sizes(tmp_path, read, name):
    with open(tmp_path / name, "wb") as file:
        file.write((90 << 20).to_bytes(8, "little"))
        file.truncate(91 << 20)
    with pytest.raises(ValueError, match=f"{name} has .*: expected at most"):
        read(str(tmp_path))


def test_a_file_of_many_more_tensors_than_the_model_has_is_not_read(tmp_path):
    file = tmp_path / "policy-default.safetensors"
    write_tensors({str(i): torch.zeros(1) for i in range(3000)}, file)
    assert len(read_tensors(file, 3000)) == 3000
    with pytest.raises(CheckpointError, match=r"has a table of \d+ bytes: .* for 10 tensors"):
        read_tensors(file, 10)


def test_turns_end_where_any_generation_config_says(tmp_path):
    names = ["<|pad|>", "<|system|>", "<|user|>"]
    first, second = save(tmp_path / "first"), save(tmp_path / "second")
    ids = build_tokenizer(["add the digits"] * 3, vocab_size=270).convert_tokens_to_ids(names)
    GenerationConfig(eos_token_id=ids[:2]).save_pretrained(first)
    GenerationConfig(eos_token_id=ids[2]).save_pretrained(second)
    found = check_models({"a": PolicyConfig(path=first), "b": PolicyConfig(path=second)}, never).common()
    assert ChatFormat(found).stop_token_ids == (found.eos_token_id, *ids)
    assert load_model(first, "float32", never, empty=True).generation_config.eos_token_id == ids[:2]
    (tmp_path / "second" / "generation_config.json").unlink()
    found = check_models({"a": PolicyConfig(path=second)}, never).common()
    assert ChatFormat(found).stop_token_ids == (found.eos_token_id,)
    (tmp_path / "second" / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"'policies.a.path' = .*second'"):
        check_models({"a": PolicyConfig(path=second)}, never)


def test_the_client_of_a_model_in_memory_ends_turns_there_too():
    tokenizer = build_tokenizer(["abc"], vocab_size=270)
    model = build_model(tokenizer, hidden_size=32, num_hidden_layers=1)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    arena = Arena(TransformersClient(model, tokenizer))
    arena.add_actor(Actor("solver"))
    assert arena.prepare("solver", "x")[1].sampling.stop_token_ids == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_target_modules_that_the_model_lacks(one):
    policies = {"a": PolicyConfig(path=one, lora=LoraConfig(target_modules=["w_pack"]))}
    with pytest.raises(ConfigError, match=r"'policies.a.lora.target_modules' = \['w_pack'\]: .*not found"):
        attach_adapters(load_models(policies, never), policies, seed=0)
    with pytest.raises(ConfigError, match=r"'policies.a.lora.target_modules': the model has no module 'q_prj'.*q_proj"):
        targets = {"a": PolicyConfig(path=one, lora=LoraConfig(target_modules=["k_proj", "q_prj"]))}
        check_targets(load_models(targets, never), targets)
    fine = {"a": PolicyConfig(path=one, lora=LoraConfig(target_modules=["self_attn.k_proj", "q_proj"]))}
    check_targets(load_models(fine, never), fine)
