"""Columns that only some samples and batches have, beside the fields of all of them.

The kind of a column says how its values are checked, joined, selected and laid out, so batches treat all columns alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from turnwise.types.passes import Restriction

ALLOWED = "allowed"
"""Name of the column of :class:`AllowedTokens`."""

TOKEN_ADVANTAGES = "token_advantages"
"""Name of the :class:`CompletionColumn` that is added to the advantages of rows."""


class Places(NamedTuple):
    """Some ``rows`` of a batch, in their order, and some of their ``tokens``, as places among the batch's targets."""

    rows: np.ndarray
    tokens: np.ndarray


class Stream(NamedTuple):
    """The input of a model: rows of ``lengths`` tokens each, in ``size`` positions, which rows may share.

    ``places(counts)`` are the positions of the first ``counts[i]`` tokens of each row, in turn.
    """

    lengths: np.ndarray
    size: int
    places: Callable[[np.ndarray], np.ndarray]


def flat(parts: Sequence[Any], dtype: Any = None) -> np.ndarray:
    """Join lists or arrays of numbers to one array ``[n]``, by default of the first one's type."""
    if set(map(type, parts)) == {list}:
        first = np.asarray(parts[0]).dtype if dtype is None else dtype
        return np.array(list(chain.from_iterable(parts)), dtype=first)
    arrays = [np.asarray(part, dtype=dtype) for part in parts]
    return np.concatenate(arrays, dtype=arrays[0].dtype, casting="unsafe")


class Column:
    """Base of all kinds. A sample's column has its own values; a batch's those of all rows, as NumPy arrays; and that
    of a micro-batch those of its tokens, as tensors."""

    of_sampler: ClassVar[bool] = False
    """True if it belongs to the model that sampled: passes of other models don't get it."""

    # -- from samples to a batch ---------------------------------------------------------------------------------------
    def check(self, prompt: int, completion: int, name: str) -> None:
        """Raise ``ValueError`` with the ``name`` unless it fits a sample of so many tokens."""

    def first(self, prompt: int) -> int:
        """Return the first of a prompt's tokens that the column has a value of; ``prompt``, their number, for none."""
        return prompt

    def behind(self, start: int) -> Self:
        """Return the column without the values of the first ``start`` tokens of the prompt."""
        return self

    @classmethod
    def join(cls, parts: Sequence[Any], lengths: np.ndarray) -> Column:
        """Join the columns of samples; ``None`` for those without. ``lengths [B, 2]`` count the targets of each row:
        those of the prompt's end, and the completion."""
        raise NotImplementedError

    @classmethod
    def checked(
        cls, parts: Sequence[Any], lengths: np.ndarray, counts: np.ndarray, name: Callable[[int], str]
    ) -> Column:
        """Return :meth:`join` of ``parts``, after :meth:`check` of each; ``name(row)`` is the name of one.

        ``lengths [B, 2]`` count whole prompts and completions, ``counts [B, 2]`` the targets of each row.
        """
        own = list(parts)
        for row, (prompt, completion) in enumerate(lengths.tolist()):
            if (part := own[row]) is not None:
                part.check(prompt, completion, name(row))
                own[row] = part.behind(prompt - int(counts[row, 0]))
        return cls.join(own, counts)

    def trained(self, loss_mask: np.ndarray) -> np.ndarray:
        """Return the mask ``[N]`` of a batch's targets that train without those that can't."""
        return loss_mask

    # -- from a batch to micro-batches ---------------------------------------------------------------------------------
    def select(self, places: Places) -> Self:
        """Return the values of these rows, or of these tokens."""
        raise NotImplementedError

    def read(self, mask: np.ndarray) -> np.ndarray:
        """Return the mask ``[N]`` of tokens whose log-probs are read, with others that the column needs."""
        return mask

    def lay_out(self, stream: Stream) -> Column | None:
        """Return the column of a micro-batch, of which this has the tokens that are read; ``None`` if it needs none."""
        return self

    def mapped(self, change: Callable[[Any], Any]) -> Self:
        """Return a copy with each array as ``change`` makes it, such as a tensor, or one on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        changed = {name: change(value) for name, value in values.items() if hasattr(value, "dtype")}
        return replace(self, **changed)  # type: ignore[type-var]

    # -- in a micro-batch ----------------------------------------------------------------------------------------------
    @property
    def shares(self) -> Mapping[str, tuple[int, int]]:
        """Metrics of an update, each as a part and a whole, which are summed over micro-batches."""
        return {}

    def restriction(self, tokens: Any) -> Restriction | None:
        """Return which of ``tokens``, places in the micro-batch, have distributions over some tokens alone."""
        return None

    def temperatures(self, temperature_N: Any) -> Any:
        """Return the temperatures of the tokens, with those that the column changes."""
        return temperature_N

    def padded(self, place: Any) -> Self:
        """Return the column for padded rows; ``place`` are the positions in the stream, -1 for padding."""
        return self

    def during(self, lm: Any, last: Any = None) -> AbstractContextManager[Any]:
        """Return the context of a pass of the causal LM ``lm``; ``last`` are the positions that its last MLP takes."""
        return nullcontext()


@dataclass(frozen=True, eq=False)
class RowColumn(Column):
    """One number per row: a sample's own, or those of all rows ``[B]``. Samples without one get -1."""

    values: Any

    @classmethod
    def join(cls, parts: Sequence[Self | None], lengths: np.ndarray) -> Self:
        return cls(np.array([-1 if part is None else part.values for part in parts]))

    def select(self, places: Places) -> Self:
        return replace(self, values=self.values[places.rows])


