"""Decodes tokens one by one, for people to read."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.types import Tokenizer

_LONGEST = 8
"""Most tokens that one character may span; a longer broken sequence is shown as it is."""


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return one string per token; joined they are the text of all tokens, including special ones.

    A character that spans several tokens (an emoji in a byte-level vocabulary) belongs to the last of them; the others
    are empty. Each token is decoded together with the one before it, as some tokenizers drop a space at the start of a
    text.
    """
    texts: list[str] = []
    before = start = 0
    for end in range(1, len(token_ids) + 1):
        known = tokenizer.decode(token_ids[before:start], skip_special_tokens=False)
        text = tokenizer.decode(token_ids[before:end], skip_special_tokens=False)
        if text.endswith("\ufffd") and end - start < _LONGEST and end < len(token_ids):
            texts.append("")
            continue
        texts.append(text.removeprefix(known))
        before, start = start, end
    return texts
