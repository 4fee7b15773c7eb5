"""A text per token: joined they are the whole text, whatever bytes the tokens cut."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.log.token_text import token_texts


@pytest.mark.parametrize("text", ["", "1 2\n3", "a 🎲 b", "</script><b>", "naïve – 数独", "tail 🎲"])
def test_joined_they_are_the_text(text):
    tokenizer = build_tokenizer(["hello world", "0123456789"], vocab_size=300)
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_stands_at_its_last_token_and_special_tokens_are_shown():
    tokenizer = build_tokenizer(["0123456789"], vocab_size=300)
    ids = [*tokenizer.encode("1🎲2", add_special_tokens=False), tokenizer.eos_token_id]
    assert token_texts(tokenizer, ids) == ["1", "", "", "", "🎲", "2", "<|end|>"]


def test_broken_bytes_end_somewhere():
    tokenizer = build_tokenizer(["0123456789"], vocab_size=300)
    half = tokenizer.encode("🎲", add_special_tokens=False)[:2]
    assert "".join(token_texts(tokenizer, half * 20)).count("\ufffd") >= 1
    assert token_texts(tokenizer, half)[-1].startswith("\ufffd")


def test_a_space_that_decoding_alone_would_drop_is_kept():
    pieces = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "?": 2}, unk_token="?"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, clean_up_tokenization_spaces=False)
    assert tokenizer.decode([1]) == "two"
    assert token_texts(tokenizer, [0, 1]) == ["one", " two"]
