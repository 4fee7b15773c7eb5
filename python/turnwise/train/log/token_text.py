"""The text of each single token, for people to read."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.types import Tokenizer

_LONGEST = 8
"""Tokens that one character may be spread over; after so many a broken one is shown as it is."""


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """One string per token; joined they are the text of all of them, special tokens included.

    A character spread over several tokens (an emoji in a byte-level vocabulary) stands at the last of them. Tokens are
    decoded behind the one before, since some tokenizers drop the space at the start of a text.
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