@dataclass(frozen=True, eq=False)
class TokenColumn(Column):
    """One number per token: those of a sample's prompt and completion ``[P + C]``, or those of a stream ``[N]``.

    Samples without it get 0.
    """

    values: Any

    dtype: ClassVar[Any] = None
    """Type of the joined values, by default that of the first sample's."""
    of_tokens: ClassVar[tuple[bool, bool]] = (True, True)
    """Which tokens have values: those of prompts, those of completions."""
    per: ClassVar[str] = "token of prompt and completion"
    """What has a value, in errors."""

    def check(self, prompt: int, completion: int, name: str) -> None:
        length = prompt * self.of_tokens[0] + completion * self.of_tokens[1]
        try:
            values = np.asarray(self.values, dtype=self.dtype)
            valid = values.shape == (length,) and bool(np.isfinite(values).all())
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(f"{name}={self.values!r:.80}: expected {length} finite numbers, one per {self.per}")

    def first(self, prompt: int) -> int:
        return 0 if self.of_tokens[0] else prompt

    def behind(self, start: int) -> Self:
        return replace(self, values=np.asarray(self.values)[start:]) if self.of_tokens[0] else self

    @classmethod
    def join(cls, parts: Sequence[Self | None], lengths: np.ndarray) -> Self:
        has = np.fromiter((part is not None for part in parts), dtype=bool, count=len(parts))
        values = flat([part.values for part in parts if part is not None], cls.dtype)
        joined = np.zeros(lengths.sum(), dtype=values.dtype)
        joined[np.repeat((has[:, None] & np.array(cls.of_tokens)).ravel(), lengths.ravel())] = values
        return cls(joined)

    @classmethod
    def checked(
        cls, parts: Sequence[Any], lengths: np.ndarray, counts: np.ndarray, name: Callable[[int], str]
    ) -> Column:
        """Look at all values at once, and at each sample's where that finds fault."""
        own = [part for part in parts if part is not None]
        has = np.array([part is not None for part in parts])
        types = {getattr(part.values, "dtype", None) for part in own}
        try:
            same = cls.check is TokenColumn.check and (cls.dtype is not None or len(types) == 1)
            fits = not cls.of_tokens[0] and [len(part.values) for part in own] == lengths[has, 1].tolist()
            joined = cls.join(parts, counts) if same and fits else None
            if joined is not None and np.isfinite(joined.values).all():
                return joined
        except (TypeError, ValueError):
            pass
        return super().checked(parts, lengths, counts, name)

    def select(self, places: Places) -> Self:
        return replace(self, values=self.values[places.tokens])


@dataclass(frozen=True, eq=False)
class CompletionColumn(TokenColumn):
    """One number per completion token: a sample's ``[C]``, or those of a stream ``[N]`` float32, 0 on prompts."""

    dtype: ClassVar[Any] = np.float32
    of_tokens: ClassVar[tuple[bool, bool]] = (False, True)
    per: ClassVar[str] = "completion token"


@dataclass(frozen=True, eq=False)
class AllowedTokens(Column):
    """The tokens that grammars allowed at ``n`` positions; equal masks are stored once.

    Example: two positions, the second of which allowed only token 3 of 8:
    ``AllowedTokens(np.array([-1, 0]), np.array([[8]], dtype=np.uint8))``
    """

    mask_index: Any
    """``[n]`` int64: the row of ``masks``; -1 where all tokens were allowed."""
    masks: Any
    """``[U, W]`` uint8: bit ``b`` of byte ``w`` is token ``8 * w + b``. Tokens beyond the last byte are not allowed."""

    @classmethod
    def join(cls, parts: Sequence[AllowedTokens | None], lengths: np.ndarray) -> AllowedTokens:
        mask_index = np.full(lengths.sum(), -1, dtype=np.int64)
        rows: dict[bytes, int] = {}
        widest = max((part.masks.shape[1] for part in parts if part is not None), default=0)  # of several vocabularies
        for part, end in zip(parts, lengths.sum(axis=1).cumsum(), strict=True):
            if part is not None:
                masks = [mask.tobytes().ljust(widest, b"\0") for mask in part.masks]
                places = np.array([rows.setdefault(mask, len(rows)) for mask in masks])
                mask_index[end - len(part.mask_index) : end] = places[part.mask_index]
        joined = np.frombuffer(bytearray().join(rows), dtype=np.uint8).reshape(len(rows), -1)
        return AllowedTokens(mask_index, joined)

    def trained(self, loss_mask: np.ndarray) -> np.ndarray:
        """Leave out tokens without an alternative, which are no choice of the policy."""
        single = np.unpackbits(self.masks, axis=1).sum(axis=1) == 1
        return np.where((self.mask_index >= 0) & single[self.mask_index], np.uint8(0), loss_mask)

    def select(self, places: Places) -> AllowedTokens:
        return replace(self, mask_index=self.mask_index[places.tokens])

    def lay_out(self, stream: Stream) -> AllowedTokens | None:
        return None if (self.mask_index < 0).all() else self
