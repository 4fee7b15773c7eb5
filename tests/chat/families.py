"""Tokenizers of model families: bytes with each family's real control tokens, and its own template as TRL ships it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TRL = importlib.util.find_spec("trl")
TEMPLATES = Path("" if TRL is None else str(TRL.origin)).parent / "chat_templates"

CHATML = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that no family has."""

QWEN = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
QWEN_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
LLAMA = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"]
GLM = ["[gMASK]", "<|endoftext|>", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
GLM_MARKS = [*QWEN_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"]

# Template, special tokens (the second one ends a sequence), further marks that are not special.
CHAT_FAMILIES: dict[str, tuple[str, list[str], list[str]]] = {
    "qwen3": ("qwen3.jinja", QWEN, QWEN_MARKS),
    "qwen3.5": ("qwen3_5_think.jinja", QWEN + VISION, QWEN_MARKS),
    "llama-3": ("llama3_1.jinja", [*LLAMA, "<|end_of_text|>", "<|finetune_right_pad_id|>"], []),
    "glm-4.5": ("glm4moe.jinja", GLM, GLM_MARKS),
    "template": ("", QWEN, QWEN_MARKS[:2]),
}


def chat_tokenizer(family: str) -> Any:
    """Return the tokenizer of a family in :data:`CHAT_FAMILIES`."""
    file, special, marks = CHAT_FAMILIES[family]
    return byte_tokenizer(file, special, marks, bos=special[0] if special[0].startswith("<|begin") else None)


def byte_tokenizer(
    file: str, special: list[str], marks: list[str], bos: str | None = None, chatml: str = CHATML
) -> Any:
    """Return a tokenizer of bytes with these tokens, and TRL's template in ``file``, or ``chatml`` without one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    bpe.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=bos,
        eos_token=special[1],
        chat_template=(TEMPLATES / file).read_text(encoding="utf-8") if file else chatml,
        clean_up_tokenization_spaces=False,
    )


def installed_families() -> list[str]:
    """The families whose templates are there: all of them where TRL and renderers are installed."""
    whole = TRL is not None and importlib.util.find_spec("renderers") is not None
    return list(CHAT_FAMILIES) if whole else ["template"]
