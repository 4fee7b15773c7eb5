"""Tokenizers of model families: bytes with each family's real control tokens, and its own template as TRL ships it."""

from __future__ import annotations

import functools
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


# The marks of each kind of tokenizer, of which the second one ends a sequence, and the families of `renderers` with it.
HUNYUAN = ["think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value", "tool_responses", "tool_response"]
DEEPSEEK = ["User", "Assistant", "latest_reminder", "action", "query", "authority", "domain", "title", "read_url"]
INKLING = [
    "text",
    "thinking",
    "image",
    "audio_input",
    "xml",
    "invoke_tool_json",
    "invoke_tool_text",
    "model_end_sampling",
]
MARKS_OF: dict[str, list[str]] = {
    "chatml": [*QWEN, *VISION, *QWEN_MARKS],
    "llama": [*LLAMA, "<|end_of_text|>", "<|finetune_right_pad_id|>"],
    "glm": [*GLM, *GLM_MARKS],
    "hunyuan": [
        *(f"<｜hy_{name}:opensource｜>" for name in ("begin_of_sentence", "eos", "User", "Assistant")),
        "<｜reasoning_mode:opensource｜>",
        *(f"<{side}{name}:opensource>" for name in HUNYUAN for side in ("", "/")),
    ],
    "minimax": ["]~!b[", "[e~[", "]~b]", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
    "laguna": [
        *("<s>", "〈|EOS|〉", "<think>", "</think>", "<tool_call>", "</tool_call>"),
        *(f"<{side}{name}>" for name in ("assistant", "user", "system") for side in ("", "/")),
    ],
    "deepseek": [
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
        *(f"<｜tool▁{name}▁{side}｜>" for name in ("calls", "call", "outputs", "output") for side in ("begin", "end")),
    ],
    "deepseek-v4": [
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "｜DSML｜"),
        *(f"<｜{name}｜>" for name in DEEPSEEK),
    ],
    "kimi": [
        *("[BOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]"),
        *(f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")),
        *(f"<|media_{name}|>" for name in ("begin", "content", "pad", "end")),
    ],
    "gemma": [
        *("<bos>", "<eos>", '<|"|>', "<|think|>", "<|image|>"),
        *(
            f"<{a}{name}{b}>"
            for name in ("turn", "channel", "tool", "tool_call", "tool_response", "image")
            for a, b in (("|", ""), ("", "|"))
        ),
    ],
    "inkling": [
        *("<|x|>", "<|endoftext|>", "<|end_message|>", "<|audio_end|>", "<|unused_200053|>", "<|unused_200054|>"),
        *(f"<|message_{name}|>" for name in ("user", "model", "system", "tool")),
        *(f"<|content_{name}|>" for name in INKLING),
    ],
}
FAMILIES_OF: dict[str, str] = {
    "chatml": "qwen3 qwen3-vl qwen3.5 qwen3.6 qwen3.8 prime-qwen3 nemotron-3 nemotron-3-ultra nemotron-3.5",
    "llama": "llama-3",
    "glm": "glm-4.5 glm-5 glm-5.1 glm-5.3",
    "hunyuan": "hy3",
    "minimax": "minimax-m2",
    "laguna": "laguna-xs.2 laguna-m.1 laguna-xs-2.1 laguna-s-2.1",
    "deepseek": "deepseek-v3 deepseek-r1",
    "deepseek-v4": "deepseek-v4",
    "kimi": "kimi-k2 kimi-k2.5",
    "gemma": "gemma4",
    "inkling": "inkling",
}


def all_families() -> dict[str, str]:
    """The kind of tokenizer of each family of ``renderers`` that needs no network; empty where it isn't installed."""
    if importlib.util.find_spec("renderers") is None:
        return {}
    return {name: kind for kind, names in FAMILIES_OF.items() for name in names.split()}


@functools.cache
def kind_tokenizer(kind: str) -> Any:
    """Return the tokenizer of a kind in :data:`MARKS_OF`."""
    return byte_tokenizer("", MARKS_OF[kind][:2], MARKS_OF[kind][2:])
