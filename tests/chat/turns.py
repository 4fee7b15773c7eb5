"""Tokenizers of families that end a turn in different ways, with templates of their own kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .families import byte_tokenizer

_SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}{% endfor %}"
)
_ALTERNATE = (
    "{% for m in messages %}{% if m.role not in ['tool'] and (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A family: its template, its special tokens with the end of sequence as the second, and its closing tokens."""

    template: str
    special: tuple[str, ...]
    close: str
    takes_first: bool = True
    takes_later: bool = True
    in_turn: bool = False
    """It refuses messages of one role behind each other, and a chat that begins with an answer."""

    @property
    def ends(self) -> list[str]:
        """The closing tokens one by one."""
        return self.close.replace("><", ">\n<").split("\n")

    def tokenizer(self) -> Any:
        return byte_tokenizer("", list(self.special), [], self.special[0], self.template)


FAMILIES = {
    "chatml": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        "<|im_end|>",
    ),
    "strict": Family(
        _SYSTEM_FIRST + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        takes_later=False,
    ),
    "llama3": Family(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "gemma": Family(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + _ALTERNATE
        + "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        takes_first=False,
        takes_later=False,
        in_turn=True,
    ),
    "drops": Family(
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        "<|im_end|>",
        takes_first=False,
        takes_later=False,
    ),
    "cohere": Family(
        "{% for m in messages %}<|START|><|{{ m.role | upper }}|>{{ m.content }}"
        "{% if m.role == 'assistant' %}<|END_RESPONSE|>{% endif %}<|END|>{% endfor %}"
        "{% if add_generation_prompt %}<|START|><|ASSISTANT|>{% endif %}",
        ("<bos>", "<|END|>", "<|START|>", "<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END_RESPONSE|>"),
        "<|END_RESPONSE|><|END|>",
    ),
    "phi4": Family(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}",
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
    ),
    "phi": Family(
        "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
        "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
    ),
    "mistral": Family(
        "{{ bos_token }}{% set ns = namespace(system='') %}{% set rest = messages %}"
        "{% if messages[0].role == 'system' %}"
        "{% set ns.system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}{% endif %}"
        + _ALTERNATE.replace("messages", "rest")
        + "{% for m in rest %}{% if m.role == 'user' %}"
        "[INST] {{ ns.system if loop.last or (rest | length) - loop.index0 == 1 else '' }}{{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "</s>",
        takes_later=False,
        in_turn=True,
    ),
}
