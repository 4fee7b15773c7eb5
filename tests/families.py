"""Two small models of different families: other tokens, another chat template, other ends of turns and contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def small_family(which: int) -> tuple[Any, Any]:
    """The tokenizer and the model of the first or the second family."""
    from turnwise.tasks.tiny import END, PAD, build_model, build_tokenizer

    texts = ["Which of the words is meant?", "An animal that gives milk, and a vehicle that flies"]
    tokenizer = build_tokenizer([texts[which]] * 3, vocab_size=(270, 300)[which])
    if which:
        tokenizer.chat_template = "<|system|>\n" + tokenizer.chat_template.replace(END, PAD)
        tokenizer.eos_token, tokenizer.pad_token = PAD, END
    sizes = {"hidden_size": 32, "num_hidden_layers": 1 + which, "max_position_embeddings": 1500 + 100 * which}
    return tokenizer, build_model(tokenizer, seed=which, **sizes)


def save_families(folder: Path) -> tuple[str, str]:
    """Save both, and return their folders."""
    for name, which in (("first", 0), ("second", 1)):
        for part in small_family(which):
            part.save_pretrained(folder / name)
    return str(folder / "first"), str(folder / "second")
