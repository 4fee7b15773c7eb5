from __future__ import annotations

import json
import subprocess
import sys

import pytest

from turnwise.tasks.sudoku.grid import sudoku_puzzles
from turnwise.tasks.sudoku.prompts import demonstrations
from turnwise.tasks.tiny import build_model, build_tokenizer

DEMONSTRATIONS = demonstrations(sudoku_puzzles("train", 50, 0), ("proposer", "reviser", "solver"), 0)
TEXTS = [m["content"] for _, messages, _ in DEMONSTRATIONS for m in messages] + [text for *_, text in DEMONSTRATIONS]
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12+3?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TEXTS)


def ids(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)


def test_digits_newlines_and_punctuation_stand_alone(tokenizer):
    grid = "1_3_\n3412\n_143\n4_21"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(grid)["input_ids"])
    assert tokens == ["Ċ" if cell == "\n" else cell for cell in grid]
    for text in ("rows 12.5%", "a1b22", "7.\n\n8", "digits.\n1"):
        for token in tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]):
            assert len(token) == 1 or not set(token) & set("0123456789.%Ċ"), (text, token)


@pytest.mark.parametrize(
    "text", ["", " ", "Fill the sudoku.", "naïve “quotes” 日本 🙂", "a  b\n\n\tc\r\n", "1 2 3 , . !"]
)
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_message_costs_two_tokens_beside_its_text(tokenizer):
    text = sum(len(tokenizer(message["content"])["input_ids"]) for message in CHAT)
    plain, asked = ids(tokenizer, CHAT), ids(tokenizer, CHAT, add_generation_prompt=True)
    assert len(plain) == text + 2 * len(CHAT)
    assert asked == [*plain, tokenizer.convert_tokens_to_ids("<|assistant|>")]
    answered = ids(tokenizer, [*CHAT, {"role": "assistant", "content": "15"}])
    assert answered == [*asked, *tokenizer("15")["input_ids"], tokenizer.eos_token_id]


def test_tools_are_part_of_the_system_message(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    chat = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    assert tokenizer.decode(ids(tokenizer, chat, tools=[tool], add_generation_prompt=True)) == (
        "<|system|>Add.\nadd(a, b)<|end|><|user|>12+3?<|end|><|assistant|>"
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>'
        "<|user|><tool_response>3</tool_response><|end|><|assistant|>"
    )
    assert ids(tokenizer, CHAT, tools=[]) == ids(tokenizer, CHAT)


def test_special_tokens(tokenizer):
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token == "<|pad|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"
    assert tokenizer.decode(ids(tokenizer, CHAT), skip_special_tokens=True) == "Add.12+3?"
    with pytest.raises(Exception, match="role robot"):
        ids(tokenizer, [{"role": "robot", "content": "x"}])


def test_sudoku_prompts_stay_short(tokenizer):
    first, later = [], []
    for _, messages, text in DEMONSTRATIONS:
        told = "Wrong" in messages[-1]["content"]  # of a draft, which costs at most four words and 12 numbers
        (later if told else first).append(len(ids(tokenizer, messages, add_generation_prompt=True)))
        assert len(tokenizer(text)["input_ids"]) == 19
    assert max(first) <= 41 and max(later) <= 110


def test_save_and_load_round_trip(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert ids(loaded, CHAT, add_generation_prompt=True) == ids(tokenizer, CHAT, add_generation_prompt=True)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert loaded.padding_side == "left"


def test_the_tokenizer_depends_on_the_texts_alone(tokenizer):
    code = (
        "import sys, json; from turnwise.tasks.tiny import build_tokenizer;"
        "print(build_tokenizer(json.load(sys.stdin)).backend_tokenizer.to_str())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(TEXTS), capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == tokenizer.backend_tokenizer.to_str()


def test_vocabulary_is_bounded():
    assert len(build_tokenizer(TEXTS, vocab_size=270)) == 270
    assert len(build_tokenizer([], vocab_size=512)) == 261
    with pytest.raises(ValueError, match=r"vocab_size=100.*261"):
        build_tokenizer(TEXTS, vocab_size=100)


def test_the_model_is_tiny_seeded_and_leaves_the_global_state_alone(tokenizer):
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = build_model(tokenizer)
    assert torch.equal(torch.rand(3), expected)
    assert 0.7e6 < model.num_parameters() < 1.2e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    same, other = build_model(tokenizer), build_model(tokenizer, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)
    logits = model(torch.tensor([ids(tokenizer, CHAT)])).logits
    assert logits.shape[-1] == len(tokenizer) and torch.isfinite(logits).all()


def test_heads_that_do_not_fit_are_refused(tokenizer):
    with pytest.raises(ValueError, match="num_key_value_heads=3"):
        build_model(tokenizer, num_key_value_heads=3)
