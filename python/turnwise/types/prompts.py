"""Prompts that share what they have in common: a later prompt of a chat holds only what is new in it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
C = TypeVar("C", bound=type)

TOKENS = "i"
"""Type code of an array of token ids: int32."""

GIVEN = "given"
"""Origin of tokens that a caller of the arena rendered, such as a gateway: no native chat goes on from them."""


class Growing(Generic[T]):
    """Items that several prefixes share: a list of messages, or an array of token ids. It only grows."""

    __slots__ = ("items",)

    def __init__(self, items: Any) -> None:
        self.items = items

    def grown(self, length: int, new: Any) -> Growing[T]:
        """Return items that begin with the first ``length`` of these and ``new``: these, if they end there."""
        if len(self.items) == length:
            self.items.extend(new)
            return self
        return Growing(self.items[:length] + new)


class Prefix(Sequence[T]):
    """The first ``length`` items of ``shared``, followed by ``tail``. It never changes.

    Example: ``first = Prefix.of_tokens([1, 17, 9])`` and ``longer = first.followed([20, 2], [5])`` share their
    beginning: ``list(longer) == [1, 17, 9, 20, 2, 5]``.
    """

    __slots__ = ("length", "origin", "shared", "tail")

    def __init__(self, shared: Growing[T] | None, length: int, tail: Any, origin: str = "") -> None:
        self.shared, self.length, self.tail, self.origin = shared, length, tail, origin

    @classmethod
    def of_tokens(cls, ids: Iterable[int]) -> Prefix[int]:
        """Return token ids. Raises ``ValueError`` for one that is no int32, and ``TypeError`` for what is no number."""
        return Prefix(None, 0, as_tokens(ids))

    @classmethod
    def of_messages(cls, messages: Iterable[T]) -> Prefix[T]:
        return Prefix(None, 0, list(messages))

    def followed(self, closed: Any, tail: Any, origin: str = "") -> Prefix[T]:
        """Return these items, ``closed`` and ``tail``. All but ``tail`` become shared."""
        kind = type(self.tail)
        new = self.tail + _as(kind, closed)
        if not new:
            return Prefix(self.shared, self.length, _as(kind, tail), origin)
        shared = Growing(new) if self.shared is None else self.shared.grown(self.length, new)
        return Prefix(shared, self.length + len(new), _as(kind, tail), origin)

    def rejoined(self, closed: Any, tail: Any, origin: str = "") -> Prefix[T]:
        """Return the shared items, ``closed`` and ``tail``, without the tail of this prefix."""
        kind = type(self.tail)
        new = _as(kind, closed)
        shared = Growing(new) if self.shared is None else self.shared.grown(self.length, new)
        return Prefix(shared, self.length + len(new), _as(kind, tail), origin)

    def first(self, length: int) -> Prefix[T]:
        """Return the first ``length`` items, at most all of them."""
        if length >= len(self):
            return self
        return Prefix(self.shared, min(length, self.length), self.tail[: max(length - self.length, 0)])

    def behind(self, length: int) -> Any:
        """Return a new list, or array of int32, of the items after the first ``length``."""
        tail = self.tail[max(length - self.length, 0) :]
        return tail if self.shared is None else self.shared.items[length : self.length] + tail

    def whole(self) -> Any:
        """Return a new list, or array of int32, of all items."""
        return self.tail[:] if self.shared is None else self.shared.items[: self.length] + self.tail

    def tolist(self) -> list[T]:
        return list(self.whole())

    def __len__(self) -> int:
        return self.length + len(self.tail)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            if self.shared is None:
                return list(self.tail[index])
            begin, end, step = index.indices(len(self))
            if step != 1:
                return list(self.whole()[index])
            first = self.shared.items[begin : min(end, self.length)] if begin < self.length else []
            return [*first, *self.tail[max(begin - self.length, 0) : max(end - self.length, 0)]]
        place = index + len(self) if index < 0 else index
        if place < 0:
            raise IndexError("index out of range")
        found: T = self.shared.items[place] if self.shared and place < self.length else self.tail[place - self.length]
        return found

    def __iter__(self) -> Iterator[T]:
        return iter(self.whole())

    def __add__(self, other: Sequence[T]) -> list[T]:
        return [*self.whole(), *other]

    def __radd__(self, other: Sequence[T]) -> list[T]:
        return [*other, *self.whole()]

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        if isinstance(other, (str, bytes)) or not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == len(self) and self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __copy__(self) -> Prefix[T]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefix[T]:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        import numpy as np

        whole = self.whole()
        return np.asarray(np.frombuffer(whole, np.int32) if isinstance(whole, array) else whole, dtype=dtype)


NO_TOKENS: Prefix[int] = Prefix(None, 0, array(TOKENS))
"""The prompt of a row that has no other tokens than its own."""


def shared_length(one: Prefix[T], other: Prefix[T]) -> int:
    """Return how many first items of both are known to be the same, without a look at each: 0 if that is not known."""
    shared = min(one.length, other.length) if one.shared is other.shared else 0
    end = shared + len(one.tail)
    if shared == one.length and end <= len(other) and other[shared:end] == list(one.tail):
        return end
    return shared


def begins(longer: Prefix[T], prompt: Prefix[T], rest: Sequence[T]) -> bool:
    """True if ``longer`` begins with ``prompt`` and then ``rest``. What both share is not compared."""
    end, known = len(prompt) + len(rest), shared_length(prompt, longer)
    return end <= len(longer) and longer[known:end] == [*prompt[known:], *rest]


def as_prefix(ids: Any) -> Prefix[int]:
    """Return token ids that a step or a sample keeps, as :meth:`Prefix.of_tokens` gives them."""
    return ids if isinstance(ids, Prefix) else Prefix.of_tokens(ids)


def as_tokens(ids: Iterable[int]) -> array[int]:
    """Return token ids as an array of int32. Raises ``ValueError`` and ``TypeError`` for what is no such id."""
    if isinstance(ids, array) and ids.typecode == TOKENS:
        return ids
    try:
        return array(TOKENS, ids)
    except OverflowError as error:
        raise ValueError(f"token ids: expected int32 numbers, {error}") from error


def _as(kind: type, items: Any) -> Any:
    return as_tokens(items) if kind is array else items if isinstance(items, list) else list(items)


class _Shared(property):
    """A field that keeps a :class:`Prefix` and gives a list: the whole is made where somebody asks for it."""

    def __init__(self, slot: Any) -> None:
        super().__init__(self._whole, slot.__set__)
        self.slot = slot

    def _whole(self, owner: Any) -> Any:
        kept = self.slot.__get__(owner)
        return kept.tolist() if isinstance(kept, Prefix) else kept


_AS_KEPT = "_kept_"
"""Begins the names of attributes that give a shared field as it is kept."""


def shares(*names: str) -> Any:
    """Let fields of a dataclass with slots keep a :class:`Prefix`; each access to them makes a list.

    :func:`kept` returns the prefix itself.
    """

    def decorate(kind: C) -> C:
        for name in names:
            slot = kind.__dict__[name]
            setattr(kind, name, _Shared(slot))
            setattr(kind, _AS_KEPT + name, slot)
        every = tuple(field.name for field in fields(kind))

        def getstate(self: Any) -> tuple[None, dict[str, Any]]:
            return None, {name: kept(self, name) for name in every if hasattr(self, name)}

        kind.__getstate__ = getstate  # type: ignore[method-assign, assignment]
        if not any("__setstate__" in base.__dict__ for base in kind.__mro__[1:]):
            kind.__setstate__ = _setstate  # type: ignore[attr-defined]
        return kind

    return decorate


def _setstate(self: Any, state: tuple[None, Mapping[str, Any]]) -> None:
    for name, value in state[1].items():
        object.__setattr__(self, name, value)


def kept(owner: Any, name: str) -> Any:
    """Return what a field keeps: a :class:`Prefix`, or the list that it was given."""
    shared = _AS_KEPT + name
    return getattr(owner, shared if hasattr(type(owner), shared) else name)


def prompt_tokens(owner: Any) -> Any:
    """Return the prompt's tokens of a step, sample, request or response as it keeps them: a sequence, not copied."""
    try:
        return owner._kept_prompt_token_ids
    except AttributeError:
        return owner.prompt_token_ids


def prompt_chat(step: Any) -> Any:
    """Return the chat of a step as it keeps it: a sequence, not copied."""
    return step._kept_prompt


@cache
def _reader(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the names of a class's fields, and what reads all of them as they are kept."""
    names = tuple(field.name for field in fields(kind))
    return names, attrgetter(*(_AS_KEPT + name if hasattr(kind, _AS_KEPT + name) else name for name in names))


def changed(value: T, **changes: Any) -> T:
    """Return a copy of an object of a dataclass with other fields, as ``dataclasses.replace`` does, but quickly.

    Its prompts stay shared. All fields must be arguments of the class, two or more. Unknown names raise ``TypeError``.
    """
    kind: Any = type(value)
    names, read = _reader(kind)
    made: T = kind(**(dict(zip(names, read(value), strict=True)) | changes))
    return made
