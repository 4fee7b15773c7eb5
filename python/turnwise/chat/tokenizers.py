"""turnwise's copy of a tokenizer, the model's further tokens that end a turn, and the bytes of tokens."""

from __future__ import annotations

import copy
import json
import warnings
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

from turnwise.types import ByPolicy, Tokenizers

_COPIES: dict[int, tuple[weakref.ref[Any], Hashable, Any]] = {}
"""For each tokenizer that was copied: itself, its state at that time, and the copy."""


def own_copy(tokenizer: Any) -> Any:
    """Return the copy of a Hugging Face tokenizer that only turnwise uses; other tokenizers are returned as they are.

    A fast tokenizer keeps truncation, padding and special tokens as a state that its users share, in all threads. User
    code that changes them must not change prompts. The copy is made once for each state, and it neither truncates nor
    pads.
    """
    if not hasattr(tokenizer, "added_tokens_decoder") or getattr(tokenizer, "owned", None) == id(tokenizer):
        return tokenizer
    key = id(tokenizer)
    state = (tokenizer.chat_template, len(tokenizer), str(tokenizer.special_tokens_map), ends_of(tokenizer))
    entry = _COPIES.get(key)
    if entry is not None and entry[0]() is tokenizer and entry[1] == state:
        return entry[2]
    try:
        copied = copy.deepcopy(tokenizer)
    except Exception as error:  # a tokenizer with code of its own may raise anything
        warnings.warn(
            f"tokenizer: {type(tokenizer).__name__} can't be copied ({type(error).__name__}: {error}), so code that "
            "truncates with it cuts prompts",
            stacklevel=2,
        )
        return tokenizer
    backend = getattr(copied, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    copied.owned = id(copied)
    _COPIES[key] = (weakref.ref(tokenizer, lambda _: _COPIES.pop(key, None)), state, copied)
    return copied


def own_copies(tokenizers: Tokenizers) -> ByPolicy[Any]:
    """Return the :func:`own_copy` of each policy's tokenizer."""
    return ByPolicy.of(tokenizers, "tokenizer").mapped(own_copy)


# -- ends of turns -----------------------------------------------------------------------------------------------------
def keep_ends(tokenizer: Any, generation_config: Any) -> None:
    """Note in ``tokenizer`` the tokens with which the model of ``generation_config`` ends a turn.

    They are its ``eos_token_id``, an id or a list. An id that the tokenizer doesn't have is left out, with a warning.
    Ids from a model's configuration alone count only if they are special tokens, as its defaults fit no tokenizer.
    """
    eos = getattr(generation_config, "eos_token_id", None)
    given = [int(token) for token in (eos if isinstance(eos, Iterable) else [eos]) if token is not None]
    if getattr(generation_config, "_from_model_config", False):
        added = getattr(tokenizer, "added_tokens_decoder", {})
        given = [token for token in given if token in added]
    elif unknown := [token for token in given if hasattr(tokenizer, "__len__") and token >= len(tokenizer)]:
        warnings.warn(
            f"generation_config.eos_token_id={eos!r}: the tokenizer has no token {unknown}, so no turn ends there",
            stacklevel=2,
        )
        given = [token for token in given if token not in unknown]
    ends = tuple(dict.fromkeys((*ends_of(tokenizer), *given)))
    if ends != ends_of(tokenizer):
        tokenizer.turn_ends = ends


def ends_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that :func:`keep_ends` noted."""
    return getattr(tokenizer, "turn_ends", ())


# -- bytes of tokens ---------------------------------------------------------------------------------------------------
class TokenBytes:
    """Returns the bytes that a token stands for, which may be a part of a character: ``TokenBytes(tokenizer)(token)``.

    They come from the vocabulary of byte-level BPE (``"Ġa"``) or of byte fallback (``"<0xE2>"``). Joined, the bytes of
    a completion's tokens are the bytes of its text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        self._steps = _decoding_steps(tokenizer)

    def __call__(self, token: int) -> bytes:
        tokenizer, steps = self._tokenizer, self._steps
        piece = tokenizer.convert_ids_to_tokens(int(token)) if hasattr(tokenizer, "convert_ids_to_tokens") else None
        if isinstance(piece, str) and token not in self._added:
            if "ByteLevel" in steps:
                return bytes(_BYTE_OF[character] for character in piece if character in _BYTE_OF)
            if "ByteFallback" in steps and len(piece) == 6 and piece.startswith("<0x"):
                return bytes([int(piece[3:5], 16)])
            if steps & {"Metaspace", "Replace", "ByteFallback"}:
                return piece.replace("▁", " ").encode()
        return str(tokenizer.decode([token], skip_special_tokens=False)).encode()


def _decoding_steps(tokenizer: Any) -> set[str]:
    """Return the kinds of the steps by which a tokenizer decodes. One without a decoder counts as SentencePiece."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return {"ByteLevel"} if hasattr(tokenizer, "byte_decoder") else {"ByteFallback"}
    left, steps = [json.loads(decoder.__getstate__())], set()
    while left:
        step = left.pop()
        steps.add(step["type"])
        left += step.get("decoders", ())
    return steps


_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
"""The byte of each character of byte-level BPE: printable bytes stand for themselves, others from U+0100."""
